"""Draws the frontier: expected reward against the divergence from the reference, for all β."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpg_jax.report import plots
from rpg_jax.report.seeds import mean
from rpg_jax.reproduction.path_experiments import BASELINE, NO_KL
from rpg_jax.reproduction.path_records import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (BASELINE, "to-go, weight w: URKL", "per token: URKL", "per token (GRPO): k₃", "per token (Tunix): k₁")
_PANELS = (  # title, experiment, quantity, (KL from, to), (quantity from, to)
    ("Expected reward", "strengths", "reward", (0, 5.2), (0.25, 1.02)),
    ("The same, larger", "strengths", "reward", (1.4, 3.6), (0.68, 1.01)),
    ("Right completions, where the verifier is wrong", "wrong verifier", "right", (0, 5.2), (0, 1.02)),
)


def draw_frontier(found: Runs) -> bytes:
    """PNG: a line through the β of each row, means over seeds, with a point for every run and the best possible."""
    panels = [panel for panel in _PANELS if found.has(panel[1])]
    figure = plots.empty_figure(5.2 * len(panels), 4.8)
    for ax, (title, experiment, quantity, xs, ys) in zip(
        [*figure.subplots(1, len(panels), squeeze=False).flat], panels, strict=True
    ):
        _draw(ax, found, experiment, quantity)
        plots.tidy(ax, title)
        ax.set_xlim(*xs)
        ax.set_ylim(*ys)
        ax.set_xlabel("KL(π_θ‖π_ref), nats a completion", color=plots.MUTED, fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return plots.png(figure)


def _draw(ax: Axes, found: Runs, experiment: str, quantity: str) -> None:
    kl_coefs = found.kl_coefs(experiment)
    if quantity == "reward":
        best = [found.get(experiment, BASELINE, kl_coef).values() for kl_coef in kl_coefs]
        line = [tuple(mean([run[f"best_{q}"] for run in runs]).value for q in ("kl", "reward")) for runs in best]
        ax.plot(*zip(*line, strict=True), color=plots.INK, linewidth=1.4, marker="|", label="best possible")
    for colour, row in zip(plots.COLOURS, SHOWN, strict=False):
        line = []
        for kl_coef in kl_coefs:
            if runs := found.get(experiment, row, kl_coef).values():
                points = [run["kl"] for run in runs], [run[quantity] for run in runs]
                ax.plot(*points, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
                line.append(tuple(mean(values).value for values in points))
        if line:
            ax.plot(*zip(*line, strict=True), "o-", color=colour, markersize=5, linewidth=1.4, label=row)
    if runs := found.get(experiment, NO_KL.key).values():
        points = [run["kl"] for run in runs], [run[quantity] for run in runs]
        ax.plot(*points, "x", color=plots.MUTED, label=NO_KL.name)
