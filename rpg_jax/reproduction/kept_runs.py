"""Adds runs to a table whose numbers are kept: what is there is not run again, and the page has both.

Rows are compared from one warm start, and another machine's may decide more than any row. Kept runs that started from
other weights are refused.
"""

import dataclasses
import json
from collections.abc import Collection, Sequence

from rpg_jax.reproduction.results import Results, Run
from rpg_jax.reproduction.table import Cell, Table


def check(kept: Results, name: str, table: Table, extra: Sequence[str]) -> None:
    """Refuses kept numbers that cannot stand on one page with runs of `table`.

    Raises:
      ValueError: they are of another table, have other overrides, or a row of both has other settings.
    """
    if (kept.name, kept.table.config) != (name, table.config):
        raise ValueError(f"the kept numbers are of {kept.name} ({kept.table.config}), not of {name} ({table.config})")
    if tuple(kept.extra) != tuple(extra):
        raise ValueError(f"the kept runs of {name} have the overrides {list(kept.extra)}, not {list(extra)}")
    for row in table.rows.keys() & kept.table.rows.keys():
        if tuple(table.rows[row]) != tuple(kept.table.rows[row]):
            raise ValueError(
                f"the kept runs of {row} have {list(kept.table.rows[row])}, today's have {list(table.rows[row])}: "
                "make the table without kept runs, or leave this row out of --methods"
            )


def missing(cells: Sequence[Cell], kept: Results | None) -> list[Cell]:
    """The cells that the kept numbers lack, or whose run had not ended."""
    ended = {(run.row, run.seed, run.name) for run in kept.runs if run.ended} if kept else set()
    return [cell for cell in cells if (cell.row, cell.seed, cell.name) not in ended]


def together(kept: Results, new: Results, order: Collection[str]) -> Results:
    """The runs of both. Of a run that both have, the new one counts.

    Args:
      order: of the rows; those that it lacks come last.

    Raises:
      ValueError: they started from different weights.
    """
    _check_starts(kept, new)
    rows = {**kept.table.rows, **new.table.rows}
    names = [row for row in order if row in rows] + [row for row in rows if row not in order]
    runs: dict[tuple[int, int], Run] = {}
    for run in [*kept.runs, *new.runs]:
        runs[run.seed, names.index(run.row)] = run
    table = dataclasses.replace(
        new.table,
        rows={row: rows[row] for row in names},
        baselines={**kept.table.baselines, **new.table.baselines},
        swept={row: values for row, values in {**kept.table.swept, **new.table.swept}.items() if row in rows},
    )
    return dataclasses.replace(
        new,
        table=table,
        runs=[runs[place] for place in sorted(runs)],
        hardware="; ".join(dict.fromkeys([*kept.hardware.split("; "), *new.hardware.split("; ")])),
    )


def _check_starts(kept: Results, new: Results) -> None:
    """Raises ValueError if runs of one model that was read or warm-started began with different weights."""
    began: dict[str, dict[str, Run]] = {}
    for run in [*kept.all_runs(), *new.all_runs()]:
        if run.start and (run.config.get("warm_start.enabled") or run.config.get("model.path")):
            model = json.dumps({key: v for key, v in run.config.items() if key.startswith("model.")}, sort_keys=True)
            began.setdefault(model, {}).setdefault(run.start, run)
    for starts in began.values():
        if len(starts) > 1:
            told = " and ".join(f"{run.name} ({start})" for start, run in starts.items())
            raise ValueError(
                f"{told} did not start from the same weights, so their rows cannot be compared: copy the warm start of "
                "the kept runs into the folder warm_starts of these, or make the table without kept runs"
            )
