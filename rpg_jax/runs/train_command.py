"""What `rpg_jax.train` does with its command line; a process may do it several times."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.runs import config_files


def train(options: argparse.Namespace) -> int:
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


def run(config: ConfigDict, functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> int:
    """Joins the run's other processes and trains; returns the exit code. `functions` as in `session.run`."""
    from rpg_jax.runs import processes, session
    from rpg_jax.runs.resolve import resolve

    processes.join(config)
    return session.run(resolve(config), functions)
