"""Measures losses on completions of several tokens: gradients, ends, and how bias and noise grow with staleness.

python -m experiments.completions --out=runs/completions
python -m experiments.completions exact        (one part: exact, vocabulary, staleness)
"""

import argparse
import sys

from experiments import kept
from experiments.completions import exact, results, staleness
from experiments.completions.estimators import ENDS, ESTIMATORS, VOCABULARY
from experiments.completions.exact import CompletionSettings
from experiments.completions.staleness import StalenessSettings
from rpg_jax.runs import cli
from rpg_jax.storage import write_atomically

QUICK_EXACT = CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500)

QUICK_STALENESS = StalenessSettings(lengths=(4, 5), drifts=(1e-3, 0.03), prompts=4)


def measure(options: argparse.Namespace) -> int:
    """Writes the numbers of each part as `PART.json.gz`, `tables.md` and `staleness.png` into the folder `--out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, str] = {}
    if options.part in (None, "exact"):
        sums = QUICK_EXACT if options.quick else CompletionSettings()
        with kept.counted("completions", len(ESTIMATORS) + len(ENDS)) as on_row:
            found = exact.run_exact(sums, on_row=on_row)
        kept.write(options.out / "exact.json.gz", sums, found)
        tables |= results.exact_tables(found, sums)
    if options.part in (None, "vocabulary"):
        sums = QUICK_EXACT if options.quick else CompletionSettings()
        with kept.counted("completions", len(VOCABULARY)) as on_row:
            errors = exact.run_vocabulary(sums, on_row=on_row)
        kept.write(options.out / "vocabulary.json.gz", sums, errors)
        tables |= results.vocabulary_table(errors, sums)
    if options.part in (None, "staleness"):
        how = QUICK_STALENESS if options.quick else StalenessSettings()
        with kept.counted("completions", len(staleness.ROWS) * len(how.lengths)) as on_row:
            shown = staleness.run(how, on_row)
        kept.write(options.out / "staleness.json.gz", how, shown)
        tables |= staleness.tables(shown, how)
        write_atomically(options.out / "staleness.png", staleness.draw(shown, how))
    kept.write_tables(options.out / "tables.md", tables)
    print(options.out / "tables.md")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = kept.parser("completions", __doc__)
    parser.add_argument("part", nargs="?", choices=("exact", "vocabulary", "staleness"), help="one part (default: all)")
    return cli.run(measure, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
