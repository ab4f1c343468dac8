"""Trains a policy by regularized policy gradients.

  python -m rpg_jax.train --config=configs/tiny.py --config.method=RPG-REINFORCE-URKL --config.seed=1

The same command continues an interrupted run from its last checkpoint. A run leaves in runs/NAME: config.json,
versions.json, metrics.jsonl, samples.jsonl, rollouts, curves.png, summary.md, checkpoints.

A Python program calls a function: `rpg_jax.train("tiny", data=[…], reward=…)`; see docs/library.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.runs import cli, config_files


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. A process may call `main` several times."""
    parser = cli.parser("train", __doc__)
    parser.add_config("configs/tiny.py")
    return cli.run(run_options, parser, argv)


def run_options(options: argparse.Namespace) -> int:
    """Names the run, resolves its config and trains; returns the exit code."""
    config, file, overrides = config_files.load(options.config, options.overrides)
    return run(named(config, file, overrides))


def named(config: ConfigDict, file: str, overrides: Mapping[str, Any], **kind: str) -> ConfigDict:
    """The config with a name for its run: `run.name`, or else `run_folder.default_name` of the arguments.

    Raises ValueError for what would stop or waste the run after minutes, and for a name that no folder can have.
    """
    # They load JAX: wrong flags need not wait for it.
    from rpg_jax.runs import run_folder, run_names
    from rpg_jax.runs.resolve import check_training

    check_training(config)
    if config.run.name is None:
        config.run.name = run_folder.default_name(file, config, overrides, **kind)
    run_names.check(config.run.name)
    return config


def run(
    config: ConfigDict,
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    on_step: Callable[..., None] | None = None,
) -> int:
    """Joins the run's other processes and trains as `reinforcement.run` does; returns the exit code."""
    from rpg_jax.runs import processes, reinforcement
    from rpg_jax.runs.resolve import resolve

    processes.join(config)
    return reinforcement.run(resolve(config), functions, on_step)
