"""Shows runs: one page that compares them and browses their rollouts, and each run's curves and summary again.

python -m rpg_jax.report runs/tiny-rpg-reinforce-urkl-seed0 runs/tiny-grpo-seed0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rpg_jax.report import curves, page, summary


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rpg_jax.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run, finished or not")
    parser.add_argument("--out", type=Path, help="of the page; default: report.html in the first run's folder")
    parser.add_argument(
        "--rollout-steps", type=int, default=page.ROLLOUT_STEPS, help="of each run, with rollouts on the page, at most"
    )
    arguments = parser.parse_args()
    try:
        for run_dir in arguments.run:
            curves.draw_curves(run_dir)
            summary.write_summary(run_dir)
            print(summary.closing_message(run_dir))
        out = arguments.out or arguments.run[0] / "report.html"
        page.write_page(arguments.run, out, rollout_steps=arguments.rollout_steps)
    except ValueError as error:
        parser.error(str(error))
    print(f"page: {out}, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
