"""Measures losses on completions of several tokens: gradients and ends by exact sums, then runs with sampled gradients.

python -m experiments.completions --out=runs/completions
python -m experiments.completions exact        (one half: exact, sampled)
"""

import argparse
import sys

from experiments import kept
from experiments.completions import exact, results, sampled
from experiments.completions.estimators import ENDS, ESTIMATORS, SAMPLED
from experiments.completions.exact import CompletionSettings, SampledSettings
from rpg_jax.runs import cli

QUICK_EXACT = CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500)
QUICK_SAMPLED = SampledSettings(length=4, seeds=1, updates=320, updates_a_batch=(1, 32))


def measure(options: argparse.Namespace) -> int:
    """Writes `exact.json.gz` and `sampled.json.gz`, or one of them, and `tables.md` into the folder `--out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, str] = {}
    if options.half != "sampled":
        sums = QUICK_EXACT if options.quick else CompletionSettings()
        with kept.counted("completions", len(ESTIMATORS) + len(ENDS)) as on_row:
            found = exact.run_exact(sums, on_row=on_row)
        kept.write(options.out / "exact.json.gz", sums, found)
        tables |= results.exact_tables(found, sums)
    if options.half != "exact":
        runs = QUICK_SAMPLED if options.quick else SampledSettings()
        with kept.counted("completions", len(SAMPLED)) as on_row:
            found = sampled.run_sampled(runs, on_row=on_row)
        kept.write(options.out / "sampled.json.gz", runs, found)
        tables |= results.sampled_tables(found, runs)
    kept.write_tables(options.out / "tables.md", tables)
    print(options.out / "tables.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("completions", __doc__)
    parser.add_argument("half", nargs="?", choices=("exact", "sampled"), help="one half (default: both)")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
