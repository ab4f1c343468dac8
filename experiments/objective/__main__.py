"""Trains a small policy on paths by every KL term and measures which objective each reaches, by exact sums.

  python -m experiments.objective --out=runs/objective
  python -m experiments.objective --from-data      (tables and figure of the runs that come with the code)

The folder --out receives `objective.jsonl.gz`, which the same command continues, `tables.md` and `objective.png`.
"""

import argparse
import sys
from pathlib import Path

from experiments import kept
from experiments.objective import results, runs
from experiments.objective.design import BASELINE, EXACT, GRPO, TOKEN, Experiment, ObjectiveSettings, Schedule
from experiments.objective.paths import PathSettings
from rpg_jax.reproduction.workers import cores
from rpg_jax.runs import cli

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
    if options.from_data:
        _, lines = runs.read(options.from_data)
        records = [line["record"] for line in lines]
    else:
        settings = QUICK if options.quick else ObjectiveSettings()
        records = runs.run_objective(settings, options.out / runs.DATA.name, jobs=options.jobs)
    found = runs.Runs(records)
    kept.write_page(options.out, results.tables(found), objective=results.draw(found))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("objective", __doc__)
    parser.add_argument("--jobs", type=int, default=cores(), help="processes at once (default: %(default)s, the cores)")
    parser.add_argument("--from-data", nargs="?", const=runs.DATA, type=Path, metavar="DATA", help="read DATA; no runs")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
