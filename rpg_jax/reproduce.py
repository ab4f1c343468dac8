"""Reproduces the paper's comparisons, and ours, at a scale that a laptop can check.

python -m rpg_jax.reproduce --table=estimators
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rpg_jax.report.runs import write_atomically
from rpg_jax.reproduction import estimator_page, laboratory
from rpg_jax.reproduction.estimators import CLIPS, KL_TERMS, SAMPLERS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rpg_jax.reproduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", choices=TABLES, required=True, help="; ".join(f"{n}: {h}" for n, (_, h) in TABLES.items())
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reproduction"), help="folder of the page (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts or seeds: a look, not a result")
    arguments = parser.parse_args(argv)
    build, _ = TABLES[arguments.table]
    began = time.perf_counter()
    page = build(arguments.out, arguments.quick)
    print(f"{page} in {time.perf_counter() - began:.0f} s")
    return 0


def estimators(out: Path, quick: bool) -> Path:
    """Bias, variance and destination of every estimator by exact sums; writes `estimators.{md,png,json}`."""
    settings = laboratory.Settings(scenes=16, fixed_point_scenes=4) if quick else laboratory.Settings()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("estimators", total=2 * len(KL_TERMS) + len(CLIPS) + len(SAMPLERS) + 1)

        def on_row(experiment: str, row: str) -> None:
            progress.update(bar, advance=1, description=f"{experiment}: {row}")

        results = laboratory.run(settings, on_row=on_row)
    page = estimator_page.write_page(results, settings, out)
    record = {"settings": dataclasses.asdict(settings), "results": results}
    write_atomically(out / "estimators.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return page


TABLES: dict[str, tuple[Callable[[Path, bool], Path], str]] = {
    "estimators": (estimators, "gradient bias and variance of every loss, by exact enumeration"),
}


if __name__ == "__main__":
    sys.exit(main())
