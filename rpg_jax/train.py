"""Trains a policy by regularized policy gradients.

  python -m rpg_jax.train --config=configs/tiny.py --config.method=RPG-REINFORCE-URKL --config.seed=1

The same command continues an interrupted run from its last checkpoint. A run leaves in runs/NAME: config.json,
versions.json, metrics.jsonl, samples.jsonl, rollouts, curves.png, summary.md, checkpoints.
"""

import sys
from collections.abc import Sequence

from rpg_jax.runs import cli
from rpg_jax.runs.train_command import train


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("train", __doc__)
    parser.add_config("configs/tiny.py")
    return cli.run(train, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
