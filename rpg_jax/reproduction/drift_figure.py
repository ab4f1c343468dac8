"""Draws how policies leave the initial policy: accuracy, entropy, length and KL on every held-out set, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax.report import plots
from rpg_jax.report.run_files import series

MEASURES = {  # of a held-out set by title, each with its scale
    "accuracy, %": ("mean_at_k", 100),
    "entropy, nats per token": ("entropy", 1),
    "length, tokens": ("completion_length", 1),
    "KL to the initial policy, nats": ("initial_kl", 1),  # of completions
}

Runs = Sequence[Sequence[Mapping[str, Any]]]  # records by step, for each seed


def draw_drift(rows: Mapping[str, Runs], sets: Sequence[str]) -> bytes | None:
    """PNG: a panel for each set and measure, a line for each row: the mean over seeds, and their range.

    The error bars of the KL are of its estimate: ± 2 standard errors over prompts, the mean over seeds.

    None if no run measured its drift (`evaluation.drift`).
    """
    records = [record for runs in rows.values() for run in runs for record in run]
    if not any(f"eval/{name}/initial_kl" in record for record in records for name in sets):
        return None
    figure = plots.empty_figure(4.0 * len(MEASURES), 2.7 * len(sets) + 0.6)
    axes = np.atleast_2d(figure.subplots(len(sets), len(MEASURES), sharex=True))
    for name, line in zip(sets, axes, strict=True):
        for ax, (title, (key, scale)) in zip(line, MEASURES.items(), strict=True):
            for row, colour in zip(rows, plots.COLOURS, strict=False):
                _draw(ax, rows[row], f"eval/{name}/{key}", scale, colour, row)
            plots.tidy(ax, f"{name}: {title}")
            ax.locator_params(axis="x", integer=True)
    for ax in axes[-1]:
        ax.set_xlabel("step", color=plots.MUTED, fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = plots.legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return plots.png(figure)


def _draw(ax: Any, runs: Runs, key: str, scale: float, colour: str, row: str) -> None:
    """Draws a row's mean and range over seeds at the steps that all its runs have."""
    steps, values = _shared(runs, key)
    if not steps:
        return
    y = scale * values
    ax.plot(steps, y.mean(0), color=colour, linewidth=1.5, label=row)
    ax.fill_between(steps, y.min(0), y.max(0), color=colour, alpha=0.12, linewidth=0)
    at, errors = _shared(runs, f"{key}_error")
    if at == steps:
        ax.errorbar(steps, y.mean(0), yerr=2 * scale * errors.mean(0), fmt="none", ecolor=colour, alpha=0.5)


def _shared(runs: Runs, key: str) -> tuple[list[int], np.ndarray]:
    """The steps at which every run that has a metric has it, and its values f64[runs, steps]."""
    curves = [dict(zip(*series(run, key), strict=True)) for run in runs]
    kept = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*map(set, kept))) if kept else []
    return steps, np.array([[curve[step] for step in steps] for curve in kept])
