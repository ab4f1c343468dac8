"""A guessing game: every guess is answered by higher or lower, until the secret is found."""

import re
from collections.abc import Sequence

from rpg_jax.environments.conversation import Message, Posed, Turn

HIGHER, LOWER, UNREADABLE = ">", "<", "?"


class HigherLower:
    """A turn is a guess at the problem's answer, a whole number. A wrong one hears `HIGHER` or `LOWER`.

    The guess that finds the number ends the conversation and pays 1, less `cost` for every turn before it. All others
    pay nothing: if they cost something, a player who rarely wins would do best to give up. Any other text than a number
    hears `UNREADABLE`. How many turns there are is `environment.max_turns`. Numbers are written in a `base` of 2 to 36,
    where "z" is 35.
    """

    def __init__(self, cost: float = 0.05, base: int = 10):
        if not 2 <= base <= 36:
            raise ValueError(f"base must be in [2, 36], got {base}")
        self._cost, self._base = cost, base

    def reset(self, problem: Posed) -> Sequence[Message]:
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        secret, guess = int(problem.answer, self._base), self._number(completion)
        if guess is None:
            return Turn(UNREADABLE)
        if guess == secret:
            earlier = sum(message["role"] == "assistant" for message in messages)
            return Turn(reward=1 - self._cost * earlier, done=True)
        return Turn(HIGHER if secret > guess else LOWER)

    def _number(self, text: str) -> int | None:
        if not re.fullmatch(r"\s*-?[0-9a-zA-Z]{1,18}\s*", text):
            return None
        try:
            return int(text, self._base)
        except ValueError:  # a digit of a higher base
            return None
