"""Writes the problems of an environment of the package verifiers as rows, for task.train and task.held_out_sets.

python -m rpg_jax.environments wordle --arguments='{"num_eval_examples": 50}' --split=eval --out=held_out.jsonl
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints how many rows it has written; an environment that cannot be opened is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m rpg_jax.environments", description=__doc__)
    parser.add_argument("id", help="as environment.options has it: of an installed environment, or module:name")
    parser.add_argument("--arguments", default="{}", type=_keywords, help="JSON, as environment.options has them")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="default %(default)s")
    parser.add_argument("--count", type=int, help="default: all")
    parser.add_argument("--out", required=True, help="a JSONL file")
    options = parser.parse_args(arguments)
    try:
        from rpg_jax.environments.verifiers_library import open_environment, rows

        environment, written = open_environment(options.id, options.arguments), 0
        with open(options.out, "w", encoding="utf-8") as file:
            for row in itertools.islice(rows(environment, options.split, options.id), options.count):
                file.write(json.dumps(row) + "\n")
                written += 1
    except ModuleNotFoundError as error:
        parser.error(f"{error}: pip install 'verifiers<0.4', and the environment's own package")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{options.out}: {written} rows")
    return 0


def _keywords(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} must be an object, as {{"num_examples": 50}}')
    return value


if __name__ == "__main__":
    sys.exit(main())
