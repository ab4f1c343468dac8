"""Prints the resolved config of trainer arguments as JSON; runs in the repository's environment, for ml-collections.

Usage: .venv/bin/python launch/cloud/resolve.py --config=configs/x.py --config.field=value ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # configs import each other as `configs.x`
config = config_flags.DEFINE_config_file("config", lock_config=True)


def parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)[1:]
        if rest or config.value is None:
            sys.exit(f"unexpected argument {rest[0]!r}" if rest else "--config=configs/... is missing")
    except (flags.Error, KeyError, AttributeError, OSError, TypeError, ValueError) as error:
        message = error.args[0] if isinstance(error, KeyError) else error
        sys.exit(" ".join(str(message).split()))
    return argv


def main(_: list[str]) -> None:
    print(json.dumps(json.loads(config.value.to_json_best_effort())))


if __name__ == "__main__":
    app.run(main, flags_parser=parse)
