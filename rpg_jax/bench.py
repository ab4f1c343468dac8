"""Measures the parts of the system on the machine at hand.

  python -m rpg_jax.bench rollout --preset=w1 --json

A measurement is printed as a table, or with --json as one line. The fields `seconds`, `tokens_per_s` and `peak_bytes`
are in each measurement of `step` and `rollout`. Progress goes to stderr. `python -m rpg_jax.bench COMMAND --help` says
what a command measures and how.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.runs import cli
from rpg_jax.storage.files import to_json

COMMANDS = {
    "kernels": "every kernel against plain XLA: their difference, the seconds of both",
    "step": "the update, also under several settings beside each other: seconds, FLOP/s, memory",
    "rollout": "tokens per second of every rollout driver",
}
"""Name and one line of help. `rpg_jax.benchmarks.measure_NAME` has `arguments(parser)` and `run(options)`, which yields
measurements, or lists of them with equal fields, and raises `ValueError` at options that do not go together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line `argv` (None: this process's), measures, and returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    parser = cli.parser("bench", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in given[:1]:  # the others' imports take seconds
            module = importlib.import_module(f"rpg_jax.benchmarks.measure_{name}")
            command.description = module.__doc__
            command.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
            module.arguments(command)
            command.set_defaults(measure=module.run)
    return cli.run(bench, parser, argv)


def bench(options: argparse.Namespace) -> None:
    """Runs `options.measure`, the command's function, and prints each measurement as soon as it is there. A list of
    measurements is printed side by side in a table, or with --json on a line each."""
    for found in options.measure(options):
        results = found if isinstance(found, list) else [found]
        print("\n".join(map(to_json, results)) if options.json else _table(results), flush=True)


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    """A text with a line for each field of any result, and a column for each result, "" where it lacks the field."""
    names = dict.fromkeys(name for result in results for name in result)
    columns = [[cell(result.get(name, "")) for name in names] for result in results]
    widths = [max(16, *map(len, column)) for column in columns]
    return "\n".join(
        f"{name:<34}" + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in zip(names, *columns, strict=True)
    )


def cell(value: Any) -> str:
    """A value as the tables show it. Integers have separators. A float has four digits after the point, none from 1,000
    on, and a power of ten below 0.001. A dict is a list of "NAME VALUE", without the names whose value is ""."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items() if one != "")
    if isinstance(value, float):
        if 0 < abs(value) < 0.001:
            return f"{value:.2e}"
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str(value)


if __name__ == "__main__":
    sys.exit(main())
