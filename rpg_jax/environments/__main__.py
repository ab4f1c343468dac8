"""Writes the problems of an environment of the package verifiers as rows, for task.train and task.held_out_sets.

python -m rpg_jax.environments wordle --arguments='{"num_eval_examples": 50}' --split=eval --out=held_out.jsonl
"""

import argparse
import itertools
import json


def main() -> None:
    """Prints how many rows it has written."""
    parser = argparse.ArgumentParser(prog="python -m rpg_jax.environments", description=__doc__)
    parser.add_argument("id", help="as environment.options has it: of an installed environment, or module:name")
    parser.add_argument("--arguments", default="{}", type=json.loads, help="JSON, as environment.options has them")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="default %(default)s")
    parser.add_argument("--count", type=int, help="default: all")
    parser.add_argument("--out", required=True, help="a JSONL file")
    options = parser.parse_args()
    from rpg_jax.environments.verifiers_library import open_environment, rows  # needs the package

    environment, written = open_environment(options.id, options.arguments), 0
    with open(options.out, "w", encoding="utf-8") as file:
        for row in itertools.islice(rows(environment, options.split, options.id), options.count):
            file.write(json.dumps(row) + "\n")
            written += 1
    print(f"{options.out}: {written} rows")


if __name__ == "__main__":
    main()
