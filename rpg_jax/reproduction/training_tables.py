"""Describes the training of a table's runs: dynamics, completions generated, accuracy at equal cost."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report import markdown
from rpg_jax.report.run_files import read_config, read_metrics, series
from rpg_jax.report.seeds import Mean, mean, paired_difference
from rpg_jax.report.summary import evaluations
from rpg_jax.reproduction.figures import DYNAMICS
from rpg_jax.reproduction.tables import Cell, Table
from rpg_jax.training.reference_rules import make_rule
from rpg_jax.types import Count

UNEQUAL = 0.05  # share of a row's completions; one more batch, for a lack of mixed groups, costs 1 to 2 %
ROUNDING = 5e-5  # of a shown number


@dataclasses.dataclass(frozen=True)
class Course:
    """The course of one run: metrics of steps 1, 2, …, the resolved config, and what `summary.evaluations` returns."""

    records: list[dict[str, Any]]
    config: dict[str, Any]
    evaluated: dict[str, list[dict[str, Any]]]

    @property
    def ended(self) -> bool:
        """Whether all steps are done."""
        return len(self.records) == self.config["train"]["steps"]

    def late(self, metric: str, steps: int | None = None) -> float:
        """Mean of a metric over the last third of the first `steps` steps (default: of all); nan without a value."""
        _, values = series(self.records[:steps], metric)
        third = values[-max(1, len(values) // 3) :]
        return sum(third) / len(third) if third else math.nan

    def completions(self) -> list[int]:
        """Completions generated up to the end of each step. Dynamic sampling does not train all of them."""
        size = self.config["rollout"]["group_size"]
        return [size * groups for groups in itertools.accumulate(r["groups_generated"] for r in self.records)]

    def steps_within(self, completions: float) -> int:
        """The number of steps that use at most this many completions."""
        return sum(generated <= completions for generated in self.completions())

    def scores(self, steps: int) -> dict[str, dict[str, Any]]:
        """{set: the last evaluation within the first `steps` steps}."""
        up_to = {name: [r for r in records if r["step"] <= steps] for name, records in self.evaluated.items()}
        return {name: records[-1] for name, records in up_to.items() if records}

    def reference(self) -> str | None:
        """The policy that anchors the KL term; None for the behaviour policy."""
        c = self.config["reference"]
        numbers = {name: c[name] for name in ("kl_threshold", "kl_decay")}
        return make_rule(c["rule"], every=Count.parse(c["every"], "reference.every"), **numbers).anchor()


Courses = dict[str, dict[int, Course]]  # {row: {seed: course}}


def courses(cells: Sequence[Cell], out: Path) -> Courses:
    """Reads the runs that have taken a step."""
    found: Courses = {}
    for cell in cells:
        run = out / "runs" / cell.name
        if records := [record for record in read_metrics(run) if "groups_generated" in record]:
            course = Course(records, read_config(run), evaluations(run))
            found.setdefault(cell.row, {})[cell.seed] = course
    return found


def training_table(table: Table, rows: Courses) -> list[str]:
    """Paragraphs and a table: metrics over the last third of the steps, and completions generated.

    The difference in training accuracy to the compared row is paired by seed. Training accuracy averages many more
    completions than held-out accuracy: it has far less noise.
    """
    heads = [*DYNAMICS, "KL to the reference, millinats per token", "Completions generated", "difference in accuracy"]
    accuracy = {row: {seed: 100 * c.late("accuracy") for seed, c in by_seed.items()} for row, by_seed in rows.items()}
    lines, critics = [], []
    for row, by_seed in rows.items():
        texts = [_late(by_seed, key, scale) for key, scale in DYNAMICS.values()]
        texts += [_reference(by_seed), f"{_completions(by_seed):,.0f}"]
        lines.append([row, *texts, *_difference(table, row, accuracy)])
        if (explained := _late(by_seed, "explained_variance")) != "–":
            critics.append(
                f"The critic of {row} explains {explained} of the variance of the returns; its mean value is "
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
        *critics,
    ]


def at_equal_completions(table: Table, rows: Courses) -> list[str]:
    """Paragraphs and a table: every row after as many completions as the cheapest row generates in its whole run.

    Nothing if all rows generate about equally many. Runs that have not ended are left out.
    """
    ended = _only(lambda course: course.ended, rows)
    totals = [_completions(by_seed) for by_seed in ended.values()]
    if not totals or max(totals) <= (1 + UNEQUAL) * min(totals):
        return []
    budget = min(totals)
    return [
        f"The cheapest row generates {budget:,.0f} completions in its whole run; other rows generate up to "
        f"{max(totals):,.0f}.\n"
        f"Each row is shown at the last step by which it has generated no more than {budget:,.0f} completions. A row "
        "that generates more completions for an update has had fewer updates by then.",
        "Accuracy while training is the mean over the last third of the steps up to that step; other scores are Mean@k "
        "of the last evaluation up to that step. All are in %.\n"
        "Differences (Δ) are paired by seed, in points; one in *italics* has a 95 % interval that excludes 0.",
        _equal_table(table, _only(lambda course: course.steps_within(budget) > 0, ended), budget),
    ]


def _only(keep: Callable[[Course], bool], rows: Courses) -> Courses:
    kept = {row: {seed: course for seed, course in by_seed.items() if keep(course)} for row, by_seed in rows.items()}
    return {row: by_seed for row, by_seed in kept.items() if by_seed}


def _equal_table(table: Table, rows: Courses, budget: float) -> str:
    steps = {(row, s): c.steps_within(budget) for row, by_seed in rows.items() for s, c in by_seed.items()}
    columns: dict[str, dict[str, dict[int, float]]] = {"while training": {}}  # {column: {row: {seed: %}}}
    evaluated: dict[str, set[int]] = {}
    for row, by_seed in rows.items():
        for seed, course in by_seed.items():
            columns["while training"].setdefault(row, {})[seed] = 100 * course.late("accuracy", steps[row, seed])
            for name, record in course.scores(steps[row, seed]).items():
                columns.setdefault(name, {}).setdefault(row, {})[seed] = 100 * record["mean_at_k"]
                evaluated.setdefault(row, set()).add(record["step"])
    lines = []
    for row, by_seed in rows.items():
        at, scored = _span({steps[row, seed] for seed in by_seed}), _span(evaluated.get(row, set()))
        updates = {c.records[steps[row, seed] - 1]["updates"] for seed, c in by_seed.items()}
        means = [mean(list(by_row[row].values())) if row in by_row else None for by_row in columns.values()]
        values = [f"{m.value:.1f}{m.margin}" if m else "–" for m in means]
        differences, others = zip(*(_difference(table, row, by_row) for by_row in columns.values()), strict=True)
        at = at if scored == at else f"{at}, evaluated at {scored}"
        lines.append([row, at, _span(updates), *values, *differences, others[0]])
    heads = ["step", "updates", *columns, *(f"Δ {name}" for name in columns)]
    return markdown.table(["", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads)))


def _completions(by_seed: Mapping[int, Course]) -> float:
    """Completions of a run, the mean over seeds."""
    return sum(course.completions()[-1] for course in by_seed.values()) / len(by_seed)


def _reference(by_seed: Mapping[int, Course]) -> str:
    """KL(π_old‖π_ref) in millinats per token, and the name of π_ref.

    It is the difference of two metrics: the mean of log π_θ/π_ref minus the mean of log π_θ/π_old.
    """
    anchor = next(iter(by_seed.values())).reference()
    values = [1000 * (course.late("kl_k1") - course.late("behaviour_kl_k1")) for course in by_seed.values()]
    return f"{significant(mean(values))} ({anchor})" if anchor else "–"


def _late(by_seed: Mapping[int, Course], metric: str, scale: float = 1) -> str:
    values = [scale * course.late(metric) for course in by_seed.values()]
    return "–" if math.isnan(sum(values)) else significant(mean(values))


def _difference(table: Table, row: str, values: Mapping[str, Mapping[int, float]]) -> tuple[str, str]:
    """`values` of a row minus those of the compared row, paired by seed; and the name of the compared row."""
    other = table.compared_with(row)
    mine, theirs = values.get(row, {}), values.get(other, {})
    if row == other or not mine.keys() & theirs.keys():
        return "–", "–"
    return starred(paired_difference(mine, theirs)), other


def _span(numbers: Collection[int]) -> str:
    """The least and the largest number, as in 29–31; one number if they are equal; – without any."""
    return "–".join(str(n) for n in sorted({min(numbers), max(numbers)})) if numbers else "–"


def starred(points: Mean) -> str:
    """A difference in points, in italics if its interval excludes 0."""
    text = f"{points.value:+.1f}{points.margin}"
    return f"*{text}*" if abs(points.value) > points.half else text


def significant(m: Mean) -> str:
    """A mean with as many decimals as give the interval two digits; 0 if only rounding keeps it from 0."""
    if abs(m.value) < ROUNDING and not m.half >= ROUNDING:
        return "0"
    if not m.half > 0:
        return f"{m.value:.3g}"
    decimals = max(0, 1 - math.floor(math.log10(m.half)))
    return f"{m.value:.{decimals}f} ± {m.half:.{decimals}f}"
