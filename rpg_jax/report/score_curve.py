"""The scores of several checkpoints of a run: a table, and a plot with the error of every point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.report import plots
from rpg_jax.report.plots import COLOURS, MUTED

Points = Sequence[tuple[int, Mapping[str, Any]]]
"""(step, scores of each set as `scores.summarise` returns them), in the order of steps."""


def rows(points: Points) -> list[list[str]]:
    """A row for each checkpoint and a column for each set, Mean@k ± its standard error; the header comes first."""
    names = list(points[0][1])
    table = [["step", *names]]
    for step, by_set in points:
        means = [_mean(by_set[name]) for name in names]
        table.append([str(step), *(f"{e['value']:.4f} ± {e['standard_error'] or 0:.4f}" for e in means)])
    return table


def draw(title: str, points: Points) -> bytes:
    """A PNG of Mean@k of each set over the steps; bars are the 95 % intervals over problems."""
    figure = plots.empty_figure(7, 4, dpi=150)
    axes = figure.subplots()
    plots.tidy(axes, title, grid="y")
    for (name, colour), shift in zip(zip(points[0][1], COLOURS, strict=False), _shifts(points), strict=False):
        means = [_mean(by_set[name]) for _, by_set in points]
        values = [e["value"] for e in means]
        bars = [[e["value"] - e["low"] for e in means], [e["high"] - e["value"] for e in means]]
        steps = [step + shift for step, _ in points]
        axes.errorbar(steps, values, bars, color=colour, linewidth=1.5, marker="o", markersize=4, capsize=2, label=name)
    axes.set_ylabel("Mean@k", color=MUTED, fontsize=9)
    axes.set_xlabel("step", color=MUTED, fontsize=9, loc="right")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=9)
    return plots.png(figure)


def _mean(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mean@k, the first of the scores."""
    return next(iter(summary["scores"].values()))


def _shifts(points: Points) -> list[float]:
    """A small distance to the right for each set after the first, so that their bars do not cover each other."""
    width = (points[-1][0] - points[0][0] or 1) / 150
    return [i * width for i in range(len(points[0][1]))]
