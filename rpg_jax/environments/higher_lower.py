"""A guessing game: every guess is answered by higher or lower, until the secret is found."""

import re
from collections.abc import Sequence

from rpg_jax.environments.conversation import Message, Posed, Turn

HIGHER, LOWER, UNREADABLE = ">", "<", "?"


class HigherLower:
    """A turn is a guess at the problem's answer, a whole number. A wrong one hears `HIGHER` or `LOWER`.

    The turn that finds the number ends the conversation and pays 1. Every turn costs `cost`, so that fewer are better.
    Any other text than a number hears `UNREADABLE`. How many turns there are is `environment.max_turns`.
    """

    def __init__(self, cost: float = 0.02):
        self._cost = cost

    def reset(self, problem: Posed) -> Sequence[Message]:
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        if not re.fullmatch(r"\s*-?\d{1,18}\s*", completion, re.ASCII):
            return Turn(UNREADABLE, -self._cost)
        guess, secret = int(completion), int(problem.answer)
        if guess == secret:
            return Turn(reward=1 - self._cost, done=True)
        return Turn(HIGHER if secret > guess else LOWER, -self._cost)
