"""Trains methods for two steps each in one process; run by test_train.py, which reads the folders it leaves."""

import sys

from absl import logging

from rpg_jax.runs import reinforcement, run_folder
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro

logging.set_verbosity(logging.WARNING)
runs, warm_starts, *methods = sys.argv[1:]
for method in methods:
    config = micro.get_config()
    config.method = method
    config.run.dir, config.run.name = runs, run_folder.default_name("micro.py", config, {})
    config.warm_start.dir = warm_starts
    code = reinforcement.run(resolve(config))
    if code:
        raise SystemExit(f"{method} ended with {code}")
