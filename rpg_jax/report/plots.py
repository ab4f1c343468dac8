"""Draws every picture: the curves of a run, and the figures of a table of runs.

A line over steps is the mean over seeds, and the band around the line reaches from the lowest seed to the highest. The
figures of tables take {row: …}, and draw the rows in the order of the dict.
"""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rpg_jax.report.run_files import Run, series
from rpg_jax.report.seeds import Values, mean
from rpg_jax.storage import write_atomically

if TYPE_CHECKING:  # matplotlib takes a second to import: a run loads it when it draws
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#222222", "#767676", "#e6e6e6"
RAW, LINE, HELD_OUT = "#b9cde4", "#2a6db0", "#d1495b"  # colours of the curves of a run
COLOURS = ("#2a6db0", "#d1495b", "#2e8b57", "#e09f3e", "#7b4ea3", "#4a4a4a", "#17a2a2", "#b5651d", "#9a9a9a", "#e377c2")


@dataclasses.dataclass(frozen=True)
class Panel:
    """A picture of the metric `key`, shown as `scale` times its value in `unit`. The metric `held_out` ("": none) is
    drawn as markers, on the same scale. `limits` are the ends of the vertical axis (None: as the values need)."""

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
CONVERSATION_PANELS = (  # further panels of a run with an environment
    Panel("Turns", "mean per conversation", "turns"),
    Panel("Observations", "tokens per conversation", "observed_length"),
    Panel("Environment failures", "% of conversations", "environment_failed", 100),
)
SUPERVISED_PANELS = (  # the panels of a run on demonstrations
    Panel("Loss", "nats per token", "nll", held_out="held_out_nll"),
    Panel("Accuracy", "% of completions", "", 100, held_out="eval/accuracy", limits=(0, 102)),
    Panel("Passes", "over the demonstrations", "epoch"),
    Panel("Gradient norm", "before it is clipped", "grad_norm"),
    Panel("Learning rate", "", "learning_rate"),
    Panel("Speed", "trained tokens per second", "tokens_per_second"),
)
TABLE_PANELS = (  # the panels of a table of runs, and the columns of its table of training
    Panel("Training accuracy", "%", "accuracy", 100),
    Panel("Entropy", "nats per token", "entropy"),
    Panel("KL to the behaviour policy", "millinats per token", "behaviour_forward_kl_k1", 1000),
    Panel("Completion length", "tokens", "completion_length"),
    Panel("Clipped tokens", "%", "clip_fraction", 100),
    Panel("KL term's share of the gradient", "%", "kl_gradient_share", 100),
)
DRIFT_PANELS = (  # the panels of each held-out set, where a run measured its drift
    Panel("accuracy", "%", "mean_at_k", 100),
    Panel("entropy", "nats per token", "entropy"),
    Panel("length", "tokens", "completion_length"),
    Panel("KL to the initial policy", "nats", "initial_kl"),  # a KL of completions, not of tokens
)


def empty_figure(
    width: float, height: float, *, dpi: int = 120, w_pad: float | None = None, h_pad: float | None = None
) -> Figure:
    """Makes a white figure of `width` x `height` inches. `w_pad`, `h_pad`: inches around each panel (None: 0.04)."""
    ours = "matplotlib" not in sys.modules
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if ours:  # a file matplotlibrc of the present folder may have asked for LaTeX
        matplotlib.rcdefaults()
    layout = ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad)
    return Figure(figsize=(width, height), dpi=dpi, facecolor="white", layout=layout)


def tidy(axes: Axes, title: str, *, title_pad: float | None = None, grid: Literal["both", "x", "y"] = "both") -> None:
    """Titles axes, removes the lines at their top, left and right, and adds a light grid along `grid`. `title_pad` is
    the distance of the title in points (None: matplotlib's)."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=title_pad)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, which="both")


def png(figure: Figure) -> bytes:
    """Draws a figure without a display, and returns the bytes of the PNG. A $ in a text is drawn as $: the figure's
    texts are set so that none is a formula."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"):
        formatter = axis.get_major_formatter()
        if "mathdefault" in formatter(10.0):  # matplotlib writes powers of ten as formulas
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter())
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()


def name_axes(axes: Axes, title: str, below: str) -> None:
    """Titles and tidies axes as `tidy` does, and names the horizontal axis `below`."""
    tidy(axes, title)
    axes.set_xlabel(below, color=MUTED, fontsize=9)


def legend_below(figure: Figure) -> None:
    """Adds the legend of the first axes below the figure, in as many columns as fit its width."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    inches = 0.6 + 0.075 * max(map(len, labels), default=0)  # a handle with gaps, and each letter
    columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def smooth(values: np.ndarray) -> np.ndarray:
    """The centred moving average f64[n] of f64[n] over a twentieth of n, made odd; at the ends over fewer values."""
    if not len(values):
        return values
    window = np.ones(len(values) // 20 | 1)  # odd, so that the window has a centre
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def shared_points(curves: Iterable[Mapping[int, float]]) -> tuple[list[int], np.ndarray]:
    """The sorted xs that all non-empty curves {x: y} share, and their ys there, f64[C, len(xs)] of C non-empty curves.
    Without a curve that is not empty: [] and an empty array."""
    kept = [curve for curve in curves if curve]
    xs = sorted(set.intersection(*map(set, kept))) if kept else []
    return xs, np.array([[curve[x] for x in xs] for curve in kept])


def curves_of(runs: Iterable[Run], metric: str) -> list[dict[int, float]]:
    """For each run, in order, {step: value} of a metric at the steps where it is a finite number; {} without any."""
    return [dict(zip(*series(run.records, metric), strict=True)) for run in runs]


def draw_curves(run: Run) -> Path:
    """Writes `curves.png` into the folder that a run was read from, and returns the picture's path. Raw values are thin
    lines, their centred moving averages are bold, held-out evaluations are markers. The panel of a metric that the run
    does not have says "not logged". Raises ValueError if the run has no step."""
    assert run.folder is not None
    if not (records := run.records):
        raise ValueError(f"no steps to draw: {run.folder / 'metrics.jsonl'} is missing or empty; run at least one step")
    panels = [*(SUPERVISED_PANELS if run.method == "supervised" else PANELS)]
    if any(CONVERSATION_PANELS[0].key in record for record in records):
        panels += CONVERSATION_PANELS
    lines = len(panels) // 3
    figure = empty_figure(11, 2.9 * lines, dpi=150, w_pad=0.18, h_pad=0.12)
    parts = [run.name, run.method, f"step {records[-1]['step']}"]
    figure.suptitle("   ·   ".join(str(p) for p in parts if p), x=0.012, ha="left", fontsize=10, color=MUTED)
    for axes, panel in zip(figure.subplots(lines, 3, sharex=True).flat, panels, strict=True):
        _draw_panel(axes, panel, records)
    for axes in figure.axes[-3:]:
        axes.set_xlabel("step", color=MUTED, fontsize=9, loc="right")
    path = run.folder / "curves.png"
    write_atomically(path, png(figure))
    return path


def _draw_panel(axes: Axes, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    steps, values = series(records, panel.key)
    held_out_steps, held_out = series(records, panel.held_out) if panel.held_out else ([], [])
    tidy(axes, panel.title, title_pad=18, grid="y")
    axes.spines["bottom"].set_color(MUTED)
    axes.locator_params(axis="y", nbins=5)
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.02, y=0.08)
    axes.text(0, 1.03, panel.unit, transform=axes.transAxes, fontsize=8.5, color=MUTED)
    if panel.limits:
        axes.set_ylim(*panel.limits)
    if values:
        raw = np.asarray(values) * panel.scale
        mean = smooth(raw)
        axes.plot(steps, raw, color=RAW, linewidth=0.8)
        axes.plot(steps, mean, color=LINE, linewidth=1.8, marker="o" if len(steps) == 1 else None, markersize=4)
        if not raw.any():
            axes.set_ylim(bottom=0)
        _last(axes, "training " * bool(held_out), mean[-1], LINE, height=1.03)
        parts = dict.fromkeys(name.partition("/")[2] for r in records for name in r if name.startswith(f"{panel.key}/"))
        for part, colour in zip(parts, COLOURS[2:], strict=False):  # they add up to the metric
            axes.plot(*series(records, f"{panel.key}/{part}"), color=colour, linewidth=1, label=part)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, loc="best")
    if held_out:
        scored = np.asarray(held_out) * panel.scale
        axes.plot(held_out_steps, scored, color=HELD_OUT, linewidth=1, marker="o", markersize=4, markeredgewidth=0)
        _last(axes, "held out ", scored[-1], HELD_OUT, height=1.125)
    if not values and not held_out:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set_yticks([])


def _last(axes: Axes, words: str, value: float, color: str, height: float) -> None:
    """Writes `words` and three digits of `value`, or all before the point, above the panel, where they cover no data;
    `height` is in heights of the panel, from its bottom."""
    text = f"{words}{value:{',.0f' if abs(value) >= 999.5 else '.3g'}}"
    axes.text(1, height, text, transform=axes.transAxes, ha="right", fontsize=9.5, fontweight="bold", color=color)


def draw_scores(last: Mapping[str, Values], compared_with: Mapping[str, str]) -> bytes:
    """Draws Last, Mean@k after the last step, of each held-out set, and returns the PNG. A row has its mean over seeds,
    the 95 % interval, and a dot for each seed.

    Args:
      last: {held-out set: {row: {seed: Last in %}}}.
      compared_with: {row: the row that it is compared with, maybe itself}, in the order of the picture. A row with
        which a row is compared has another colour, and a line at its mean beside the rows that are compared with it.
    """
    rows = list(compared_with)
    figure = empty_figure(4.2 * len(last) + 1.5, 0.34 * len(rows) + 1.6)
    panels = np.atleast_1d(figure.subplots(1, len(last), sharey=True))
    for axes, (name, by_row) in zip(panels, last.items(), strict=True):
        for row, by_seed in by_row.items():
            y, values = rows.index(row), list(by_seed.values())
            m = mean(values)
            compared = [place for place, other in enumerate(rows) if compared_with[other] == row]
            colour = COLOURS[1] if compared else COLOURS[0]
            axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
            axes.errorbar(m.value, y, xerr=0 if math.isnan(m.half) else m.half, fmt="o", color=colour, markersize=5)
            if compared:
                axes.vlines(m.value, compared[0] - 0.5, compared[-1] + 0.5, color=colour, linewidth=0.8, alpha=0.5)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, -2), min(high, 102))
        name_axes(axes, name, "Mean@k after the last step, %")
    return png(figure)


def draw_dynamics(rows: Mapping[str, Sequence[Run]], sets: Sequence[str]) -> bytes:
    """Draws accuracy on each of the held-out `sets`, then the metrics of `TABLE_PANELS`, by step, and returns the PNG.
    A metric that no run has is left out. `rows` is {row: its runs, one a seed}. Only the first ten rows are drawn."""
    held_out = [Panel(name, "Mean@k in %", f"eval/{name}/mean_at_k", 100) for name in sets]
    panels = [panel for panel in (*held_out, *TABLE_PANELS) if _any_has(rows, panel.key)]
    return _draw_rows(rows, panels, columns=3)


def draw_drift(rows: Mapping[str, Sequence[Run]], sets: Sequence[str]) -> bytes | None:
    """Draws accuracy, entropy, length and KL to the initial policy on each of the held-out `sets`, by step, and returns
    the PNG; None if no run has this KL, for which the config field `evaluation.drift` asks. The error bars of the KL
    are ± 2 standard errors over prompts, averaged over seeds. `rows` is {row: its runs, one a seed}; ten are drawn."""
    if not any(_any_has(rows, f"eval/{name}/initial_kl") for name in sets):
        return None
    panels = [
        dataclasses.replace(panel, title=f"{name}: {panel.title}", key=f"eval/{name}/{panel.key}")
        for name in sets
        for panel in DRIFT_PANELS
    ]
    return _draw_rows(rows, panels, columns=len(DRIFT_PANELS))


def _any_has(rows: Mapping[str, Sequence[Run]], metric: str) -> bool:
    return any(any(curves_of(runs, metric)) for runs in rows.values())


def _draw_rows(rows: Mapping[str, Sequence[Run]], panels: Sequence[Panel], *, columns: int) -> bytes:
    """PNG of the panels, `columns` side by side: for each row a line and a band, and error bars if the row's runs have
    the metric `key`_error at the same steps."""
    lines = math.ceil(len(panels) / columns)
    figure = empty_figure(1 + 4 * columns, 3.2 * lines)
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(lines, columns, place)
        for (row, runs), colour in zip(rows.items(), COLOURS, strict=False):
            steps, values = shared_points(curves_of(runs, panel.key))
            if steps:
                ys = panel.scale * values
                axes.plot(steps, ys.mean(0), color=colour, linewidth=1.6, label=row)
                axes.fill_between(steps, ys.min(0), ys.max(0), color=colour, alpha=0.12, linewidth=0)
            at, errors = shared_points(curves_of(runs, f"{panel.key}_error"))
            if at and at == steps:
                bars = 2 * panel.scale * errors.mean(0)
                axes.errorbar(steps, ys.mean(0), yerr=bars, fmt="none", ecolor=colour, alpha=0.5)
        name_axes(axes, f"{panel.title}, {panel.unit}", "step")
        axes.locator_params(axis="x", integer=True)
    legend_below(figure)
    return png(figure)
