"""What `rpg_jax.train` does with its command line; a process may do it several times."""

import argparse

from rpg_jax.runs import config_files


def train(options: argparse.Namespace) -> int:
    """Names the run, resolves its config and trains."""
    config, file, overrides = config_files.load(options.config, options.overrides)
    # They load JAX: wrong flags need not wait for it.
    from rpg_jax.runs import processes, run_folder, run_names, session
    from rpg_jax.runs.resolve import check_training, resolve

    check_training(config)
    if config.run.name is None:
        config.run.name = run_folder.default_name(file, config, overrides)
    run_names.check(config.run.name)
    processes.join(config)
    return session.run(resolve(config))
