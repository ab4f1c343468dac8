"""Draws the figures of a table of runs: scores by row, pass@k by k, the dynamics of training, and the drift."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rpg_jax.report import plots
from rpg_jax.report.plots import COLOURS
from rpg_jax.report.run_files import series
from rpg_jax.report.seeds import CellScores, mean
from rpg_jax.reproduction import choice
from rpg_jax.reproduction.results import DYNAMICS, Results, Run
from rpg_jax.reproduction.table import Table
from rpg_jax.runs import run_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = Path(__file__).with_name("paper_tables.json")
SHOWN = 6  # most rows in a figure with lines: the eye tells no more apart

DRIFT = {  # measures of a held-out set by title, each with its scale
    "accuracy, %": ("mean_at_k", 100),
    "entropy, nats per token": ("entropy", 1),
    "length, tokens": ("completion_length", 1),
    "KL to the initial policy, nats": ("initial_kl", 1),  # of completions
}

Scores = dict[str, dict[int, CellScores]]  # {row: {seed: scores}}
RecordsOfRuns = Sequence[Sequence[Mapping[str, Any]]]  # records by step, for each run


def draw_scores(table: Table, scores: Scores) -> bytes:
    """PNG: Last of each set. Rows lie below each other, with mean, 95 % interval and a dot for every seed."""
    rows, names = list(scores), held_out_sets(scores)
    figure = plots.empty_figure(4.2 * len(names) + 1.5, 0.34 * len(rows) + 1.6)
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(names), sharey=True)), names, strict=True):
        for y, row in enumerate(rows):
            values = [100 * cell[name]["last"] for cell in scores[row].values()]
            m = mean(values)
            compared = [other for other in range(len(rows)) if table.compared_with(rows[other]) == row]
            colour = COLOURS[1] if compared else COLOURS[0]
            ax.plot(values, [y] * len(values), "o", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
            ax.errorbar(m.value, y, xerr=0 if math.isnan(m.half) else m.half, fmt="o", color=colour, markersize=5)
            if compared:
                ax.vlines(m.value, compared[0] - 0.5, compared[-1] + 0.5, color=colour, linewidth=0.8, alpha=0.5)
        ax.set_yticks(range(len(rows)), rows)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        low, high = ax.get_xlim()
        ax.set_xlim(max(low, -2), min(high, 102))
        _label(ax, name, "Mean@k after the last step, %")
    return plots.png(figure)


def draw_dynamics(table: Table, scores: Scores, runs: Sequence[Run]) -> bytes:
    """PNG: held-out accuracy of each set, then `DYNAMICS`, by step; mean and range over seeds."""
    rows = rows_to_show(table, scores)
    panels = {f"{name}, Mean@k in %": (f"eval/{name}/mean_at_k", 100) for name in held_out_sets(scores)} | DYNAMICS
    panels = {title: of for title, of in panels.items() if any(series(run.records, of[0])[1] for run in runs)}
    figure = plots.empty_figure(13, 3.2 * math.ceil(len(panels) / 3))
    for place, (title, (key, scale)) in enumerate(panels.items(), start=1):
        ax = figure.add_subplot(math.ceil(len(panels) / 3), 3, place)
        for colour, row in zip(COLOURS, rows, strict=False):
            curves = (series(run.records, key) for run in runs if run.row == row)
            _band(ax, (dict(zip(*curve, strict=True)) for curve in curves), scale, colour, row)
        _label(ax, title, "step")
        ax.locator_params(axis="x", integer=True)
    _legend(figure)
    return plots.png(figure)


def draw_pass_at_k(table: Table, scores: Scores, runs: Sequence[Run]) -> bytes | None:
    """PNG: pass@k of the last evaluation by k, one panel for each set; mean and range over seeds.

    None if a row has no pass@k.
    """
    rows, names = rows_to_show(table, scores), held_out_sets(scores)
    last = [(run.row, {name: found[-1] for name, found in run.evaluations().items()}) for run in runs]
    figure = plots.empty_figure(4.2 * len(names) + 1.5, 3.6)
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(names), sharey=True)), names, strict=True):
        for colour, row in zip(COLOURS, rows, strict=False):
            found = (by_set[name] for own, by_set in last if own == row and name in by_set)
            ks = _band(ax, map(_pass_by_k, found), 100, colour, row)
            if not ks:
                return None
        ax.set_xscale("log", base=2)
        ax.set_xticks(ks, ks)
        _label(ax, name, "k; pass@k in % after the last step")
    _legend(figure)
    return plots.png(figure)


def draw_values(sweep: Results, shown: Sequence[str]) -> bytes | None:
    """PNG: late training accuracy by the value of the one number that a sweep changes; mean and range over seeds.

    A line for each row, or for the rows `shown` if there are more than colours. None if the sweep changes no number or
    several fields.
    """
    fields = {field for _, values in sweep.table.swept.values() for field in values}
    if len(fields) != 1:
        return None
    field, chosen = fields.pop(), choice.best(sweep)
    x = {row: values[field] for row, (_, values) in sweep.table.swept.items()}
    numbers = [value for value in x.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(x) or len(set(numbers)) < 2:
        return None
    figure = plots.empty_figure(7, 4.2)
    ax = figure.subplots()
    groups = choice.scores(sweep)
    names = [group for group in groups if len(groups) <= len(COLOURS) or group in shown] or list(groups)
    for group, colour in zip(names, COLOURS, strict=False):
        by_row = {row: own for row, own in groups[group].items() if own}
        means = {row: sum(own.values()) / len(own) for row, own in by_row.items()}
        for row, own in by_row.items():
            ax.vlines(x[row], min(own.values()), max(own.values()), color=colour, linewidth=1, alpha=0.4)
        ax.plot([x[row] for row in means], list(means.values()), "-", color=colour, linewidth=1.2, label=group)
        for row, value in means.items():
            filled = {"markersize": 7} if row == chosen.get(group) else {"markersize": 3.5, "markerfacecolor": "white"}
            ax.plot(x[row], value, "o", color=colour, **filled)
    if min(numbers) > 0 and max(numbers) > 2 * min(numbers):
        ax.set_xscale("log")
        ax.set_xticks(sorted(set(numbers)), [run_names.shown(value) for value in sorted(set(numbers))])
        ax.set_xticks([], minor=True)
    _label(ax, "Training accuracy over the last third, % (filled: chosen)", field)
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return plots.png(figure)


def draw_drift(rows: Mapping[str, RecordsOfRuns], sets: Sequence[str]) -> bytes | None:
    """PNG: a panel for each set and measure, a line for each row: the mean over seeds, and their range.

    The error bars of the KL are of its estimate: ± 2 standard errors over prompts, the mean over seeds.

    None if no run measured its drift (`evaluation.drift`).
    """
    records = [record for runs in rows.values() for run in runs for record in run]
    if not any(f"eval/{name}/initial_kl" in record for record in records for name in sets):
        return None
    figure = plots.empty_figure(4.0 * len(DRIFT), 2.7 * len(sets) + 0.6)
    axes = np.atleast_2d(figure.subplots(len(sets), len(DRIFT), sharex=True))
    for name, line in zip(sets, axes, strict=True):
        for ax, (title, (key, scale)) in zip(line, DRIFT.items(), strict=True):
            for row, colour in zip(rows, plots.COLOURS, strict=False):
                _draw_drift(ax, rows[row], f"eval/{name}/{key}", scale, colour, row)
            plots.tidy(ax, f"{name}: {title}")
            ax.locator_params(axis="x", integer=True)
    for ax in axes[-1]:
        ax.set_xlabel("step", color=plots.MUTED, fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = plots.legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return plots.png(figure)


def _draw_drift(ax: Any, runs: RecordsOfRuns, key: str, scale: float, colour: str, row: str) -> None:
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


def _shared(runs: RecordsOfRuns, key: str) -> tuple[list[int], np.ndarray]:
    """The steps at which every run that has a metric has it, and its values f64[runs, steps]."""
    curves = [dict(zip(*series(run, key), strict=True)) for run in runs]
    kept = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*map(set, kept))) if kept else []
    return steps, np.array([[curve[step] for step in steps] for curve in kept])


def rows_to_show(table: Table, scores: Scores) -> list[str]:
    """At most `SHOWN` rows: the rows that the table names, else the paper's six rows, else the first rows."""
    rows = list(scores)
    if len(rows) <= SHOWN:
        return rows
    published = json.loads(PAPER.read_text(encoding="utf-8"))["table3_qwen3_4b_8k"]
    chosen = [row for row in table.shown or published if row in rows]
    return (chosen or rows)[:SHOWN]


def held_out_sets(scores: Scores) -> list[str]:
    """Names of the held-out sets."""
    return list(next(iter(next(iter(scores.values())).values())))


def _pass_by_k(evaluation: Mapping[str, float]) -> dict[int, float]:
    return {int(key.removeprefix("pass@")): value for key, value in evaluation.items() if key.startswith("pass@")}


def _band(ax: Axes, curves: Iterable[Mapping[int, float]], scale: float, colour: str, row: str) -> list[int]:
    """Draws mean and range of the curves {x: y} that are not empty; returns the xs that they share."""
    kept = [curve for curve in curves if curve]
    if not kept:
        return []
    xs = sorted(set.intersection(*map(set, kept)))
    ys = scale * np.array([[curve[x] for x in xs] for curve in kept])
    ax.plot(xs, ys.mean(0), color=colour, linewidth=1.6, label=row)
    ax.fill_between(xs, ys.min(0), ys.max(0), color=colour, alpha=0.12, linewidth=0)
    return xs


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = plots.legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _label(ax: Axes, title: str, below: str) -> None:
    plots.tidy(ax, title)
    ax.set_xlabel(below, color=plots.MUTED, fontsize=9)
