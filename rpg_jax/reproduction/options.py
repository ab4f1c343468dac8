"""Turns the options of `python -m rpg_jax.reproduce` into a table and the way to run it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rpg_jax.reproduction import objective_table, run_tables
from rpg_jax.reproduction.run_tables import Job
from rpg_jax.reproduction.sweep import sweep_table
from rpg_jax.reproduction.table import SMALL_CONFIG, Table
from rpg_jax.reproduction.tables import TABLES

OBJECTIVE = "objective"  # the table whose runs are no training runs, but which keeps their numbers


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


def objective(options: argparse.Namespace, extra: Sequence[str]) -> Path:
    """Makes the table `OBJECTIVE`, by runs or from data; returns its page.

    Raises:
      ValueError: an option that this table does not take.
    """
    if given := [f"--{name}" for name in ("methods", "seeds", "config", "rates") if getattr(options, name)] + [*extra]:
        raise ValueError(f"the table {OBJECTIVE} has its own rows, seeds and settings: leave out {', '.join(given)}")
    if options.from_data is not None:
        data = run_tables.DATA / "objective.jsonl.gz" if options.from_data == Path() else options.from_data
        return objective_table.page_from(data, options.out)
    return objective_table.objective(options.out, options.quick, options.jobs or run_tables.cores())


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
