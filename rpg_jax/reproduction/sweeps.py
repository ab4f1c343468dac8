"""Sweeps over config fields: the table of a sweep, the best values of each row, and the accuracy of all values."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.report.seeds import Mean, mean
from rpg_jax.report.tables import markdown_table
from rpg_jax.reproduction.results import Results
from rpg_jax.reproduction.tables import Table, crossed
from rpg_jax.runs import config_files, run_names

# {row without swept values: {row of the sweep: {seed: accuracy in %}}}
Accuracy = dict[str, dict[str, dict[int, float]]]


def sweep_table(config: str, methods: Sequence[str], sweeps: Sequence[str]) -> tuple[str, Table]:
    """(the name, which begins with "sweep-"; the table of every combination of `methods` with the values of `sweeps`,
    each a text FIELD=VALUE,VALUE). `config` is the runs' config file; an empty `methods` leaves its method. Raises
    ValueError for a text of another form, an unknown field, a value of another type, a field or a value that is there
    twice, and for the seed and the fields `run.*`. An unknown method is not refused here."""
    fields: dict[str, list[Any]] = {}
    for text in sweeps:
        field, separator, values = text.removeprefix("--config.").partition("=")
        if not (field and separator) or not all(value.strip() for value in values.split(",")):
            raise ValueError(f"--sweep {text!r}: write FIELD=VALUE,VALUE, as in optimizer.learning_rate=1e-4,3e-4")
        if field == "seed" or field.startswith("run."):
            raise ValueError(f"--sweep {field}: --seeds and --out give every run its seed and its folder")
        if field in fields:
            raise ValueError(f"--sweep {field} is there twice: give all its values at once, separated by commas")
        fields[field] = [_typed(config, field, value.strip()) for value in values.split(",")]
        if len(set(fields[field])) < len(fields[field]):
            raise ValueError(f"--sweep {text}: a value is there twice")
    names = [*methods, *map(str, fields.pop("method", []))]
    options = {name: run_names.option("method", _typed(config, "method", name)) for name in names}
    rows: dict[str, tuple[str, ...]] = {name: (option,) for name, option in options.items()}
    table = crossed(
        rows or {"": ()},
        fields,
        title=f"Sweep of {' and '.join(fields) or 'method'}",
        paper="A sweep: a row is compared with the first row of its method, and that one with the first row of all",
        config=config,
    )
    swept = [run_names.short(field) for field in fields] or ["method"]
    return "-".join(["sweep", run_names.file_part(config), *swept]), table


def _late_accuracy(sweep: Results) -> Accuracy:
    """The training accuracy, in %, over the last third of the steps of every run that has ended."""
    found: Accuracy = {}
    for row, (group, _) in sweep.table.swept.items():
        found.setdefault(group, {})[row] = {
            run.seed: 100 * run.late("accuracy") for run in sweep.runs if run.row == row and run.ended
        }
    return found


def best(sweep: Results) -> dict[str, str]:
    """{row without swept values: its best row of the sweep}. The best row has the highest mean, over the seeds, of the
    training accuracy over the last third of the steps; of equal means, the first counts. Only a row that has an ended
    run with an accuracy for every seed can be best. A row without swept values is missing if it has no best row."""
    seeds = {run.seed for run in sweep.runs}
    chosen = {}
    for group, by_row in _late_accuracy(sweep).items():
        means = {
            row: sum(by_seed.values()) / len(by_seed)
            for row, by_seed in by_row.items()
            if by_seed and set(by_seed) == seeds and not math.isnan(sum(by_seed.values()))
        }
        if means:
            chosen[group] = max(means, key=lambda row: means[row])
    return chosen


def best_values(sweep: Results) -> dict[str, Mapping[str, Any]]:
    """{row without swept values: {swept field: value}}, with the values of the row that `best` chooses."""
    return {group: sweep.table.swept[row][1] for group, row in best(sweep).items()}


def section(sweep: Results) -> list[str]:
    """Paragraphs and a Markdown table: the training accuracies of `best`, in %, by row and values. ✓ marks the best."""
    chosen = best(sweep)
    combinations = list(dict.fromkeys(run_names.label(values) for _, values in sweep.table.swept.values()))
    lines = []
    for group, by_row in _late_accuracy(sweep).items():
        row = {run_names.label(sweep.table.swept[name][1]): name for name in by_row}
        cells = [_cell(by_row[row[label]], row[label] == chosen.get(group)) for label in combinations]
        lines.append([group or "all", *cells])
    seeds = sorted({run.seed for run in sweep.runs})
    none = [group for group in _late_accuracy(sweep) if group not in chosen]
    return [
        "A cell is the mean training accuracy over the last third of the steps, in %, over the seed"
        f"{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, ± half of a 95 % interval.\n"
        "✓ marks the chosen cell of each row: the highest mean, of equal ones the first. A cell in which a run failed "
        "is not chosen.",
        markdown_table(["", *combinations], lines, numbers=range(1, 1 + len(combinations))),
        *_ends(sweep),
        *([f"No value of {', '.join(none)} could be chosen: a run of each failed."] if none else []),
    ]


def _cell(by_seed: Mapping[int, float], chosen: bool) -> str:
    if not by_seed:
        return "–"
    m: Mean = mean(list(by_seed.values()))
    return f"{m.value:.1f}{m.margin}{' ✓' * chosen}"


def _ends(sweep: Results) -> list[str]:
    """For each field with numbers, a sentence on each end of the range: the rows whose chosen number lies there."""
    sentences = []
    picked = best_values(sweep)
    for field in dict.fromkeys(itertools.chain.from_iterable(values for _, values in sweep.table.swept.values())):
        values = [values[field] for _, values in sweep.table.swept.values()]
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            continue
        for end, words in ((min(values), "smallest"), (max(values), "largest")):
            rows = [group or "all" for group, own in picked.items() if own[field] == end]
            if rows and min(values) < max(values):
                sentences.append(
                    f"The {words} value, {run_names.label({field: end})}, is the chosen one of {', '.join(rows)}: "
                    "a better one may lie beyond it."
                )
    return sentences


def _typed(config: str, field: str, text: str) -> Any:
    """The value of `field` that `text` gives on the command line. Raises ValueError as `config_files.load` does."""
    return config_files.load(config, [run_names.option(field, text)]).config[field]
