"""Writes a table of runs as a page: scores with intervals, differences, dynamics, and the paper's numbers."""

import dataclasses
import json
from pathlib import Path

from rpg_jax.report import markdown
from rpg_jax.report.seeds import QUANTITIES, SEEDS_TO_RANK, Mean, mean, paired_difference, ranks
from rpg_jax.reproduction import choice, figures, origin
from rpg_jax.reproduction.figures import PAPER, Scores, draw_drift, held_out_sets
from rpg_jax.reproduction.results import Results
from rpg_jax.reproduction.table import LEARNING_RATE, Table
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.reproduction.training_tables import all_differences, equal_cost, starred, training_table
from rpg_jax.runs import run_names
from rpg_jax.storage import write_atomically

HEADS = {"last": "Last", "best": "Best", "pass": "pass@k"}


def write_page(results: Results, folder: Path) -> Path:
    """Writes `<name>.md` and the figures `<name>*.png` into `folder`; returns the page.

    The page depends on the results alone.

    Raises:
      ValueError: no run has a score yet.
    """
    scores: Scores = {}
    for run in results.runs:
        if own := run.scores():
            scores.setdefault(run.row, {})[run.seed] = own
    if not scores:
        raise ValueError(f"{results.name} has no evaluated run")
    name, table, rows = results.name, _in_words_of_today(results), results.rows()
    equal = equal_cost(table, rows)
    parts = [f"# {table.title}", origin.line(results)]
    parts += origin.changed_rows(results, TABLES[name].rows) if name in TABLES else []
    parts += [_explanation(table, results, scores, unequal=bool(equal)), score_table(scores)]
    parts += ["## Differences", *_differences(table, scores)]
    parts += ["## While training", *training_table(table, rows)]
    parts += ["## At equal updates, completions and seconds", *equal] if equal else []
    folder.mkdir(parents=True, exist_ok=True)
    parts += _figure("Last by row", folder / f"{name}.png", figures.draw_scores(table, scores))
    parts += _figure("pass@k", folder / f"{name}-pass.png", figures.draw_pass_at_k(table, scores, results.runs))
    dynamics = figures.draw_dynamics(table, scores, results.runs)
    parts += _figure("Training dynamics", folder / f"{name}-dynamics.png", dynamics)
    shown = figures.rows_to_show(table, scores)
    drift = draw_drift({row: [r.records for r in results.runs if r.row == row] for row in shown}, held_out_sets(scores))
    parts += _figure("What changes beside accuracy", folder / f"{name}-drift.png", drift)
    if sweep := results if table.swept else results.scan:  # the runs that values are chosen from
        parts += ["## Learning rates" if results.scan else "## Best value of each method", *choice.section(sweep)]
        values = figures.draw_values(sweep, table.shown)
        parts += _figure("Training accuracy by value", folder / f"{name}-values.png", values)
    parts += origin.code_of_rows(results)
    parts += ["## The paper's own numbers"] if table.published else []
    parts += [part for published in table.published for part in paper_table(published)]
    page = folder / f"{name}.md"
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


def _in_words_of_today(results: Results) -> Table:
    """The table of the results, with its texts and comparisons of today; figures of a sweep show its best rows."""
    if results.table.swept:
        return dataclasses.replace(results.table, shown=list(choice.best(results).values()))
    if results.name not in TABLES:
        return results.table
    return dataclasses.replace(TABLES[results.name], rows=results.table.rows, config=results.table.config)


def _figure(caption: str, file: Path, image: bytes | None) -> list[str]:
    """Writes a figure, if there is one; returns its place on the page."""
    if image is None:
        return []
    write_atomically(file, image)
    return [f"![{caption}]({file.name})"]


def _explanation(table: Table, results: Results, scores: Scores, *, unequal: bool) -> str:
    lines = [
        f"{table.paper}.",
        _learning_rates(results),
        "Scores are in %, at temperature 1. Last is Mean@k after the last step; Best is the largest Mean@k of all "
        "evaluations: a maximum over noisy numbers, never below Last; pass@k is that of the last evaluation.",
        "A cell is the mean over seeds ± half of a 95 % interval (Student's t), which can reach beyond 100 %.",
    ]
    if _marks(scores):
        lines.append(
            "In each column the **highest** value is bold and, in tables of four rows or more, the <u>second highest"
            "</u> underlined. Neither means that a difference is real: see the next table."
        )
    else:
        lines.append(f"No value is marked as the highest: that takes {SEEDS_TO_RANK} seeds of every row.")
    if unequal:
        lines.append(
            "**All rows have taken equally many steps, but not all have spent the same**: "
            "[equal updates, completions and seconds](#at-equal-updates-completions-and-seconds) compare them."
        )
    return "\n".join(lines)


def _learning_rates(results: Results) -> str:
    rates = sorted({run.config[LEARNING_RATE] for run in results.runs if LEARNING_RATE in run.config})
    if results.scan:
        seeds = sorted({run.seed for run in results.scan.runs})
        return (
            f"The learning rate of each row was chosen by one rule, on seeds {', '.join(map(str, seeds))}, which the "
            "tables below do not have: see [learning rates](#learning-rates)."
        )
    if len(rates) == 1:
        return f"All rows have the learning rate {run_names.shown(rates[0])}; it was not chosen for each row."
    return f"The rows have the learning rates {', '.join(map(run_names.shown, rates))}."


def _marks(scores: Scores) -> bool:
    return min(map(len, scores.values())) >= SEEDS_TO_RANK


def score_table(scores: Scores) -> str:
    """Last, Best and pass@k of each set with intervals.

    With seeds enough the best value is bold, the second underlined.
    """
    sets = held_out_sets(scores)
    columns = []
    for s in sets:
        for q in QUANTITIES:
            means = [mean([cell[s][q] for cell in by_seed.values()]) for by_seed in scores.values()]
            places = ranks([m.value for m in means])
            marked = [] if not _marks(scores) else [1, 2] if len(means) > 3 else [1]
            columns.append([_marked(m.times(100), p if p in marked else 0) for m, p in zip(means, places, strict=True)])
    cells = zip(*columns, strict=True)
    rows = [[row, *own, len(by_seed)] for (row, by_seed), own in zip(scores.items(), cells, strict=True)]
    head = ["", *(f"{s} {HEADS[q]}" for s in sets for q in QUANTITIES), "seeds"]
    return markdown.table(head, rows, numbers=range(1, len(head)))


def _differences(table: Table, scores: Scores) -> list[str]:
    """Paragraphs and a table: Last of each set minus Last of the compared row, paired by seed."""
    sets, others = held_out_sets(scores), {row: table.compared_with(row) for row in scores}
    rows = []
    for row, by_seed in scores.items():
        other = others[row]
        if row == other or not set(by_seed) & set(scores.get(other, ())):
            continue
        cells = []
        for s in sets:
            mine, theirs = ({seed: cell[s]["last"] for seed, cell in scores[r].items()} for r in (row, other))
            cells.append(starred(paired_difference(mine, theirs).times(100)))
        rows.append([row, *cells, other])
    missing = sorted(set(others.values()) - set(scores))
    last = {s: {row: {x: 100 * c[s]["last"] for x, c in by.items()} for row, by in scores.items()} for s in sets}
    return [
        "Differences in Last, paired by seed, in points; one in *italics* has a 95 % interval that excludes 0.",
        *([f"{', '.join(missing)}: not run."] if missing else []),
        markdown.table(["", *sets, "compared with"], rows, numbers=range(1, 1 + len(sets))),
        *all_differences(table, last),
    ]


def paper_table(table: str) -> list[str]:
    """A paragraph and a table: the published numbers. A Last above its Best, which is impossible, is flagged."""
    published = json.loads(PAPER.read_text(encoding="utf-8"))
    rows, flagged = [], False
    for row, by_set in published[table].items():
        cells = []
        for scores in by_set.values():
            impossible = scores["last"] > scores["best"]
            flagged |= impossible
            cells += [f"{100 * scores['last']:.2f}{' (!)' * impossible}", f"{100 * scores['best']:.2f}"]
        rows.append([row, *cells])
    head = ["", *(f"{s} {q}" for s in next(iter(published[table].values())) for q in ("Last", "Best"))]
    note = " (!) marks a Last above its Best, which is impossible." if flagged else ""
    return [
        f"Published numbers, not ours: {published['source']}; `{table}`, accuracy in %.{note}",
        markdown.table(head, rows, numbers=range(1, len(head))),
    ]


def _marked(m: Mean, rank: int) -> str:
    text = f"{m.value:.1f}"
    return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(rank, text) + m.margin
