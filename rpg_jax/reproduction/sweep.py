"""Makes a table of a sweep: every method with every combination of the values of some config fields."""

import operator
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from rpg_jax.reproduction.table import Table, crossed
from rpg_jax.runs import config_files, resolve, run_names


def sweep_table(config: str, methods: Sequence[str], sweeps: Sequence[str]) -> tuple[str, Table]:
    """The name and the table of `sweeps`, each FIELD=VALUE,VALUE; without methods, with the method of the config.

    Raises:
      ValueError: an unknown field or method (with the nearest one), a value that the field does not take, a field or a
        value that is given twice, a field that tells runs apart anyway.
    """
    fields: dict[str, list[Any]] = {}
    for text in sweeps:
        field, separator, values = text.removeprefix("--config.").partition("=")
        if not separator or not all(value.strip() for value in values.split(",")):
            raise ValueError(f"--sweep {text!r}: write FIELD=VALUE,VALUE, as in optimizer.learning_rate=1e-4,3e-4")
        if field == "seed" or field.startswith("run."):
            raise ValueError(f"--sweep {field}: --seeds and --out give every run its seed and its folder")
        if field in fields:
            raise ValueError(f"--sweep {field} is there twice: give all its values at once, separated by commas")
        fields[field] = [_typed(config, field, value.strip()) for value in values.split(",")]
        if len(set(fields[field])) < len(fields[field]):
            raise ValueError(f"--sweep {text}: a value is there twice")
    names = [*methods, *map(str, fields.pop("method", []))]
    rows: dict[str, tuple[str, ...]] = {
        name: (run_names.option("method", _typed(config, "method", name)),) for name in names
    }
    table = crossed(
        rows or {"": ()},
        fields,
        title=f"Sweep of {' and '.join(fields) or 'method'}",
        paper="A sweep: a row is compared with the first row of its method, and that one with the first row of all",
        config=config,
    )
    swept = [run_names.short(field) for field in fields] or ["method"]
    return "-".join(["sweep", Path(config.partition(":")[0]).stem, *swept]), table


def check(table: Table, extra: Sequence[str]) -> None:
    """Refuses a table, before anything runs, of which a run would be refused when it starts.

    Raises:
      ValueError: an unknown field, a value that a field does not take, or fields that do not go together. It names the
        row.
    """
    known = config_files.fields()
    for row, overrides in table.rows.items():
        try:
            loaded = config_files.load(table.config, [*overrides, *extra])
            for field, value in loaded.overrides.items():
                if field in known:
                    known[field].check(field, value)
            resolve.check_training(loaded.config)
            resolve.resolve(loaded.config)
        except ValueError as error:
            raise ValueError(f"{row}: {error}" if row else str(error)) from error


def _typed(config: str, field: str, text: str) -> Any:
    """The value of a field as the config reads it from the command line."""
    known = config_files.fields()
    if field not in known:
        near = config_files.nearest(field)
        raise ValueError(f"no config field {field!r}; did you mean {near}? train --help lists all of them")
    loaded = config_files.load(config, [run_names.option(field, text)])
    value = reduce(operator.getitem, field.split("."), loaded.config)
    known[field].check(field, value)
    return value
