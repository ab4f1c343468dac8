"""Reproduces the paper's comparisons, and ours, at a scale that a laptop can check.

  python -m rpg_jax.reproduce --table=estimators
  python -m rpg_jax.reproduce --table=small --methods=DAPO,RPG-REINFORCE-URKL --seeds=3
  python -m rpg_jax.reproduce --table=small -- --config.train.steps=200     (what follows -- goes to every run)

Pages, figures, numbers and run folders are left in --out. An interrupted table goes on where it was: same command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rpg_jax.report.runs import write_atomically
from rpg_jax.reproduction import cells as cells_lib
from rpg_jax.reproduction import estimator_page, laboratory, table_page
from rpg_jax.reproduction.estimators import CLIPS, KL_TERMS, SAMPLERS
from rpg_jax.reproduction.tables import TABLES

QUICK_ROWS, QUICK_SEEDS, QUICK_STEPS = 3, 2, 20


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    separator = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:separator])
    began = time.perf_counter()
    try:
        if arguments.table == "estimators":
            page, failed = estimators(arguments.out, arguments.quick), {}
        else:
            page, failed = runs(arguments, argv[separator + 1 :])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, log in failed.items():
        print(f"{name} failed: {_last_line(log)} ({log})", file=sys.stderr)
    print(f"{page} in {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


def estimators(out: Path, quick: bool) -> Path:
    """Bias, variance and destination of every estimator by exact sums; writes `estimators.{md,png,json}`."""
    settings = laboratory.Settings(scenes=16, fixed_point_scenes=4) if quick else laboratory.Settings()
    with _progress() as progress:
        bar = progress.add_task("estimators", total=2 * len(KL_TERMS) + len(CLIPS) + len(SAMPLERS) + 1)

        def on_row(experiment: str, row: str) -> None:
            progress.update(bar, advance=1, description=f"{experiment}: {row}")

        results = laboratory.run(settings, on_row=on_row)
    page = estimator_page.write_page(results, settings, out)
    record = {"settings": dataclasses.asdict(settings), "results": results}
    write_atomically(out / "estimators.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return page


def runs(arguments: argparse.Namespace, extra: Sequence[str]) -> tuple[Path, dict[str, Path]]:
    """A table of training runs; returns its page, and the logs of the runs that failed."""
    table, seeds = TABLES[arguments.table], range(arguments.seeds)
    rows = re.split(r",(?! )", arguments.methods) if arguments.methods else None
    if arguments.quick:
        rows = rows or [table.baseline, *[r for r in reversed(table.rows) if r != table.baseline][: QUICK_ROWS - 1]]
        seeds, extra = range(min(arguments.seeds, QUICK_SEEDS)), [f"--config.train.steps={QUICK_STEPS}", *extra]
    cells = table.cells(list(seeds), rows)
    out = arguments.out / (f"{arguments.table}-quick" if arguments.quick else arguments.table)
    with _progress() as progress:
        bar = progress.add_task(f"0/{len(cells)} runs", total=None)

        def on_progress(steps: int, ended: int, running: list[str]) -> None:
            total = cells_lib.steps_of(cells, out) * len(cells)
            text = f"{ended}/{len(cells)} runs; now {', '.join(running)}"
            progress.update(bar, completed=steps, total=total or None, description=text)

        failed = cells_lib.run_cells(
            cells, table.config, out, jobs=arguments.jobs, extra=extra, on_progress=on_progress
        )
    return table_page.write_page(arguments.table, table, cells, out, hardware=_hardware(arguments.jobs)), failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rpg_jax.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = "; ".join(f"{name}: {table.title.lower()} ({len(table.rows)} rows)" for name, table in TABLES.items())
    parser.add_argument(
        "--table",
        choices=["estimators", *TABLES],
        required=True,
        help=f"estimators: the gradient of every loss by exact sums; {tables}",
    )
    parser.add_argument("--methods", help="rows, separated by commas without spaces (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="0 ... SEEDS-1 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=_cores(), help="runs at once (default: one a core, %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("reproduction"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few prompts, rows, seeds and steps: a look, not a result")
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hardware(jobs: int) -> str:
    return f"{platform.machine()}, {jobs} of {_cores()} CPU cores"


def _progress() -> Progress:
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TimeRemainingColumn(),
    )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
