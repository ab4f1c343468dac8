"""Describes the training of a table's runs: dynamics, completions generated, the critic; rows at equal costs."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from rpg_jax.report import markdown
from rpg_jax.report.seeds import Mean, mean, over_starts, paired_difference, pooled, tally
from rpg_jax.reproduction.results import DYNAMICS, Evaluations, Record, Rows, Run
from rpg_jax.reproduction.table import Table

ROUNDING = 5e-5  # of a shown number
UNEQUAL = 0.05  # share of a row's cost; one more batch, for a lack of mixed groups, costs 1 to 2 %


def training_table(table: Table, rows: Rows) -> list[str]:
    """Paragraphs and a table: metrics over the last third of the steps, and completions generated.

    The difference in training accuracy to the compared row is paired by seed. Training accuracy averages many more
    completions than held-out accuracy: it has far less noise.
    """
    dynamics = {
        title: (key, scale)
        for title, (key, scale) in DYNAMICS.items()
        if any(_late(by_seed, key, scale) != "–" for by_seed in rows.values())
    }
    heads = [*dynamics, "KL to the reference, millinats per token", "Completions generated", "difference in accuracy"]
    accuracy = {row: {seed: 100 * c.late("accuracy") for seed, c in by_seed.items()} for row, by_seed in rows.items()}
    lines, critics = [], []
    for row, by_seed in rows.items():
        texts = [_late(by_seed, key, scale) for key, scale in dynamics.values()]
        texts += [_reference(by_seed), f"{_completions(by_seed):,.0f}"]
        lines.append([row, *texts, *difference(table, row, accuracy)])
        if (explained := _late(by_seed, "explained_variance")) != "–":
            critics.append(
                f"Critic of the row {row}: it explains {explained} of the variance of the returns; its mean value is "
                f"{_late(by_seed, 'value')}, the mean return {_late(by_seed, 'return')}."
            )
    return [
        "Means over the last third of the steps, ± as above. The difference in accuracy is paired by seed, in points.\n"
        "The number of completions generated counts all steps; it is a cost.",
        "The KL to the behaviour policy is KL(π_old‖π_θ), the mean of log π_old/π_θ; the KL to the reference is "
        "KL(π_old‖π_ref), the mean of log π_old/π_ref.\n"
        "Both are means over the trained tokens, which π_old sampled. Dynamic sampling trains mixed groups only.",
        "The reference stands in brackets; KLs to different references cannot be compared. initial: the policy at the "
        "start of the run; every K: the policy after the last multiple of K steps or updates;\n"
        "κ: the policy at the end of the last step in which the average passed κ nats; –: the behaviour policy itself.",
        markdown.table(["", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads))),
        *all_differences(table, {"training accuracy": accuracy}),
        *critics,
    ]


def all_differences(table: Table, columns: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """Paragraphs on the differences of {column: {row: {seed: points}}} to the compared rows: the tally of all columns,
    and the mean of rows that are one algorithm."""
    differences = []
    for values in columns.values():
        for row, by_seed in values.items():
            others = values.get(table.compared_with(row), {})
            if row != table.compared_with(row) and by_seed.keys() & others.keys():
                differences.append(paired_difference(by_seed, others))
    parts = [tally(differences)] if len(differences) > 1 else []
    for name, rows in table.pooled.items():
        if all({*rows, table.baseline} <= values.keys() for values in columns.values()):
            found = [
                f"{column} {starred(paired_difference(pooled(values, rows), values[table.baseline]))}"
                for column, values in columns.items()
            ]
            parts.append(
                f"Of {name}, which are one algorithm here, differences from each other are noise. Their mean minus "
                f"{table.baseline}: {', '.join(found)}."
            )
    for name, rows in table.starts.items():
        compared = [table.compared_with(row) for row in rows]
        if compared != list(rows) and all({*rows, *compared} <= values.keys() for values in columns.values()):
            found = [f"{column} {starred(over_starts(v, rows, compared))}" for column, v in columns.items()]
            parts.append(f"Over {len(rows)} starts, each the mean of its seeds, {name}: {', '.join(found)}.")
    return parts


def _completions(by_seed: Mapping[int, Run]) -> float:
    """Completions of a run, the mean over seeds."""
    return sum(run.completions()[-1] for run in by_seed.values()) / len(by_seed)


def _reference(by_seed: Mapping[int, Run]) -> str:
    """KL(π_old‖π_ref) in millinats per token, and the name of π_ref.

    It is the sum of two metrics: the mean of log π_θ/π_ref and the mean of log π_old/π_θ.
    """
    anchor = next(iter(by_seed.values())).reference()
    values = [1000 * (run.late("kl_k1") + run.late("behaviour_forward_kl_k1")) for run in by_seed.values()]
    return f"{significant(mean(values))} ({anchor})" if anchor else "–"


def _late(by_seed: Mapping[int, Run], metric: str, scale: float = 1) -> str:
    values = [scale * run.late(metric) for run in by_seed.values()]
    return "–" if math.isnan(sum(values)) else significant(mean(values))


def difference(table: Table, row: str, values: Mapping[str, Mapping[int, float]]) -> tuple[str, str]:
    """`values` of a row minus those of the compared row, paired by seed; and the name of the compared row."""
    other = table.compared_with(row)
    mine, theirs = values.get(row, {}), values.get(other, {})
    if row == other or not mine.keys() & theirs.keys():
        return "–", "–"
    return starred(paired_difference(mine, theirs)), other


def starred(points: Mean) -> str:
    """A difference in points, in italics if its interval excludes 0."""
    text = f"{points.value:+.1f}{points.margin}"
    return f"*{text}*" if points.excludes_zero else text


def significant(m: Mean) -> str:
    """A mean with as many decimals as give the interval two digits; 0 if only rounding keeps it from 0."""
    if abs(m.value) < ROUNDING and not m.half >= ROUNDING:
        return "0"
    if not m.half > 1e-9 * abs(m.value):  # one seed, or equal numbers up to rounding
        return f"{m.value:.3g}"
    decimals = max(0, 1 - math.floor(math.log10(m.half)))
    return f"{m.value:.{decimals}f} ± {m.half:.{decimals}f}"


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


def equal_cost(table: Table, rows: Rows) -> list[str]:
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
