"""Writes a table of runs as a page: its origin, scores with intervals, differences, dynamics, the paper's numbers."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report import plots
from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import Run, series
from rpg_jax.report.seeds import SEEDS_TO_RANK, Mean, Values, mean, ranks_of
from rpg_jax.report.tables import columns, markdown_table
from rpg_jax.reproduction import sweeps
from rpg_jax.reproduction.results import Results, Rows
from rpg_jax.reproduction.tables import LEARNING_RATE, TABLES, Table
from rpg_jax.reproduction.training import all_differences, difference_table, equal_cost, training_table
from rpg_jax.runs import run_names
from rpg_jax.storage import write_atomically

PAPER = Path(__file__).with_name("paper_tables.json")
SHOWN = 6  # most rows in a figure with lines: the eye tells no more apart
Columns = dict[tuple[str, str], dict[str, dict[int, float]]]  # {(held-out set, one of QUANTITIES): {row: {seed: %}}}
HEADS = {"last": "Last", "best": "Best", "pass": "pass@k"}


def write_page(results: Results, folder: Path) -> Path:
    """Makes `folder`, writes the page of a table, NAME.md, and its figures NAME*.png into it, and returns the path of
    the page. NAME is `results.name`. Equal results give equal pages. Raises ValueError if no run has a score."""
    name, table, rows = results.name, _in_words_of_today(results), results.rows()
    if not (scores := columns({row: {n: run.scores() for n, run in own.items()} for row, own in rows.items()})):
        raise ValueError(f"{results.name} has no evaluated run")
    last = {name: by_row for (name, quantity), by_row in scores.items() if quantity == "last"}
    equal = equal_cost(table, rows)
    parts = [f"# {table.title}", _origin(results)]
    parts += _changed_rows(results, TABLES[name].rows) if name in TABLES else []
    parts += [_explanation(table, results, scores, unequal=bool(equal)), _score_table(rows, scores)]
    parts += ["## Differences", *_differences(table, rows, last)]
    parts += ["## While training", *training_table(table, rows)]
    parts += ["## At equal updates, completions and seconds", *equal] if equal else []
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in table.shown if row in rows] if len(rows) > SHOWN else []
    shown = {row: list(rows[row].values()) for row in (chosen or list(rows))[:SHOWN]}
    compared = {row: table.compared_with(row) for row in rows}
    parts += _figure("Last by row", folder / f"{name}.png", plots.draw_scores(last, compared))
    parts += ["A large dot is the mean over seeds, its line the 95 % interval. Others are compared with the red rows."]
    parts += _figure("Training dynamics", folder / f"{name}-dynamics.png", plots.draw_dynamics(shown, list(last)))
    parts += _figure("What changes beside accuracy", folder / f"{name}-drift.png", plots.draw_drift(shown, list(last)))
    if left_out := [row for row in rows if row not in shown]:
        parts += [f"Figures over steps show {len(shown)} rows of {len(rows)}, without {'; '.join(left_out)}."]
    if sweep := results if table.swept else results.scan:  # the runs that values are chosen from
        parts += ["## Learning rates" if results.scan else "## Best value of each method", *sweeps.section(sweep)]
    parts += _code_of_rows(results)
    parts += ["## The paper's own numbers"] if table.published else []
    parts += [part for published in table.published for part in paper_table(published)]
    page = folder / f"{name}.md"
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


def _in_words_of_today(results: Results) -> Table:
    """The table of the results, for a table of `TABLES` with today's texts and comparisons. The rows stay as they were
    run. `shown` of a sweep has its best rows."""
    if results.table.swept:
        return dataclasses.replace(results.table, shown=list(sweeps.best(results).values()))
    if results.name not in TABLES:
        return results.table
    return dataclasses.replace(TABLES[results.name], rows=results.table.rows, config=results.table.config)


def _figure(caption: str, file: Path, image: bytes | None) -> list[str]:
    """Writes a figure if `image` is not None; returns the Markdown lines that show the figure."""
    if image is None:
        return []
    write_atomically(file, image)
    return [f"![{caption}]({file.name})"]


def _explanation(table: Table, results: Results, scores: Columns, *, unequal: bool) -> str:
    lines = [
        f"{table.paper}.",
        _learning_rates(results),
        "Scores are in %, at temperature 1. Last is Mean@k after the last step; Best is the largest Mean@k of all "
        "evaluations: a maximum over noisy numbers, never below Last; pass@k is that of the last evaluation.",
        "A cell is the mean over seeds ± half of a 95 % interval (Student's t), which can reach beyond 100 %.",
    ]
    if all(len(own) >= SEEDS_TO_RANK for by_row in scores.values() for own in by_row.values()):
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


def _score_table(rows: Rows, scores: Columns) -> str:
    """A table in Markdown: Last, Best and pass@k of each set with intervals, and the number of seeds of each row. If
    there are enough seeds, the best value is bold and, of four rows or more, the second best is underlined."""
    lines: list[list[object]] = [[row] for row in rows]
    for by_row in scores.values():
        means = {row: mean(list(own.values())) for row, own in by_row.items()}
        places = dict(zip(means, ranks_of(list(means.values())), strict=False))
        for line, row in zip(lines, rows, strict=True):
            rank = places.get(row, 0)
            line.append(_marked(means[row], 0 if rank == 2 and len(means) < 4 else rank) if row in means else "–")
    lines = [[*line, len(by_seed)] for line, by_seed in zip(lines, rows.values(), strict=True)]
    head = ["", *(f"{name} {HEADS[quantity]}" for name, quantity in scores), "seeds"]
    return markdown_table(head, lines, numbers=range(1, len(head)))


def _differences(table: Table, rows: Rows, last: Mapping[str, Values]) -> list[str]:
    """Paragraphs and a table: Last, {set: {row: {seed: %}}}, of each row minus Last of its compared row, by seed."""
    missing = sorted({table.compared_with(row) for row in rows} - set(rows))
    return [
        "Differences in Last, paired by seed, in points; one in *italics* has a 95 % interval that excludes 0.",
        *([f"{', '.join(missing)}: not run."] if missing else []),
        difference_table(table, rows, last),
        *all_differences(table, last),
    ]


def paper_table(table: str) -> list[str]:
    """A paragraph and a table in Markdown: the paper's accuracies in %, Last and Best, of `table`, a name in
    paper_tables.json. "(!)" marks a Last that is larger than the Best beside it. Raises KeyError for unknown names."""
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
        markdown_table(head, rows, numbers=range(1, len(head))),
    ]


def _marked(m: Mean, rank: int) -> str:
    text = f"{m.value:.1f}"
    return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(rank, text) + m.margin


def _origin(results: Results) -> str:
    """A line with the command, its config, and the number, the code, the machine and the training time of the runs."""
    runs = results.all_runs()
    seconds = sum(sum(series(run.records, "seconds")[1]) for run in runs)
    steps = sorted({run.config["train.steps"] for run in results.runs})
    ks = sorted({run.config["evaluation.k"] for run in results.runs})
    devices = sorted({run.versions.get("devices", "unknown device") for run in runs})
    counts = f"{len(results.runs)} runs of {' or '.join(map(str, steps))} steps"
    if results.scan:
        counts += f" and {len(results.scan.runs)} that choose learning rates"
    codes = _codes(runs)
    return " · ".join(
        (
            f"`{results.command}`",
            f"`{results.table.config}`",
            counts,
            f"k = {' or '.join(map(str, ks))}",
            code_name(codes[0][0].versions) if len(codes) == 1 else f"**{len(codes)} versions of the code, see below**",
            f"{' and '.join(devices)}, {results.hardware}",
            f"{duration(seconds)} in training steps, summed over runs",
            f"numbers of every step: `{results.name}.json.gz`; `--from-data` makes this page from it",
        )
    )


def _code_of_rows(results: Results) -> list[str]:
    """A paragraph and a table of the rows by commit, packages, Python and device. [] if all runs have the same."""
    codes = _codes(results.all_runs())
    if len(codes) < 2:
        return []
    firsts = [runs[0].versions for runs in codes]
    facts = [{k: str(v.get(k, "")) for k in ("python", "devices")} | v.get("packages", {}) for v in firsts]
    differing = [name for name in sorted({*itertools.chain(*facts)}) if len({own.get(name) for own in facts}) > 1]
    lines = []
    for runs, known in zip(codes, facts, strict=True):
        own = [run for run in results.runs if run.versions == runs[0].versions]
        names = [_seeds(row, own, results.runs) for row in dict.fromkeys(run.row for run in own)]
        names += [f"{len(runs) - len(own)} runs that chose learning rates"] if len(runs) > len(own) else []
        differs = ", ".join(f"{name} {known.get(name, '–')}" for name in differing if name != "jax")
        lines.append([code_name(runs[0].versions), differs or "–", ", ".join(names)])
    return [
        "## Versions of the code",
        "**The runs of this page were not made with one version of code and packages.** A difference between rows of "
        "two versions can come from the versions.",
        markdown_table(["code", "what differs else", "rows"], lines),
    ]


def _changed_rows(results: Results, today: Mapping[str, Sequence[str]]) -> list[str]:
    """A paragraph on the rows that have other settings in `today`, or are not among its rows. [] without such rows."""
    rows = [row for row, overrides in results.table.rows.items() if tuple(today.get(row, ())) != tuple(overrides)]
    if not rows:
        return []
    return [f"**Rows of their date**: the command has other settings today for {', '.join(rows)}."]


def _codes(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs, grouped by commit, packages, Python and device."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.versions, sort_keys=True), []).append(run)
    return list(found.values())


def code_name(versions: Mapping[str, Any]) -> str:
    """A text of a run's `versions`: "commit 0123abc with uncommitted changes, jax 0.7.0", or "commit unknown"."""
    changed = " with uncommitted changes" if versions.get("uncommitted_changes") else ""
    packages = versions.get("packages", {})
    made_with = f", jax {packages['jax']}" if packages.get("jax") else ""
    return f"commit {versions.get('commit', '')[:7] or 'unknown'}{changed}{made_with}"


def _seeds(row: str, own: Sequence[Run], runs: Sequence[Run]) -> str:
    """A row's name, with seeds if not all of its runs are among `own`."""
    seeds = sorted(run.seed for run in own if run.row == row)
    whole = len(seeds) == sum(run.row == row for run in runs)
    return row if whole else f"{row} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})"
