"""Trains a policy by regularized policy gradients.

  python -m rpg_jax.train --config=configs/tiny.py --config.method=RPG-REINFORCE-URKL --config.seed=1

The same command continues an interrupted run from its last checkpoint. A run leaves in runs/NAME: config.json,
versions.json, metrics.jsonl, samples.jsonl, rollouts, curves.png, summary.md, checkpoints.

A Python program calls this module: `rpg_jax.train("tiny", data=[…], reward=…)`; see `rpg_jax.runs.train_call.train`.
"""

import sys
import types
from collections.abc import Sequence
from typing import Any

from rpg_jax.runs import cli
from rpg_jax.runs.train_command import train


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("train", __doc__)
    parser.add_config("configs/tiny.py")
    return cli.run(train, parser, argv)


class _Callable(types.ModuleType):
    """`rpg_jax.train` is a module for `python -m`, and a function for Python programs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from rpg_jax.runs import train_call  # loads JAX: the command's --help need not wait for it

        return train_call.train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
