"""A guessing game: every guess is answered by higher or lower, until the secret is found."""

import re
from collections.abc import Sequence

from rpg_jax.environments.conversation import Message, Posed, Turn

HIGHER, LOWER, UNREADABLE = ">", "<", "?"


class HigherLower:
    """A turn is a guess at the problem's answer, a whole number. A wrong one hears `HIGHER` or `LOWER`.

    The guess that finds the number ends the conversation and pays 1, less `cost` for every turn before it. All others
    pay nothing: if they cost something, a player who rarely wins would do best to give up. Any other text than a number
    hears `UNREADABLE`. How many turns there are is `environment.max_turns`.
    """

    def __init__(self, cost: float = 0.05):
        self._cost = cost

    def reset(self, problem: Posed) -> Sequence[Message]:
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        if not re.fullmatch(r"\s*-?\d{1,18}\s*", completion, re.ASCII):
            return Turn(UNREADABLE)
        guess, secret = int(completion), int(problem.answer)
        if guess == secret:
            earlier = sum(message["role"] == "assistant" for message in messages)
            return Turn(reward=1 - self._cost * earlier, done=True)
        return Turn(HIGHER if secret > guess else LOWER)
