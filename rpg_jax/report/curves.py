"""Draws the training dynamics of one run as small multiples, in the order of the paper's figures 4 to 6."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpg_jax.report import plots
from rpg_jax.report.plots import MUTED
from rpg_jax.report.run_files import read_config, read_metrics, series
from rpg_jax.storage import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RAW, LINE, HELD_OUT = "#b9cde4", "#2a6db0", "#d1495b"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One metric, shown as `scale` times its value; `held_out` is drawn over it as markers."""

    title: str
    unit: str
    key: str
    scale: float = 1.0
    held_out: str = ""
    limits: tuple[float, float] | None = None


PANELS = (
    Panel("Reward", "mean per completion", "reward", held_out="eval/reward"),
    Panel("Accuracy", "% of completions", "accuracy", 100, held_out="eval/accuracy", limits=(0, 102)),
    Panel("Completion length", "tokens", "completion_length"),
    Panel("Entropy", "nats per token", "entropy"),
    Panel("KL to the reference", "millinats per token", "kl", 1000),
    Panel("Clipped", "% of trained tokens", "clip_fraction", 100),
)
CONVERSATION_PANELS = (  # of a run with an environment, beside the others
    Panel("Turns", "mean per conversation", "turns"),
    Panel("Observations", "tokens per conversation", "observed_length"),
    Panel("Environment failures", "% of conversations", "environment_failed", 100),
)
SUPERVISED_PANELS = (  # of a run on demonstrations
    Panel("Loss", "nats per token", "nll", held_out="held_out_nll"),
    Panel("Accuracy", "% of completions", "", 100, held_out="eval/accuracy", limits=(0, 102)),
    Panel("Passes", "over the demonstrations", "epoch"),
    Panel("Gradient norm", "before it is clipped", "grad_norm"),
    Panel("Learning rate", "", "learning_rate"),
    Panel("Speed", "trained tokens per second", "tokens_per_second"),
)


def draw_curves(run_dir: Path) -> Path:
    """Draws `curves.png` of a run folder from its `metrics.jsonl` and returns its path.

    Raw values are thin lines, their centred moving averages are bold, held-out evaluations are markers. The panel of a
    metric that the run does not have stays empty.

    Raises:
      ValueError: the folder has no step.
    """
    records = read_metrics(run_dir)
    if not records:
        raise ValueError(f"no steps to draw: {run_dir / 'metrics.jsonl'} is missing or empty; run at least one step")
    supervised = any("epoch" in record for record in records)
    panels = [*(SUPERVISED_PANELS if supervised else PANELS)]
    if any(CONVERSATION_PANELS[0].key in record for record in records):
        panels += CONVERSATION_PANELS
    lines = len(panels) // 3
    figure = plots.empty_figure(11, 2.9 * lines, dpi=150, w_pad=0.18, h_pad=0.12)
    method = "supervised" if supervised else read_config(run_dir).get("method")
    parts = [run_dir.resolve().name, method, f"step {records[-1]['step']}"]
    figure.suptitle("   ·   ".join(str(p) for p in parts if p), x=0.012, ha="left", fontsize=10, color=MUTED)
    for axes, panel in zip(figure.subplots(lines, 3, sharex=True).flat, panels, strict=True):
        _draw(axes, panel, records)
    for axes in figure.axes[-3:]:
        axes.set_xlabel("step", color=MUTED, fontsize=9, loc="right")
    path = run_dir / "curves.png"
    write_atomically(path, plots.png(figure))
    return path


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """The centred moving average over `width` values, at the ends over the values that exist."""
    if width < 2 or len(values) < 2:
        return values
    window = np.ones(min(width, len(values)))
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def _draw(axes: Axes, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    steps, values = series(records, panel.key)
    held_out_steps, held_out = series(records, panel.held_out) if panel.held_out else ([], [])
    plots.tidy(axes, panel.title, title_pad=18, grid="y")
    axes.spines["bottom"].set_color(MUTED)
    axes.locator_params(axis="y", nbins=5)
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02, y=0.08)
    axes.text(0, 1.03, panel.unit, transform=axes.transAxes, fontsize=8.5, color=MUTED)
    if panel.limits:
        axes.set_ylim(*panel.limits)
    if values:
        raw = np.asarray(values) * panel.scale
        mean = smooth(raw, len(raw) // 20 | 1)
        axes.plot(steps, raw, color=RAW, linewidth=0.8)
        axes.plot(steps, mean, color=LINE, linewidth=1.8, marker="o" if len(steps) == 1 else None, markersize=4)
        _last(axes, f"{'training ' if held_out else ''}{mean[-1]:.3g}", LINE, height=1.03)
    if held_out:
        scored = np.asarray(held_out) * panel.scale
        axes.plot(held_out_steps, scored, color=HELD_OUT, linewidth=1, marker="o", markersize=4, markeredgewidth=0)
        _last(axes, f"held out {scored[-1]:.3g}", HELD_OUT, height=1.125)
    if not values and not held_out:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set_yticks([])


def _last(axes: Axes, text: str, color: str, height: float) -> None:
    """Writes the latest value above the panel, where it covers no data."""
    axes.text(1, height, text, transform=axes.transAxes, ha="right", fontsize=9.5, fontweight="bold", color=color)
