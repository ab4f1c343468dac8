"""Draws a run's curves and writes its summary again, from what its folder holds.

python -m rpg_jax.report runs/tiny-rpg-reinforce-urkl-seed0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rpg_jax.report import curves, summary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rpg_jax.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run, finished or not")
    for run_dir in parser.parse_args().run:
        try:
            curves.draw_curves(run_dir)
        except ValueError as error:
            parser.error(str(error))
        summary.write_summary(run_dir)
        print(summary.closing_message(run_dir))


if __name__ == "__main__":
    main()
