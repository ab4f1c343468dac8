"""Reproduces the paper's comparisons, and ours, at a scale that a laptop can check; sweeps over any config field.

  python -m rpg_jax.reproduce --table=small --methods=DAPO,RPG-REINFORCE-URKL --seeds=3
  python -m rpg_jax.reproduce --table=small -- --config.train.steps=200     (fields after -- go to every run)
  python -m rpg_jax.reproduce --table=small --from-data     (the page from the numbers that come with the code)
  python -m rpg_jax.reproduce --table=reasoning --with-data --methods=RLOO     (one more row beside those numbers)
  python -m rpg_jax.reproduce --methods=GRPO,RPG-REINFORCE-URKL --seeds=3 --config=mine.py
  python -m rpg_jax.reproduce --sweep optimizer.learning_rate=1e-4,3e-4 --methods=GRPO,RPG-REINFORCE-URKL --seeds=3

The folder --out receives all runs, and for each table a folder with its page, figures and numbers. The same command
continues a table. A run of configs/small.py takes one to two CPU minutes, the warm start that all share one to three.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rpg_jax.reproduction import run_tables, sweeps, workers
from rpg_jax.reproduction.run_tables import TableOptions
from rpg_jax.reproduction.tables import SMALL_CONFIG, TABLES, Table
from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv` (None: this process's). Returns the exit code: 0 if all runs ended
    well, 1 if one failed, 2 for wrong flags, 130 for Ctrl-C."""
    if argv is None:
        cli.prepare_process()  # `cli.run` gets arguments, and so would not
    given = list(sys.argv[1:] if argv is None else argv)
    separator = given.index("--") if "--" in given else len(given)

    def reproduce(options: argparse.Namespace) -> int:
        """Makes the table that the options ask for, prints the failed runs and the page, and returns the exit code."""
        began, extra = time.perf_counter(), given[separator + 1 :]
        failed: dict[str, Path] = {}
        try:
            if options.from_data is not None:
                page = run_tables.page_from(_data_file(options, extra), options.out)
            else:
                page, failed = run_tables.make_table(*_table_and_options(options, extra, _command(given)))
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            return 128 + signal.SIGINT
        for name, log in failed.items():
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            print(f"{name} failed: {lines[-1] if lines else 'no output'} ({log})", file=sys.stderr)
        print(f"{page} in {time.perf_counter() - began:.0f} s")
        return 1 if failed else 0

    return cli.run(reproduce, _parser(), given[:separator])


def _table_and_options(
    options: argparse.Namespace, extra: Sequence[str], command: str
) -> tuple[str, Table, TableOptions]:
    """(the name of the table, the table, how the table is run). `extra` are the arguments after --, for every run;
    `command` is the text that the page names as its origin. Raises ValueError for options that do not go together, or
    wrong values."""
    extra = [*options.overrides, *extra]
    if bool(options.sweep or not options.table and options.methods) == bool(options.table):
        raise ValueError(
            f"give either --table, or --methods or --sweep for a table of your own; the tables are {', '.join(TABLES)}"
        )
    if not options.table:
        methods = [method.strip() for method in options.methods.split(",")] if options.methods else []
        if options.with_data:
            raise ValueError("--with-data is for tables: a sweep has its own values")
        config = SMALL_CONFIG if options.config is None else options.config
        name, table = sweeps.sweep_table(config, methods, options.sweep or [])
    else:
        name, table = options.table, TABLES[options.table]
        if options.config is not None:
            raise ValueError(f"--config is for sweeps; --table={name} has {table.config}")
        rows = table.named(options.methods) if options.methods else None
        table = table.only(rows or (run_tables.quick_rows(table) if options.quick else list(table.rows)))
    if options.with_data and (options.quick or not options.scan):
        raise ValueError("--with-data keeps the rates of the kept rows: leave out --quick and --noscan")
    if options.quick:
        extra = [f"--config.train.steps={run_tables.QUICK_STEPS}", *extra]
    how = TableOptions(
        options.out / "quick" if options.quick else options.out,
        seeds(options.seeds) or range(run_tables.QUICK_SEEDS if options.quick else run_tables.SEEDS),
        run_tables.jobs_at_once(options.jobs, run_tables.platform_name()),
        extra,
        command,
        options.scan and not options.quick,
        run_tables.DATA / f"{name}.json.gz" if options.with_data == Path() else options.with_data,
    )
    return name, table, how


def _data_file(options: argparse.Namespace, extra: Sequence[str]) -> Path:
    """The file that `--from-data` names. Without a name: the table's file that comes with the code.

    Raises ValueError for an option that only runs take, arguments `extra` after -- included, and where neither a table
    nor a file is given."""
    runs_only = ("sweep", "config", "methods", "seeds", "jobs", "with_data", "quick")
    given = [f"--{name.replace('_', '-')}" for name in runs_only if getattr(options, name)]
    if given := [*given, *["--noscan"] * (not options.scan), *options.overrides, *extra]:
        raise ValueError(f"--from-data makes the page of the runs as they were: leave out {', '.join(given)}")
    if options.from_data != Path():
        return options.from_data
    if not options.table:
        raise ValueError("--from-data needs --table, or a file as --from-data=NAME.json.gz")
    return run_tables.DATA / f"{options.table}.json.gz"


def seeds(text: str | None) -> list[int]:
    """The seeds of a text: "3" means 0, 1 and 2; "100,101" is a list, and so is "7,". [] for None.

    Raises ValueError for another text, a seed below 0, a seed that is there twice, or no seed.
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


def _command(given: Sequence[str]) -> str:
    """The command with the arguments `given`, as a page names its origin: without `--out`, a folder of one machine."""
    pairs = zip(["", *given], given, strict=False)
    kept = [word for before, word in pairs if before != "--out" and word.partition("=")[0] != "--out"]
    return shlex.join(["python", "-m", "rpg_jax.reproduce", *kept])


def _parser() -> cli.Parser:
    parser = cli.parser("reproduce", __doc__)
    tables = "; ".join(f"{name}: {table.title.lower()} ({len(table.rows)} rows)" for name, table in TABLES.items())
    parser.add_argument("--table", choices=TABLES, help=tables)
    seeds, quick, cores = run_tables.SEEDS, run_tables.QUICK_SEEDS, workers.cores()
    parser.add_argument("--sweep", action="append", metavar="FIELD=A,B", help="a table of every combination of values")
    parser.add_argument("--config", metavar="FILE", help=f"of a sweep (default: {SMALL_CONFIG})")
    parser.add_argument("--methods", help="rows, separated by commas (default: all; in a sweep the config's method)")
    parser.add_argument("--seeds", help=f"a number N, for 0 ... N-1, or a list (default: {seeds}, --quick {quick})")
    parser.add_argument("--jobs", type=int, help=f"runs at once (default: one a core, {cores}; on a TPU 1)")
    parser.add_argument("--noscan", dest="scan", action="store_false", help="the config's learning rate in every row")
    parser.add_argument("--from-data", nargs="?", const=Path(), type=Path, metavar="DATA", help="page without runs")
    parser.add_argument(
        "--with-data", nargs="?", const=Path(), type=Path, metavar="DATA", help="add to these runs; repeat none of them"
    )
    parser.add_argument("--out", type=Path, default=Path("reproduction"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look, not a result: fewer rows, seeds and steps")
    return parser


if __name__ == "__main__":
    sys.exit(main())
