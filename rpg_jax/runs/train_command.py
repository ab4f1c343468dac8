"""Trains a policy by regularized policy gradients.

  python -m rpg_jax.train --model=smollm2-135m --data=rows.jsonl --reward=my.py:function
  python -m rpg_jax.train --config=configs/tiny.py --config.method=RPG-REINFORCE-URKL --config.seed=1

The same command continues an interrupted run from its last checkpoint. A run leaves in runs/NAME: config.json,
versions.json, metrics.jsonl, samples.jsonl, rollouts, curves.png, summary.md, checkpoints.

A Python program calls a function: `rpg_jax.train(model=…, data=[…], reward=…)`; see docs/library.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rpg_jax.runs import cli, config_files


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with the flags `argv`; None: the process's. May be called several times. Returns the exit code:
    0, 1 (another start may help), 2 (a user's error), 3 (a lost run), or 128 plus a signal's number. A bug is raised.
    """
    parser = cli.parser("train", __doc__)
    parser.add_config()
    parser.add_argument("--model", help="weights to begin with: a folder, OWNER/NAME on the hub, FILE.gguf")
    parser.add_argument("--data", help="a JSONL or parquet file of problems; a tenth is held out without --held_out")
    parser.add_argument("--held_out", help="a file of problems to evaluate on")
    parser.add_argument("--reward", help="FILE.py:function, or a part of rewards.parts")
    return cli.run(_run_options, parser, argv, joins=True)


def _run_options(options: argparse.Namespace) -> int:
    """Names the run, resolves its config and trains; returns the exit code. Without --config the fields fit the model,
    the rows and the device. Without any of --config, --model, --data, --held_out and --reward the config is tiny."""
    given = {name: getattr(options, name) for name in ("model", "data", "held_out", "reward")}
    config = "configs/tiny.py" if {options.config, *given.values()} == {None} else options.config
    overrides = config_files.load("base" if config is None else config, options.overrides).overrides
    from rpg_jax.runs import reinforcement, train_call  # load JAX: wrong flags need not wait for it

    return reinforcement.run(*train_call.prepared(config, overrides, **given))
