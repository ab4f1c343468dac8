"""The command `python -m rpg_jax.train`. In Python programs `rpg_jax.train` is the function of `runs/train_call.py`."""

import sys

from rpg_jax.runs.train_command import main

if __name__ == "rpg_jax.train":  # Python would now put this module in the place of the function
    raise ImportError("rpg_jax.train is a function; the command's is rpg_jax.runs.train_command.main")

if __name__ == "__main__":
    sys.exit(main())
