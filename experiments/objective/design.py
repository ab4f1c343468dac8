"""The rows and the experiments: which KL term, how strong, how stale, how long; and the bound of equality.

A unit is a row of an experiment at one schedule: the runs of all its β, rates and seeds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.estimators.estimators import (
    ESTIMATORS,
    EXACT_TO_GO,
    NO_CLIP,
    STALE,
    TO_GO,
    WHOLE,
    Estimator,
    Scalar,
    library,
    rpg,
)
from experiments.objective.paths import PathSettings
from rpg_jax.losses.tokens import Tokens, bounded_exp

# Two rows are called equal where the whole 95 % interval of their difference lies within ± BOUND, and different where
# it lies elsewhere and excludes 0. Rewards lie between 0 and 1. Chosen before the runs.
BOUND = 0.01


def prefix_weighted(tokens: Tokens, kl_coef: Scalar) -> jax.Array:
    """URKL per token, weighted by the product of the earlier ratios, W_{<t}: with its own ratio W_{≤t} (CTPO)."""
    earlier = jnp.cumsum(tokens.log_w, axis=1) - tokens.log_w
    weight = jax.lax.stop_gradient(bounded_exp(earlier))
    return weight * library("rpg", divergence="urkl", clip="none")(tokens, kl_coef)


# The dual clip of the paper's recipes, of a token's w for each token.
CLIP: dict[str, Any] = {"clip": "dual", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": 10.0}
EXACT = "exact gradient of J"
NO_KL = Estimator("no KL (PPO)", "–", library("ppo", **NO_CLIP), "reverse")
UNCLIPPED = {
    e.key: e
    for e in (
        NO_KL,
        *(e for e in ESTIMATORS if e.term in ("k₁", "k₂", "k₃", "w·k₃")),
        rpg("per token", "urkl"),
        rpg(f"per token, {WHOLE}", "rkl", estimator="exact"),
        Estimator("per token, weight W of the prefix (CTPO)", "URKL", prefix_weighted, "reverse"),
        rpg(f"{STALE}, weight w", "urkl", level="sequence", kl_ratio="behaviour"),
        rpg("sequence, weight w", "urkl", level="sequence"),
        rpg("sequence, weight min(W, 2)", "urkl", level="sequence", weight="capped", weight_cap=2.0),
        rpg("sequence, weight W", "urkl", level="sequence", weight="product"),
        rpg(f"{TO_GO}, λ = 0.9", "urkl", level="to_go", trace_decay=0.9),
        rpg(TO_GO, "urkl", level="to_go"),
        rpg("to-go, weight W, λ = 0.9", "urkl", **EXACT_TO_GO | {"trace_decay": 0.9}),
        rpg("to-go, exact", "urkl", **EXACT_TO_GO),
        rpg(f"to-go, exact, {WHOLE}", "rkl", estimator="exact", **EXACT_TO_GO),
        rpg("per token", "ufkl"),
        rpg("sequence, weight w", "ufkl", level="sequence"),
    )
}
CLIPPED = {
    e.key: e
    for e in (
        Estimator("no KL, clip", "–", library("ppo", clip_low=0.2, clip_high=0.28), "reverse"),
        Estimator("per token (GRPO), clip", "k₃", library("grpo"), "reverse"),
        rpg("per token, clip", "urkl", **CLIP),
        rpg(f"{STALE}, weight w, clip", "urkl", level="sequence", kl_ratio="behaviour", **CLIP),
        rpg("sequence, weight w, clip", "urkl", level="sequence", **CLIP),
        rpg("sequence, weight min(W, 2), clip", "urkl", level="sequence", weight="capped", weight_cap=2.0, **CLIP),
        rpg(f"{TO_GO}, clip", "urkl", level="to_go", **CLIP),
    )
}
ROWS: Mapping[str, Estimator] = UNCLIPPED | CLIPPED
BASELINE = "sequence, weight w: URKL"
CAPPED = "sequence, weight min(W, 2): URKL"
TOKEN, GRPO, K1 = "per token: URKL", "per token (GRPO): k₃", "per token (Tunix): k₁"
IN_REWARD = f"{STALE}, weight w: URKL"
ALL = (EXACT, *UNCLIPPED)
BY_RATE = (BASELINE, CAPPED, "sequence, weight W: URKL", IN_REWARD, f"{TO_GO}: URKL", *CLIPPED)
FEW = (EXACT, BASELINE, "sequence, weight W: URKL", IN_REWARD, f"{TO_GO}: URKL", "to-go, exact: URKL", TOKEN, GRPO)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a run uses its samples; see `training.Lane`."""

    updates_a_batch: int = 8
    reference_batches: int = 0
    token_mean: bool = False


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs of every row with every β and schedule.

    Attributes:
      rows: `EXACT`, or keys of `ROWS`.
      kl_coefs: β.
      schedules: how samples are used.
      changes: settings of the task that differ.
      wrong: the verifier pays for END at once as well.
      rates: of Adam, in place of the chosen one.
    """

    rows: Sequence[str] = ALL
    kl_coefs: Sequence[float] = (0.1,)
    schedules: Sequence[Schedule] = (Schedule(),)
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wrong: bool = False
    rates: Sequence[float] = ()


RATES = (3e-3, 1e-2, 3e-2)
KL_COEFS, THREE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), (0.02, 0.1, 0.5)
STALENESS, TOKEN_MEAN = ([Schedule(n, token_mean=mean) for n in (1, 8, 64)] for mean in (False, True))
EXPERIMENTS: Mapping[str, Experiment] = {
    "staleness": Experiment(kl_coefs=KL_COEFS, schedules=STALENESS),
    "wrong verifier": Experiment(kl_coefs=THREE, wrong=True),
    "short": Experiment(FEW, changes={"ends": 1 / 4}),
    "long": Experiment(FEW, changes={"ends": 1 / 16, "longest": 60}),
    "token mean": Experiment(tuple(UNCLIPPED), KL_COEFS, schedules=TOKEN_MEAN),
    "iterative": Experiment(schedules=(Schedule(8, reference_batches=2),)),
    "clipped": Experiment(tuple(CLIPPED), schedules=STALENESS[1:]),
    "longer": Experiment(schedules=STALENESS, changes={"updates": 6_400}),
    "longer, by rate": Experiment(BY_RATE, schedules=STALENESS[2:], changes={"updates": 6_400}, rates=RATES),
}


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """Settings of the experiments.

    Attributes:
      task: of experiments that change nothing.
      seeds: runs that are reported; a seed draws the reference, the graphs, the weights and the samples.
      rates: of Adam; a row takes, for each staleness, the one with the least regret in the mean of `scan_seeds`, at
        β = 0.1 in the task of most experiments.
      scan_seeds: seeds of that scan, which are not reported.
      experiments: by name.
    """

    task: PathSettings = PathSettings()
    seeds: Sequence[int] = tuple(range(20))
    rates: Sequence[float] = RATES
    scan_seeds: Sequence[int] = tuple(range(100, 108))
    experiments: Mapping[str, Experiment] = dataclasses.field(default_factory=lambda: dict(EXPERIMENTS))


SCAN = "learning rates"


@dataclasses.dataclass(frozen=True)
class Unit:
    """Runs that one task of the pool makes: every seed with every pair of a β and a rate.

    Attributes:
      experiment: its name, or `SCAN`.
      row: `EXACT`, or a key of `ROWS`.
      task: the settings of the task.
    """

    experiment: str
    row: str
    schedule: Schedule
    task: PathSettings
    kl_coefs: Sequence[float]
    rates: Sequence[float]
    seeds: Sequence[int]
    wrong: bool = False

    @property
    def name(self) -> str:
        s = self.schedule
        moves = f", reference every {s.reference_batches} batches" * bool(s.reference_batches)
        return f"{self.experiment} | {self.row} | {s.updates_a_batch} updates a batch, {self.task.updates:,}{moves}"


def scan_units(s: ObjectiveSettings) -> list[Unit]:
    """The runs that choose the learning rates: each row at each staleness that is used."""
    wanted = {
        (row, schedule.updates_a_batch): None for e in s.experiments.values() for row, schedule in rows_and_schedules(e)
    }
    return [Unit(SCAN, row, Schedule(n), s.task, (0.1,), s.rates, s.scan_seeds) for row, n in wanted]


def units(s: ObjectiveSettings, name: str, rates: Mapping[tuple[str, int], float]) -> list[Unit]:
    """The reported runs of an experiment; `rates` has the rate of (row, updates a batch)."""
    e = s.experiments[name]
    task = dataclasses.replace(s.task, **e.changes)
    return [
        Unit(name, row, how, task, e.kl_coefs, e.rates or (rates[row, how.updates_a_batch],), s.seeds, e.wrong)
        for row, how in rows_and_schedules(e)
    ]


def rows_and_schedules(e: Experiment) -> list[tuple[str, Schedule]]:
    """`EXACT` has no samples, so it is trained with 8 updates a batch alone."""
    return [(row, x) for x in e.schedules for row in e.rows if row != EXACT or x.updates_a_batch == 8]


def count_units(s: ObjectiveSettings) -> int:
    return len(scan_units(s)) + sum(len(rows_and_schedules(e)) for e in s.experiments.values())
