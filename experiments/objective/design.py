"""Experiments that measure which objective a loss ascends: real models, sampled gradients, exact end points.

A unit is a compiled program: an estimator, a schedule and a length; it makes the runs of all its β and seeds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from experiments.completions.estimators import (
    ESTIMATORS,
    LOG_VARIANCE,
    NO_CLIP,
    ONE,
    STALE,
    TO_GO,
    Estimator,
    each,
    library,
)
from experiments.objective.paths import PathSettings, Schedule

NO_KL = Estimator("no KL (PPO)", "–", library("ppo", **NO_CLIP), "reverse")
ROWS: Mapping[str, Estimator] = MappingProxyType(
    {
        e.key: e
        for e in (
            *each("sequence, weight w", level="sequence"),
            *each("sequence, weight W", level="sequence", weight="product"),
            *each("sequence, weight min(W, C)", level="sequence", weight="capped"),
            *each("sequence, weight 1", **ONE),
            *each(TO_GO, level="to_go"),
            *each("per token"),
            *(e for e in ESTIMATORS if e.name in (LOG_VARIANCE, f"{STALE}, weight w")),
            *(e for e in ESTIMATORS if e.term in ("k₃", "w·k₃", "k₂", "k₁")),
            NO_KL,
        )
    }
)
BASELINE = "sequence, weight w: URKL"
_SEQUENCE = ("sequence, weight w: UFKL", "sequence, weight W: URKL", "sequence, weight 1: URKL")
_LIBRARIES = (
    "per token (GRPO): k₃",
    "per token (corrected GRPO): w·k₃",
    "per token: k₂",
    "per token (Tunix): k₁",
)
_IN_REWARD = f"{STALE}, weight w: URKL"
MAIN = (
    *(BASELINE, *_SEQUENCE, f"{LOG_VARIANCE}: URKL", _IN_REWARD, f"{TO_GO}: URKL"),
    *("per token: URKL", "per token: UFKL", *_LIBRARIES, NO_KL.key),
)
FEW = (BASELINE, "sequence, weight W: URKL", _IN_REWARD, f"{TO_GO}: URKL", "per token: URKL", _LIBRARIES[0], NO_KL.key)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs of every row with every β and schedule.

    Attributes:
      rows: keys of `ROWS`.
      kl_coefs: β.
      schedules: how often π_old and π_ref move.
      lengths: of completions.
      wrong: the verifier pays for a shortcut as well.
      updates: of a run; 0 takes those of the task. Other updates have a scan of learning rates of their own.
    """

    rows: Sequence[str] = MAIN
    kl_coefs: Sequence[float] = (0.1,)
    schedules: Sequence[Schedule] = (Schedule(),)
    lengths: Sequence[int] = (5,)
    wrong: bool = False
    updates: int = 0


KL_COEFS = (0.02, 0.05, 0.1, 0.2, 0.5)
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "strengths": Experiment(kl_coefs=KL_COEFS),
        "updates": Experiment(schedules=(Schedule(1), Schedule(32))),
        "wrong verifier": Experiment(FEW, KL_COEFS, wrong=True),
        "iterative": Experiment(schedules=(Schedule(8, 2),)),
        "lengths": Experiment(FEW, lengths=(12, 30)),
        "others": Experiment([row for row in ROWS if row not in MAIN]),
        "longer": Experiment((BASELINE, _IN_REWARD, f"{TO_GO}: URKL"), updates=6_400),
        "longer, per token": Experiment(("per token: URKL", _LIBRARIES[0]), KL_COEFS, updates=6_400),
    }
)


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the experiments.

    Attributes:
      task: its length is that of the experiments that name no other.
      seeds: runs that are reported; a seed draws the weights, the graphs and the samples.
      rates: of Adam; each row takes the one with the least regret in the mean of `scan_seeds`.
      scan_seeds: seeds of that scan, which are not reported.
      experiments: by name.
    """

    task: PathSettings = PathSettings()
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    rates: Sequence[float] = (5e-4, 1e-3, 2e-3)
    scan_seeds: Sequence[int] = (100, 101)
    experiments: Mapping[str, Experiment] = dataclasses.field(default_factory=lambda: dict(EXPERIMENTS))


SCAN = "learning rates"
Record = dict[str, Any]  # a run: row, experiment, schedule, length, rate, seed, β, and what `judge` found


@dataclasses.dataclass(frozen=True)
class Unit:
    """One compiled program and all its runs.

    Attributes:
      experiment: its name, or `SCAN`.
      row: key of `ROWS`.
      rates: of Adam; every run is made with each.
      updates: of a run; 0 takes those of the task.
    """

    experiment: str
    row: str
    length: int
    schedule: Schedule
    kl_coefs: Sequence[float]
    rates: Sequence[float]
    seeds: Sequence[int]
    wrong: bool = False
    updates: int = 0

    @property
    def name(self) -> str:
        schedule = f"{self.schedule.updates_a_batch} updates a batch"
        moves = f", reference every {self.schedule.reference_batches} batches" * bool(self.schedule.reference_batches)
        many = f", {self.updates:,} updates" * bool(self.updates)
        return f"{self.experiment} | {self.row} | {self.length} tokens, {schedule}{moves}{many}"


def scan_name(updates: int) -> str:
    """The name of the scan that chooses the learning rates of runs of so many updates; 0: those of the task."""
    return f"{SCAN}, {updates:,} updates" if updates else SCAN


def scan_units(s: ObjectiveSettings, name: str) -> list[Unit]:
    """The runs that choose the learning rates of an experiment's rows."""
    updates = s.experiments[name].updates
    each = (0.1,), s.rates, s.scan_seeds, False, updates
    return [Unit(scan_name(updates), row, s.task.length, Schedule(), *each) for row in s.experiments[name].rows]


def units(s: ObjectiveSettings, name: str, rates: Mapping[str, float]) -> list[Unit]:
    """The reported runs of an experiment, each row with its learning rate."""
    experiment = s.experiments[name]
    return [
        Unit(
            *(name, row, length, schedule, experiment.kl_coefs),
            (rates[row],),
            s.seeds,
            experiment.wrong,
            experiment.updates,
        )
        for length in experiment.lengths
        for schedule in experiment.schedules
        for row in experiment.rows
    ]


def count_units(s: ObjectiveSettings) -> int:
    scans = {unit.name for name in s.experiments for unit in scan_units(s, name)}
    reported = (units(s, name, dict.fromkeys(e.rows, 0.0)) for name, e in s.experiments.items())
    return len(scans) + sum(map(len, reported))
