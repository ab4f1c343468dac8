"""The micro run with the guessing game: its flags, and an environment that hangs, dies and lies."""

import os
import time

from examples.guessing import Game
from rpg_jax.environments import Turn

FLAGS = (
    "--config.task.name=examples.guessing:Problems",
    "--config.environment.name=examples.guessing:Game",
    '--config.environment.options={"base": 36}',
    "--config.environment.max_turns=4",
    "--config.environment.turn_tokens=3",
    "--config.rollout.max_tokens=18",
    "--config.rewards.overlong_shaping=False",
    "--config.rewards.right_above=0",  # every guess before the right one costs
)
MOODY = "--config.environment.name=tests.end_to_end.conversing:Moody"
MOODS = {
    "6": lambda: time.sleep(1000),
    "7": lambda: os._exit(0),
    "8": lambda: Turn("", float("nan"), True),
    "9": lambda: 1 // 0,
    "a": lambda: Turn("x" * 2**21),
    "b": lambda: "higher",
}
FAILURES = {"timeout", "crash", "value", "error"}


def without_rounding(lines):
    """Metrics without those of the sampler's rounding: when an answer comes decides the shapes of its programs."""
    return [{k: v for k, v in line.items() if not k.startswith("sampler_")} for line in lines]


class Moody(Game):
    """The game, but for guesses of a digit that is in `MOODS`."""

    def step(self, problem, messages, completion):
        mood = MOODS.get(completion)
        return mood() if mood else super().step(problem, messages, completion)
