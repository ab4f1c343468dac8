"""SmolLM2-135M learns sums under KL terms of several kinds and strengths: what each run gains, and what it loses.

python -m launch.pretrained smollm2-135m
python -m experiments.pretrained --model=smollm2-135m      (the same command continues)
python -m experiments.pretrained --from-data               (tables and figure of the runs that come with the code)
"""

import argparse
import subprocess
import sys
from pathlib import Path

from experiments import kept
from experiments.pretrained import results, runs
from rpg_jax.report.run_files import read_jsonl
from rpg_jax.runs import cli

DATA = Path(__file__).with_name("pretrained.jsonl")


def measure(options: argparse.Namespace) -> int:
    """Makes the runs that `--out` lacks, each in a process, or reads the kept runs; writes tables and figure."""
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = list(runs.cells(1))[:2] if options.quick else list(runs.cells(options.seeds))
    while not options.from_data and (left := runs.missing(options.out, chosen)):
        if options.one:
            runs.make_run(options.model, options.out, left[0])
            return 0
        print(f"{left[0].name}: {len(chosen) - len(left)} of {len(chosen)} runs are done", file=sys.stderr)
        if code := subprocess.call([sys.executable, "-m", "experiments.pretrained", "--one", *sys.argv[1:]]):
            return code
    found = read_jsonl(DATA if options.from_data else options.out / runs.FILE)
    kept.write_page(options.out, results.tables(found), pretrained=results.draw(found))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("pretrained", __doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the folder of the weights (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell (default: %(default)s)")
    parser.add_argument("--from-data", action="store_true", help="no runs: those that come with the code")
    parser.add_argument("--one", action="store_true", help="the next run alone")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
