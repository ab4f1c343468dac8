"""Measures which gradient every loss has on completions of one token, by exact sums.

python -m experiments.estimators --out=runs/estimators
"""

import argparse
import sys

from experiments import kept
from experiments.estimators import laboratory, results
from experiments.estimators.estimators import CLIPS, COMPARATORS, KL_TERMS, SAMPLERS
from rpg_jax.runs import cli

SETTINGS = laboratory.Settings()
QUICK = laboratory.Settings(scenes=16, fixed_point_scenes=4)
ROWS = 2 * len(KL_TERMS) + len(CLIPS) + len(COMPARATORS) + len(SAMPLERS)


def measure(options: argparse.Namespace) -> int:
    """Writes `estimators.json.gz`, `tables.md` and `estimators.png` into the folder `--out`."""
    settings = QUICK if options.quick else SETTINGS
    options.out.mkdir(parents=True, exist_ok=True)
    with kept.counted("estimators", ROWS) as on_row:
        found = laboratory.run(settings, on_row)
    kept.write(options.out / "estimators.json.gz", settings, found)
    kept.write_page(options.out, results.tables(found, settings), estimators=results.draw(found, settings))
    return 0


def main(argv: list[str] | None = None) -> int:
    return cli.run(measure, kept.parser("estimators", __doc__), argv)


if __name__ == "__main__":
    sys.exit(main())
