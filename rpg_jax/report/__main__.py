"""Writes one page that compares runs and shows their rollouts; draws and writes each run's curves and summary again.

python -m rpg_jax.report runs/tiny-rpg-reinforce-urkl-seed0 runs/tiny-grpo-seed0
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from rpg_jax import storage
from rpg_jax.report import page, plots, summary
from rpg_jax.report.run_files import Run
from rpg_jax.runs import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the arguments `argv` (None: this process's); returns the exit code."""
    parser = cli.parser("report", __doc__)
    parser.add_argument("run", nargs="+", metavar="runs/NAME", help="a run, finished or not, or gs://BUCKET/FOLDER")
    parser.add_argument("--out", type=Path, help="file of the page; default: report.html in the first run's folder")
    parser.add_argument(
        "--rollout-steps",
        type=cli.number(int, 0),
        default=page.ROLLOUT_STEPS,
        help="the most steps of a run whose rollouts the page shows",
    )
    return cli.run(report, parser, argv)


def report(options: argparse.Namespace) -> None:
    """Writes the page, curves and summaries of the runs in `options.run`. Names each run that cannot be read, and files
    that cannot be written beside a run, on stderr. Raises ValueError if no run has a step, or the file of the page is
    another file; OSError if the page cannot be written."""
    with contextlib.ExitStack() as stack:
        folders, runs = [], []
        for address in options.run:
            folder = stack.enter_context(storage.Folder(address))
            try:
                folder.fetch()
                run = Run.read(folder.files)
                if not run.records:
                    raise ValueError("it has no step (no metrics.jsonl, or an empty one)")
                texts = page.page_of([run], rollout_steps=0), summary.summary_of(run)
                "".join((*texts, summary.closing_message(run))).encode()
            except Exception as error:  # its files may be anybody's: another run is shown all the same
                print(f"left out: {address}: {cli.in_words(error)}", file=sys.stderr)
                continue
            folders.append(folder)
            runs.append(run)
            try:
                plots.draw_curves(run)
                summary.write_summary(run)
            except (ValueError, OSError) as error:
                print(f"not written beside the run: {cli.in_words(error)}", file=sys.stderr)
            print(folder.shown(summary.closing_message(run)))
        if not folders:
            raise ValueError("none of these runs has a step: run at least one")
        out = options.out or folders[0].files / "report.html"
        if options.out and out.exists() and not page.is_page(out):
            raise ValueError(f"{out} is no page of this program, and is not replaced: give another --out")
        page.write_page(runs, out, rollout_steps=options.rollout_steps)
        print(folders[0].shown(f"page: {out}, {out.stat().st_size / 1e6:.1f} MB"))


if __name__ == "__main__":
    sys.exit(main())
