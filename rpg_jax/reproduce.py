"""Reproduces the paper's comparisons, and ours, at a scale that a laptop can check; sweeps over any config field.

  python -m rpg_jax.reproduce --table=small --methods=DAPO,RPG-REINFORCE-URKL --seeds=3
  python -m rpg_jax.reproduce --table=small -- --config.train.steps=200     (what follows -- goes to every run)
  python -m rpg_jax.reproduce --table=small --from-data     (the page from the numbers that come with the code)
  python -m rpg_jax.reproduce --table=reasoning --with-data --methods=RLOO     (one more row beside those numbers)
  python -m rpg_jax.reproduce --sweep optimizer.learning_rate=1e-4,3e-4 --methods=GRPO,RPG-REINFORCE-URKL --seeds=3

The folder --out receives each table's page, figures and numbers in a folder of the table's name. It also receives the
runs of all tables: two tables can share a run. The same command continues an interrupted table. A run of
configs/small.py takes about two minutes of one CPU core; the warm start, which all runs share, takes one to three.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rpg_jax.reproduction import origin, run_tables
from rpg_jax.reproduction.options import asked, data_file
from rpg_jax.reproduction.table import SMALL_CONFIG
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    separator = given.index("--") if "--" in given else len(given)

    def reproduce(options: argparse.Namespace) -> int:
        return carry_out(options, given[separator + 1 :], origin.command(given))

    return cli.run(reproduce, _parser(), given[:separator])


def carry_out(options: argparse.Namespace, extra: Sequence[str], command: str) -> int:
    """Makes the table that `command` asks for, with the overrides `extra` in every run; returns the exit code."""
    began = time.perf_counter()
    failed: dict[str, Path] = {}
    try:
        if options.from_data is not None:
            page = run_tables.page_from(data_file(options, extra), options.out)
        else:
            page, failed = run_tables.make_table(*asked(options, extra, command))
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    for name, log in failed.items():
        print(f"{name} failed: {_last_line(log)} ({log})", file=sys.stderr)
    print(f"{page} in {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


def _parser() -> cli.Parser:
    parser = cli.parser("reproduce", __doc__)
    tables = "; ".join(f"{name}: {table.title.lower()} ({len(table.rows)} rows)" for name, table in TABLES.items())
    parser.add_argument("--table", choices=TABLES, help=tables)
    seeds, quick, cores = run_tables.SEEDS, run_tables.QUICK_SEEDS, run_tables.cores()
    parser.add_argument("--sweep", action="append", metavar="FIELD=A,B", help="a table of every combination of values")
    parser.add_argument("--config", metavar="FILE", help=f"of a sweep (default: {SMALL_CONFIG})")
    parser.add_argument("--methods", help="rows, separated by commas (default: all; in a sweep the config's method)")
    parser.add_argument("--seeds", help=f"a number N, for 0 ... N-1, or a list (default: {seeds}, --quick {quick})")
    parser.add_argument("--jobs", type=int, help=f"runs at once (default: one a core, {cores}; on a TPU 1)")
    parser.add_argument("--rates", type=Path, metavar="DATA", help="choose rates by the numbers of this sweep or table")
    parser.add_argument("--noscan", dest="scan", action="store_false", help="the config's learning rate in every row")
    parser.add_argument("--from-data", nargs="?", const=Path(), type=Path, metavar="DATA", help="page without runs")
    parser.add_argument(
        "--with-data", nargs="?", const=Path(), type=Path, metavar="DATA", help="add to these runs; repeat none of them"
    )
    parser.add_argument("--out", type=Path, default=Path("reproduction"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look, not a result: fewer rows, seeds and steps")
    return parser


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
