"""Measures losses on completions of several tokens: gradients, ends, and how bias and noise grow with staleness.

python -m experiments.completions --out=runs/completions
python -m experiments.completions exact        (one part: exact, vocabulary, staleness)
"""

import argparse
import sys
from typing import Any

from experiments import kept
from experiments.completions import exact, results, staleness
from experiments.completions.estimators import ENDS, ESTIMATORS, VOCABULARY
from experiments.completions.exact import CompletionSettings
from experiments.completions.staleness import StalenessSettings
from rpg_jax.runs import cli

QUICK_EXACT = CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500)

QUICK_STALENESS = StalenessSettings(lengths=(4, 5), drifts=(1e-3, 0.03), prompts=4)


def measure(options: argparse.Namespace) -> int:
    """Writes the numbers of each part as `PART.json.gz`, `tables.md` and `staleness.png` into the folder `--out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    sums = QUICK_EXACT if options.quick else CompletionSettings()
    how = QUICK_STALENESS if options.quick else StalenessSettings()
    parts: dict[str, tuple[Any, ...]] = {  # settings, rows, numbers, tables
        "exact": (sums, len(ESTIMATORS) + len(ENDS), exact.run_exact, results.exact_tables),
        "vocabulary": (sums, len(VOCABULARY), exact.run_vocabulary, results.vocabulary_table),
        "staleness": (how, len(staleness.ROWS) * len(how.lengths), staleness.run, staleness.tables),
    }
    tables: dict[str, str] = {}
    figures: dict[str, bytes] = {}
    for part in [options.part] if options.part else parts:
        settings, rows, run, tables_of = parts[part]
        with kept.counted("completions", rows) as on_row:
            found = run(settings, on_row)
        kept.write(options.out / f"{part}.json.gz", settings, found)
        tables |= tables_of(found, settings)
        if part == "staleness":
            figures[part] = staleness.draw(found, settings)
    kept.write_page(options.out, tables, **figures)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("completions", __doc__)
    parser.add_argument("part", nargs="?", choices=("exact", "vocabulary", "staleness"), help="one part (default: all)")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
