"""Measures which gradient every loss has, by exact sums: on one token, on completions of several, and where it ends.

python -m experiments.estimators --out=runs/estimators
python -m experiments.estimators exact        (one part: token, exact, vocabulary, staleness)
"""

import argparse
import sys
from typing import Any

import jax

from experiments import kept
from experiments.estimators import completions, results, staleness, token
from rpg_jax.runs import cli

SETTINGS = token.Settings(), completions.CompletionSettings(), staleness.StalenessSettings()
QUICK = (
    token.Settings(scenes=16, fixed_point_scenes=4),
    completions.CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500),
    staleness.StalenessSettings(lengths=(4, 5), drifts=(1e-3, 0.03), prompts=4),
)
PARTS: dict[str, tuple[Any, ...]] = {  # place of the settings, numbers, tables, figure
    "token": (0, token.run, results.token_tables, results.draw),
    "exact": (1, completions.run_exact, results.exact_tables, None),
    "vocabulary": (1, completions.run_vocabulary, results.vocabulary_table, None),
    "staleness": (2, staleness.run, staleness.tables, staleness.draw),
}


def measure(options: argparse.Namespace) -> int:
    """Writes the numbers of each part as `PART.json.gz`, `tables.md` and the figures into the folder `--out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, str] = {}
    figures: dict[str, bytes] = {}
    for part in [options.part] if options.part else PARTS:
        place, run, tables_of, draw = PARTS[part]
        settings = (QUICK if options.quick else SETTINGS)[place]
        with jax.enable_x64(True):
            found = run(settings)
        kept.write(options.out / f"{part}.json.gz", settings, found)
        tables |= tables_of(found, settings)
        figures |= {part: draw(found, settings)} if draw else {}
    kept.write_page(options.out, tables, **figures)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("estimators", __doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, help="one part (default: all)")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
