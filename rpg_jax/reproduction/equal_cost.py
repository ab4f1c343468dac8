"""Compares rows at equal updates, equal completions and equal seconds."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from rpg_jax.report import markdown
from rpg_jax.report.seeds import mean
from rpg_jax.reproduction.results import Evaluations, Record, Rows, Run
from rpg_jax.reproduction.table import Table
from rpg_jax.reproduction.training_tables import difference

UNEQUAL = 0.05  # share of a row's cost; one more batch, for a lack of mixed groups, costs 1 to 2 %


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a row spends: its name, the amount up to each step of a run, and how an amount is written."""

    name: str
    of: Callable[[Run], Sequence[float]]
    unit: str
    note: str = ""

    def shown(self, amount: float) -> str:
        return f"{amount:,.0f} {self.unit}"


COSTS = (
    Cost("updates", Run.updates, "updates"),
    Cost("completions", Run.completions, "completions"),
    Cost(
        "seconds",
        Run.seconds,
        "seconds",
        "Seconds are the wall time of training steps, without evaluations and checkpoints; a step that compiled counts "
        "as the run's median step. They hold for this machine and this program: runs and other work that share the "
        "machine slow each other, so a difference of some percent between rows need not be theirs.",
    ),
)


def sections(table: Table, rows: Rows) -> list[str]:
    """An overview of the differences in training accuracy, then paragraphs and a table for each cost that differs.

    Runs that have not ended are left out. Nothing if the rows differ in no cost.
    """
    ended = _only(lambda run: run.ended, rows)
    budgets = {cost: budget for cost in COSTS if (budget := _budget(cost, ended))}
    unequal = [cost for cost, (least, most) in budgets.items() if most > (1 + UNEQUAL) * least]
    if not unequal:
        return []
    parts = [
        "The cheapest row sets the budget of its cost: what it spends in its whole run. Each row is shown at the last "
        "step within that budget; a row that spends more for an update has had fewer updates by then.",
        "Accuracy while training is the mean over the last third of the steps up to that step; other scores are Mean@k "
        "of the last evaluation up to that step. All are in %.\n"
        "Differences (Δ) are paired by seed, in points; one in *italics* has a 95 % interval that excludes 0. "
        "None of these comparisons is the fair one: each answers a question of its own.",
        _overview(table, ended, budgets),
    ]
    for cost in unequal:
        least, most = budgets[cost]
        parts += [
            f"### At equal {cost.name}",
            f"The cheapest row spends {cost.shown(least)}, the dearest {cost.shown(most)}. {cost.note}".strip(),
            _equal_table(table, ended, cost, least),
        ]
    return parts


def _budget(cost: Cost, rows: Rows) -> tuple[float, float] | None:
    """The least and the largest mean total of a row; None where it is not known for every run."""
    totals = [mean([cost.of(run)[-1] for run in by_seed.values()]).value for by_seed in rows.values()]
    return (min(totals), max(totals)) if totals and not math.isnan(sum(totals)) else None


def _steps(cost: Cost, run: Run, budget: float) -> int:
    """The number of steps that spend at most `budget`."""
    return sum(spent <= budget for spent in cost.of(run))


def _overview(table: Table, rows: Rows, budgets: Mapping[Cost, tuple[float, float]]) -> str:
    """Differences in training accuracy at each cost."""
    by_cost = []
    for cost, (budget, _) in budgets.items():
        within = _only(lambda run, cost=cost, budget=budget: _steps(cost, run, budget) > 0, rows)  # type: ignore[misc]
        accuracy = {
            row: {seed: 100 * run.late("accuracy", _steps(cost, run, budget)) for seed, run in by_seed.items()}
            for row, by_seed in within.items()
        }
        by_cost.append({row: difference(table, row, accuracy) for row in rows})
    lines = [
        [row, *(of[row][0] for of in by_cost), table.compared_with(row)]
        for row in rows
        if any(of[row][0] != "–" for of in by_cost)
    ]
    heads = [f"Δ at {cost.shown(least)}" for cost, (least, _) in budgets.items()]
    return markdown.table(["training accuracy", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads)))


def _only(keep: Callable[[Run], bool], rows: Rows) -> Rows:
    kept = {row: {seed: run for seed, run in by_seed.items() if keep(run)} for row, by_seed in rows.items()}
    return {row: by_seed for row, by_seed in kept.items() if by_seed}


def _equal_table(table: Table, all_rows: Rows, cost: Cost, budget: float) -> str:
    rows = _only(lambda run: _steps(cost, run, budget) > 0, all_rows)
    steps = {(row, s): _steps(cost, run, budget) for row, by_seed in rows.items() for s, run in by_seed.items()}
    columns: dict[str, dict[str, dict[int, float]]] = {"while training": {}}  # {column: {row: {seed: %}}}
    evaluated: dict[str, set[int]] = {}
    for row, by_seed in rows.items():
        for seed, run in by_seed.items():
            columns["while training"].setdefault(row, {})[seed] = 100 * run.late("accuracy", steps[row, seed])
            for name, record in _scores(run.evaluations(), steps[row, seed]).items():
                columns.setdefault(name, {}).setdefault(row, {})[seed] = 100 * record["mean_at_k"]
                evaluated.setdefault(row, set()).add(record["step"])
    lines = []
    for row, by_seed in rows.items():
        at, scored = _span({steps[row, seed] for seed in by_seed}), _span(evaluated.get(row, set()))
        updates = {run.trained[steps[row, seed] - 1]["updates"] for seed, run in by_seed.items()}
        means = [mean(list(by_row[row].values())) if row in by_row else None for by_row in columns.values()]
        values = [f"{m.value:.1f}{m.margin}" if m else "–" for m in means]
        differences, others = zip(*(difference(table, row, by_row) for by_row in columns.values()), strict=True)
        at = at if scored == at else f"{at}, evaluated at {scored}"
        lines.append([row, at, _span(updates), *values, *differences, others[0]])
    heads = ["step", "updates", *columns, *(f"Δ {name}" for name in columns)]
    return markdown.table(["", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads)))


def _scores(evaluated: Evaluations, steps: int) -> dict[str, Record]:
    """{set: the last evaluation within the first `steps` steps}."""
    up_to = {name: [r for r in records if r["step"] <= steps] for name, records in evaluated.items()}
    return {name: records[-1] for name, records in up_to.items() if records}


def _span(numbers: Collection[int]) -> str:
    """The least and the largest number, as in 29–31; one number if they are equal; – without any."""
    return "–".join(str(n) for n in sorted({min(numbers), max(numbers)})) if numbers else "–"
