"""Trains methods for two steps each in one process; run by test_train.py, which reads the folders it leaves.

A method that needs a teacher comes last; the policy of the run before it is the teacher.
"""

import sys
from pathlib import Path

from absl import logging

from rpg_jax import export
from rpg_jax.losses import METHODS
from rpg_jax.runs import reinforcement, run_folder
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro

logging.set_verbosity(logging.WARNING)
runs, warm_starts, *methods = sys.argv[1:]
teacher, previous = Path(runs) / "teacher", None
for method in methods:
    config = micro.get_config()
    config.method = method
    if METHODS[method].reference == "teacher":
        if not teacher.exists():
            export.main([f"--run={previous}", f"--out={teacher}"])
        config.reference.path = str(teacher)
    config.run.dir, config.run.name = runs, run_folder.default_name("micro.py", config, {})
    config.warm_start.dir = warm_starts
    previous = Path(runs) / config.run.name
    code = reinforcement.run(resolve(config))
    if code:
        raise SystemExit(f"{method} ended with {code}")
