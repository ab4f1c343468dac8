"""Compares runs at an equal cost: as many steps, completions or seconds as the cheapest run has spent at its end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.report import costs
from rpg_jax.report.compare import Config, Run
from rpg_jax.report.progress import duration
from rpg_jax.report.seeds import QUANTITIES, CellScores, Mean, mean, paired_difference, ranks_of, scores_of
from rpg_jax.report.summary import evaluations

AXES = ("steps", "completions", "seconds")


@dataclasses.dataclass(frozen=True)
class Course:
    """A run with its evaluations by set, and its cost by axis: {step: cost from the start to the end of the step}.

    `report.costs` says what counts. An axis that some step does not record is left out.
    """

    run: Run
    evaluated: Mapping[str, Sequence[Mapping[str, Any]]]
    costs: Mapping[str, Mapping[int, float]]

    @classmethod
    def read(cls, run: Run) -> Course:
        records = [record for record in run.records if record["step"] > 0]
        steps = [record["step"] for record in records]
        found: dict[str, Sequence[float]] = {"steps": steps}
        size = run.config.get("rollout.group_size")
        if size and all("groups_generated" in record for record in records):
            found["completions"] = costs.completions(records, size)
        if all("seconds" in record for record in records):
            found["seconds"] = costs.seconds(records)
        by_step = {axis: {0: 0.0, **dict(zip(steps, spent, strict=True))} for axis, spent in found.items()}
        known = {axis: own for axis, own in by_step.items() if not math.isnan(sum(own.values()))}
        return cls(run, evaluations(run.folder), known)

    def spent(self, axis: str, step: int | None = None) -> float:
        """The cost up to the end of a step, by default of the last; up to the step before it if it is missing."""
        own = self.costs[axis]
        return own[max(s for s in own if step is None or s <= step)]

    def last_step(self, budget: Budget) -> int:
        """The last step by which the run has spent no more than the budget."""
        most = budget.amount * (1 + 1e-9)  # sums of seconds round
        return max(step for step, cost in self.costs[budget.axis].items() if cost <= most)

    def scores(self, step: int) -> CellScores:
        """The scores of each set by the evaluations up to a step."""
        return scores_of(self.evaluated, until=step)

    def evaluated_at(self, step: int) -> int:
        """The step of the last evaluation up to a step."""
        return max(r["step"] for records in self.evaluated.values() for r in records if r["step"] <= step)

    def late(self, key: str, step: int) -> float:
        """`costs.late` of the steps up to a step."""
        return costs.late([record for record in self.run.records if record["step"] <= step], key)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The cost at which runs are compared: what `run`, the cheapest, has spent at its end."""

    axis: str
    amount: float
    run: str

    @property
    def text(self) -> str:
        return duration(self.amount) if self.axis == "seconds" else f"{self.amount:,.0f} {self.axis}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A config within a budget.

    Attributes:
      seeds: runs with an evaluation.
      steps: the steps of their last evaluations within the budget.
      spent: {axis: the cost up to the last step within the budget, the mean over runs}.
      scores: {(set, quantity): score in %}.
      ranks: {(set, quantity): 1 for the best config of the column, 2 for the second}; see `seeds.ranks_of`.
      differences: {set: Last minus Last of the first config in points, paired by seed}.
      kl: KL to the reference in millinats per token, over the last third of the steps; None without this metric.
    """

    seeds: int
    steps: Sequence[int]
    spent: Mapping[str, float]
    scores: Mapping[tuple[str, str], Mean]
    ranks: Mapping[tuple[str, str], int]
    differences: Mapping[str, Mean]
    kl: Mean | None


def courses_of(configs: Sequence[Config]) -> list[list[Course]]:
    """The courses of the runs of each config."""
    return [[Course.read(run) for run in config.runs] for config in configs]


def budgets(courses: Sequence[Sequence[Course]]) -> list[Budget]:
    """One budget for each axis that every run records, in the order of `AXES`."""
    everyone = [course for own in courses for course in own]
    axes = [axis for axis in AXES if all(axis in course.costs for course in everyone)]
    totals = {axis: [course.spent(axis) for course in everyone] for axis in axes}
    cheapest = {axis: everyone[own.index(min(own))] for axis, own in totals.items()}
    return [Budget(axis, min(totals[axis]), course.run.name) for axis, course in cheapest.items()]


def mean_costs(courses: Sequence[Course], axis: str) -> list[float]:
    """The cost up to the end of step 0, 1, 2, …: the mean over runs, for the steps that all of them have reached."""
    last = int(min(course.spent("steps") for course in courses))
    return [float(f"{_mean([c.spent(axis, step) for c in courses]):.6g}") for step in range(last + 1)]


def results(courses: Sequence[Sequence[Course]], budget: Budget) -> list[Row]:
    """One row for each config: its scores by the last evaluation within the budget, with 95 % intervals over seeds."""
    cuts = [[(course, course.last_step(budget)) for course in own] for own in courses]
    scored = [[(c.run.config.get("seed"), s) for c, step in own if (s := c.scores(step))] for own in cuts]
    columns = list(dict.fromkeys((name, q) for own in scored for _, s in own for name in s for q in QUANTITIES))
    means: list[dict[tuple[str, str], Mean]] = [{} for _ in courses]
    ranked: list[dict[tuple[str, str], int]] = [{} for _ in courses]
    for name, quantity in columns:
        values = {i: [100 * s[name][quantity] for _, s in own if name in s] for i, own in enumerate(scored)}
        column = {i: mean(own) for i, own in values.items() if own}
        for i, m in column.items():
            means[i][name, quantity] = m
        for i, rank in zip(column, ranks_of(list(column.values())), strict=False):
            ranked[i][name, quantity] = rank
    rows = []
    for i, own in enumerate(cuts):
        kls = [1000 * value for course, step in own if not math.isnan(value := course.late("kl", step))]
        axes = [axis for axis in AXES if all(axis in course.costs for course, _ in own)]
        rows.append(
            Row(
                seeds=len(scored[i]),
                steps=sorted({course.evaluated_at(step) for course, step in own if course.scores(step)}),
                spent={axis: _mean([course.spent(axis, step) for course, step in own]) for axis in axes},
                scores=means[i],
                ranks=ranked[i],
                differences=_differences(scored[i], scored[0]) if i else {},
                kl=mean(kls) if kls else None,
            )
        )
    return rows


Scored = Sequence[tuple[int | None, CellScores]]  # (seed, scores) of each run


def _differences(row: Scored, baseline: Scored) -> dict[str, Mean]:
    found = {}
    for name in dict.fromkeys(name for _, scores in row for name in scores):
        mine, theirs = (
            {seed: 100 * scores[name]["last"] for seed, scores in own if seed is not None and name in scores}
            for own in (row, baseline)
        )
        if mine.keys() & theirs.keys():
            found[name] = paired_difference(mine, theirs)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
