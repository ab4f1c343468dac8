"""Trains a small policy on paths by every KL term and measures which objective each reaches, by exact sums.

  python -m experiments.objective --out=runs/objective
  python -m experiments.objective --from-data      (tables and figure of the runs that come with the code)

The folder --out receives `objective.jsonl`, which the same command continues, `objective.jsonl.gz`, which has the same
runs in the form that comes with the code, `tables.md` and `objective.png`.
"""

import argparse
import gzip
import sys
from pathlib import Path

from experiments import kept
from experiments.objective import results, runs
from experiments.objective.design import (
    BASELINE,
    EXACT,
    GRPO,
    TOKEN,
    Experiment,
    ObjectiveSettings,
    Schedule,
    count_units,
)
from experiments.objective.paths import PathSettings
from rpg_jax.report.progress import Progress
from rpg_jax.reproduction.workers import cores
from rpg_jax.runs import cli
from rpg_jax.storage import write_atomically

DATA = Path(__file__).with_name("objective.jsonl.gz")
QUICK = ObjectiveSettings(
    task=PathSettings(updates=160),
    seeds=(0, 1),
    rates=(1e-2,),
    scan_seeds=(100,),
    experiments={
        "staleness": Experiment((EXACT, BASELINE, TOKEN, GRPO), (0.1, 0.5), schedules=[Schedule(8), Schedule(32)])
    },
)


def measure(options: argparse.Namespace) -> int:
    """Makes the runs that `--out` lacks, or reads those of `--from-data`; writes tables and figure."""
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.from_data or make_runs(options.out, QUICK if options.quick else ObjectiveSettings(), options.jobs)
    found = runs.Runs(read(data).records)
    kept.write_page(options.out, results.tables(found), objective=results.draw(found))
    return 0


def make_runs(out: Path, settings: ObjectiveSettings, jobs: int) -> Path:
    """Makes the runs that `out` lacks; returns the file that has them."""
    total = count_units(settings)
    with Progress(total, title="objective", unit="unit") as progress:

        def on_unit(name: str, done: int) -> None:
            progress.update(done, {}, title=name)

        runs.run_objective(settings, out / "objective.jsonl", jobs=jobs, on_unit=on_unit)
    data = out / "objective.jsonl.gz"
    write_atomically(data, kept.packed((out / "objective.jsonl").read_bytes()))
    return data


def read(data: Path) -> runs.Kept:
    """The runs in a file of this programme.

    Raises:
      ValueError: `data` is no such file.
    """
    try:
        return runs.read(gzip.decompress(data.read_bytes()).decode())
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{data} is not the data of experiments.objective: {error}") from error


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("objective", __doc__)
    parser.add_argument("--jobs", type=int, default=cores(), help="processes at once (default: %(default)s, the cores)")
    parser.add_argument("--from-data", nargs="?", const=DATA, type=Path, metavar="DATA", help="no runs: those of DATA")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
