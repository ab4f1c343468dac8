"""Turns the options of `python -m rpg_jax.reproduce` into a table and the way to run it."""

import argparse
import operator
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from rpg_jax.reproduction import run_tables
from rpg_jax.reproduction.run_tables import Job
from rpg_jax.reproduction.table import SMALL_CONFIG, Table, crossed
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.runs import config_files, run_names


def asked(options: argparse.Namespace, extra: Sequence[str], command: str) -> tuple[str, Table, Job]:
    """The name of the table, the table, and how it is run.

    Raises:
      ValueError: options that do not go together, or a value that one of them does not take.
    """
    extra = [*options.overrides, *extra]
    if bool(options.sweep) == bool(options.table):
        raise ValueError(f"give either --table or --sweep; the tables are {', '.join(TABLES)}")
    if options.sweep:
        methods = [method.strip() for method in options.methods.split(",")] if options.methods else []
        if options.rates or options.with_data:
            raise ValueError("--rates and --with-data are for tables: a sweep has its own values")
        name, table = sweep_table(options.config or SMALL_CONFIG, methods, options.sweep)
    else:
        name, table = options.table, TABLES[options.table]
        if options.config:
            raise ValueError(f"--config is for sweeps; --table={name} has {table.config}")
        rows = table.named(options.methods) if options.methods else None
        table = table.only(rows or (run_tables.quick_rows(table) if options.quick else list(table.rows)))
    if options.with_data and (options.rates or options.quick or not options.scan):
        raise ValueError("--with-data keeps the rates of the kept rows: leave out --rates, --quick and --noscan")
    if options.quick:
        extra = [f"--config.train.steps={run_tables.QUICK_STEPS}", *extra]
    job = Job(
        options.out / "quick" if options.quick else options.out,
        seeds(options.seeds) or range(run_tables.QUICK_SEEDS if options.quick else run_tables.SEEDS),
        run_tables.jobs_at_once(options.jobs, run_tables.platform_name()),
        extra,
        command,
        options.scan and not options.quick,
        options.rates,
        _kept(options.with_data, name),
    )
    return name, table, job


def data_file(options: argparse.Namespace, extra: Sequence[str]) -> Path:
    """The file of `--from-data`: the one given, else the table's own that comes with the code.

    Raises:
      ValueError: an option that only runs take, or neither a table nor a file.
    """
    runs_only = ("sweep", "config", "methods", "seeds", "jobs", "rates", "with_data", "quick")
    given = [f"--{name.replace('_', '-')}" for name in runs_only if getattr(options, name)]
    if given := [*given, *options.overrides, *extra]:
        raise ValueError(f"--from-data makes the page of the runs as they were: leave out {', '.join(given)}")
    if options.from_data != Path():
        return options.from_data
    if not options.table:
        raise ValueError("--from-data needs --table, or a file as --from-data=NAME.json.gz")
    return run_tables.DATA / f"{options.table}.json.gz"


def _kept(given: Path | None, name: str) -> Path | None:
    """The file of `--with-data`: the one given, else the table's own."""
    return run_tables.DATA / f"{name}.json.gz" if given == Path() else given


def seeds(text: str | None) -> list[int]:
    """The seeds of "3", which are 0, 1, 2, or of the list "100,101"; none of None.

    Raises:
      ValueError: no such number or list.
    """
    if text is None:
        return []
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    found = numbers if "," in text else list(range(numbers[0])) if numbers else []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(f"--seeds={text}: give a number of seeds, as 3, or different seeds, as 100,101")
    return found


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
