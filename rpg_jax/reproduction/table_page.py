"""A table of runs as a page: scores with intervals, differences to the baseline, dynamics, and the paper's numbers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rpg_jax.report.curves import GRID, INK, MUTED
from rpg_jax.report.progress import duration
from rpg_jax.report.runs import read_metrics, series, write_atomically
from rpg_jax.report.seeds import QUANTITIES, CellScores, Mean, cell_scores, mean, paired_difference, ranks
from rpg_jax.reproduction.tables import Cell, Table

PAPER = Path(__file__).with_name("paper_tables.json")
PAPER_TABLE = "table8_qwen2p5_7b_instruct"
HEADS = {"last": "Last", "best": "Best", "pass": "pass@32"}
COLOURS = ("#2a6db0", "#d1495b", "#2e8b57", "#e09f3e", "#7b4ea3", "#4a4a4a")
SHOWN = 6  # rows in the figure of the dynamics: more lines are not told apart

Scores = dict[str, dict[int, CellScores]]  # {row: {seed: scores}}


def collect(cells: Sequence[Cell], out: Path) -> Scores:
    """Scores of the cells that have any evaluation."""
    found: Scores = {}
    for cell in cells:
        if scores := cell_scores(out / "runs" / cell.name):
            found.setdefault(cell.row, {})[cell.seed] = scores
    return found


def write_page(name: str, table: Table, cells: Sequence[Cell], out: Path, *, hardware: str) -> Path:
    """Writes `<name>.md`, `<name>.json`, `<name>.png` and `<name>-dynamics.png` into `out`; returns the page.

    Raises:
      ValueError: no cell has a score yet.
    """
    scores = collect(cells, out)
    if not scores:
        raise ValueError(f"{out / 'runs'} has no evaluated run of this table: look at {out / 'logs'}")
    write_atomically(out / f"{name}.json", json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
    write_atomically(out / f"{name}.png", draw_scores(table, scores))
    write_atomically(out / f"{name}-dynamics.png", draw_dynamics(scores, cells, out))
    page = out / f"{name}.md"
    write_atomically(page, "\n".join(_lines(name, table, scores, cells, out, hardware)) + "\n")
    return page


def _lines(name: str, table: Table, scores: Scores, cells: Sequence[Cell], out: Path, hardware: str) -> Iterator[str]:
    seeds = sorted({seed for by_seed in scores.values() for seed in by_seed})
    seconds = sum(sum(series(read_metrics(out / "runs" / c.name), "seconds")[1]) for c in cells)
    yield from (
        f"# {table.title}",
        "",
        f"`python -m rpg_jax.reproduce --table={name}` · `{table.config}` · seeds {', '.join(map(str, seeds))} · "
        f"{hardware} · {duration(seconds)} in training steps",
        "",
        f"In the paper: {table.paper}. Mean@32 at temperature 1, in %, after the last step (Last) and the best of all "
        "evaluations",
        "(Best: a maximum over noisy numbers, so above Last by construction); mean over seeds ± half of a 95 % "
        "interval (Student's t).",
        "**Best** and <u>second</u> of each column; neither means that the difference is real: see the next table.",
        "",
    )
    yield from score_table(scores)
    yield from (
        "",
        f"## Differences to {table.baseline}",
        "",
        "Last, paired by seed, in points; *starred* where the 95 % interval leaves out 0.",
        "",
    )
    yield from difference_table(scores, table.baseline)
    yield from ("", f"![Last by row]({name}.png)", "", f"![Training dynamics]({name}-dynamics.png)")
    if name == "small":
        yield from ("", "## The paper's own numbers", "", *paper_table())


def score_table(scores: Scores) -> Iterator[str]:
    """Markdown rows: each set's Last, Best and pass@k with intervals; best bold, second underlined."""
    sets = _sets(scores)
    yield "| | " + " | ".join(f"{s} {HEADS[q]}" for s in sets for q in QUANTITIES) + " | seeds |"
    yield "|---|" + "--:|" * (len(sets) * len(QUANTITIES) + 1)
    columns = {}
    for s in sets:
        for q in QUANTITIES:
            means = [mean([cell[s][q] for cell in by_seed.values()]) for by_seed in scores.values()]
            columns[s, q] = [_marked(m, rank) for m, rank in zip(means, ranks([m.value for m in means]), strict=True)]
    for number, (row, by_seed) in enumerate(scores.items()):
        cells = " | ".join(column[number] for column in columns.values())
        yield f"| {row} | {cells} | {len(by_seed)} |"


def difference_table(scores: Scores, baseline: str) -> Iterator[str]:
    """Markdown rows: Last of each set minus the baseline's, seed by seed."""
    sets = _sets(scores)
    if baseline not in scores:
        yield f"{baseline} has not been run."
        return
    yield "| | " + " | ".join(sets) + " |"
    yield "|---|" + "--:|" * len(sets)
    for row, by_seed in scores.items():
        if row == baseline or not set(by_seed) & set(scores[baseline]):
            continue
        cells = []
        for s in sets:
            d = paired_difference(by_seed, scores[baseline], s, "last")
            text = f"{100 * d.value:+.1f}{_half(d)}"
            cells.append(f"*{text}*" if abs(d.value) > d.half else text)
        yield f"| {row} | " + " | ".join(cells) + " |"


def paper_table(table: str = PAPER_TABLE) -> Iterator[str]:
    """The published numbers, marked as theirs; a Last above its Best, which cannot be, is flagged."""
    published = json.loads(PAPER.read_text(encoding="utf-8"))
    rows = published[table]
    sets = list(next(iter(rows.values())))
    yield f"Not ours: {published['source']}; `{table}`, accuracy in %."
    yield ""
    yield "| | " + " | ".join(f"{s} {q}" for s in sets for q in ("Last", "Best")) + " |"
    yield "|---|" + "--:|" * (2 * len(sets))
    for row, by_set in rows.items():
        cells = []
        for scores in by_set.values():
            flag = " (!)" if scores["last"] > scores["best"] else ""
            cells += [f"{100 * scores['last']:.2f}{flag}", f"{100 * scores['best']:.2f}"]
        yield f"| {row} | " + " | ".join(cells) + " |"


def draw_scores(table: Table, scores: Scores) -> bytes:
    """PNG: Last of each set, rows below each other, mean and 95 % interval over seeds, every seed a dot."""
    figure, canvas = _figure(4.2 * len(_sets(scores)) + 1.5, 0.34 * len(scores) + 1.6)
    rows = list(scores)
    for ax, name in zip(np.atleast_1d(figure.subplots(1, len(_sets(scores)), sharey=True)), _sets(scores), strict=True):
        for y, row in enumerate(rows):
            values = [100 * cell[name]["last"] for cell in scores[row].values()]
            m = mean(values)
            colour = COLOURS[1] if row == table.baseline else COLOURS[0]
            ax.plot(values, [y] * len(values), "o", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
            ax.errorbar(m.value, y, xerr=0 if math.isnan(m.half) else m.half, fmt="o", color=colour, markersize=5)
            if row == table.baseline:
                ax.axvline(m.value, color=colour, linewidth=0.8, alpha=0.5)
        ax.set_yticks(range(len(rows)), rows)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        low, high = ax.get_xlim()
        ax.set_xlim(max(low, -2), min(high, 102))
        _plain(ax, name, "Mean@32 after the last step, %")
    return _png(canvas)


def draw_dynamics(scores: Scores, cells: Sequence[Cell], out: Path) -> bytes:
    """PNG: accuracy, held-out accuracy, entropy, KL, length, clipped share by step; mean and range over seeds."""
    rows = _told_apart(list(scores))
    panels = {
        "Held-out accuracy, %": (f"eval/{_sets(scores)[0]}/mean_at_k", 100),
        "Training accuracy, %": ("accuracy", 100),
        "Entropy, nats per token": ("entropy", 1),
        "KL to the reference, millinats per token": ("kl_k3", 1000),
        "Completion length, tokens": ("completion_length", 1),
        "Clipped tokens, %": ("clip_fraction", 100),
    }
    figure, canvas = _figure(13, 6.4)
    for ax, (title, (key, scale)) in zip(figure.subplots(2, 3).flat, panels.items(), strict=True):
        for colour, row in zip(COLOURS, rows, strict=False):
            curves = [series(read_metrics(out / "runs" / c.name), key) for c in cells if c.row == row]
            curves = [curve for curve in curves if curve[0]]
            if not curves:
                continue
            steps = sorted(set.intersection(*(set(s) for s, _ in curves)))
            values = scale * np.array([[dict(zip(*curve, strict=True))[step] for step in steps] for curve in curves])
            ax.plot(steps, values.mean(0), color=colour, linewidth=1.6, label=row)
            ax.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)
        _plain(ax, title, "step")
        ax.locator_params(axis="x", integer=True)
        if key == "kl_k3":
            ax.set_yscale("symlog", linthresh=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return _png(canvas)


def _told_apart(rows: list[str]) -> list[str]:
    """At most `SHOWN` rows: the paper's own six where they are there, otherwise the first."""
    published = [r for r in json.loads(PAPER.read_text(encoding="utf-8"))["table3_qwen3_4b_8k"] if r in rows]
    return (published if len(rows) > SHOWN and published else rows)[:SHOWN]


def _sets(scores: Scores) -> list[str]:
    return list(next(iter(next(iter(scores.values())).values())))


def _marked(m: Mean, rank: int) -> str:
    text = f"{100 * m.value:.1f}"
    text = {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(rank, text)
    return text + _half(m)


def _half(m: Mean) -> str:
    return "" if math.isnan(m.half) else f" ± {100 * m.half:.1f}"


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")
    return figure, FigureCanvasAgg(figure)


def _plain(ax, title: str, below: str) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    ax.set_xlabel(below, color=MUTED, fontsize=9)


def _png(canvas) -> bytes:
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()
