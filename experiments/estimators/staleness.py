"""How far one update's gradient is from the gradient of J, by staleness and length: bias and noise by exact sums.

An update averages N independent completions of a prompt. Its relative error is sqrt(bias² + noise² / N) with
bias = |E g − ∇J| / |∇J| and noise = sqrt(tr Cov g) / |∇J|: of the whole loss, without a clip, for J of completions.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from experiments import kept
from experiments.estimators.completions import CompletionSettings, drifting
from experiments.estimators.estimators import EXACT_TO_GO, NO_CLIP, STALE, TO_GO, Estimator, library, rpg
from experiments.estimators.results import panel
from experiments.estimators.sums import batched, exact_gradient, moments, norm, relative_error
from experiments.estimators.trees import Prompt, Tree
from rpg_jax.report import plots
from rpg_jax.report.plots import MUTED

ROWS = (
    Estimator("no KL term", "none", library("ppo", **NO_CLIP), "reverse"),
    rpg("per token", "urkl"),
    Estimator("per token (GRPO)", "k₃", library("grpo", **NO_CLIP), "reverse"),
    rpg("sequence, weight w", "urkl", level="sequence"),
    rpg("sequence, weight min(W, 2)", "urkl", level="sequence", weight="capped", weight_cap=2.0),
    rpg("sequence, weight W", "urkl", level="sequence", weight="product"),
    rpg(TO_GO, "urkl", level="to_go"),
    rpg("to-go, exact", "urkl", **EXACT_TO_GO),
    rpg(STALE, "urkl", level="sequence", kl_ratio="behaviour"),
)


@dataclasses.dataclass(frozen=True)
class StalenessSettings:
    """Settings of the map; distances are in nats a token.

    Attributes:
      actions, lengths: V, and each T.
      drifts: KL(π_θ‖π_old).
      behaviour_kl: KL(π_old‖π_ref).
      kl_coef: β.
      prompts: random prompts; results are medians over them.
      completions: N of an update.
    """

    actions: int = 2
    lengths: tuple[int, ...] = (4, 6, 8, 10, 12)
    drifts: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)
    behaviour_kl: float = 1 / 6
    kl_coef: float = 0.1
    prompts: int = 32
    completions: tuple[int, ...] = (16, 512, 16384)


Map = dict[str, dict[str, list[list[float]]]]  # {row: {"bias", "noise": [length][drift]}}


def run(s: StalenessSettings) -> Map:
    """Medians over the prompts."""
    found: Map = {row.key: {"bias": [], "noise": []} for row in ROWS}
    for length in s.lengths:
        tree, prompts = prompts_at(s, length)
        exact = batched(exact_gradient, "completions", "reverse", tree)(prompts, s.kl_coef, 1.0)
        for row in kept.rows(f"length {length}", ROWS):
            got = batched(moments, row, tree)(prompts, s.kl_coef, 1.0)
            measured = {"bias": relative_error(got.mean, exact), "noise": np.sqrt(got.variance) / norm(exact)}
            for name, x in measured.items():
                found[row.key][name].append(np.median(x, axis=1).tolist())
    return found


def prompts_at(s: StalenessSettings, length: int) -> tuple[Tree, Prompt]:
    """The tree of a length, and the prompts at each drift, [drifts, prompts, ...]."""
    family = CompletionSettings(
        actions=s.actions,
        length=length,
        prompts=s.prompts,
        behaviour_kl=s.behaviour_kl * length,
        drifts=tuple(drift * length for drift in s.drifts),
    )
    return family.tree, drifting(family)


def error(row: Mapping[str, list[list[float]]], completions: float) -> np.ndarray:
    """The relative error of an update of so many completions, f64[lengths, drifts]."""
    return np.sqrt(np.square(row["bias"]) + np.square(row["noise"]) / completions)


def tables(found: Map, s: StalenessSettings) -> dict[str, str]:
    """The tables of docs/estimators.md on staleness, by the title of their section."""
    drifts = kept.heads("drift a token: ", s.drifts)
    cells = {
        key: [f"{b:.2f} / {n:.1f}" for b, n in zip(row["bias"][-1], row["noise"][-1], strict=True)]
        for key, row in found.items()
    }
    made = {"Staleness and length: bias or noise?": kept.table(["loss", *drifts], [[k, *v] for k, v in cells.items()])}
    for n in s.completions:
        every = {key: error(row, n) for key, row in found.items()}
        rows = []
        for i, length in enumerate(s.lengths):
            at_each = ([(errors[i, j], key) for key, errors in every.items()] for j in range(len(s.drifts)))
            rows.append([str(length), *("{1}, {0:.2f}".format(*min(pairs)) for pairs in at_each)])
        made[f"Least error of an update of {n:,} completions"] = kept.table(["tokens", *drifts], rows)
    return made


def draw(found: Map, s: StalenessSettings) -> bytes:
    """PNG: the error of updates of each size at the longest length, by drift."""
    figure = plots.empty_figure(15, 4.2, w_pad=0.15)
    for ax, n in zip(figure.subplots(1, len(s.completions)), s.completions, strict=True):
        lines = {key: error(row, n)[-1].tolist() for key, row in found.items()}
        panel(ax, f"{n:,} completions an update", lines, s.drifts, legend=n == s.completions[-1])
        ax.set_xlabel("drift KL(π_θ‖π_old), nats a token", color=MUTED)
    return plots.png(figure)
