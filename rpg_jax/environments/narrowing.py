"""A guessing game: every wrong guess is answered by the range that is left, until the secret is found."""

import re
from collections.abc import Sequence

import numpy as np

from rpg_jax.environments.conversation import Message, Posed, Turn

_RANGE = re.compile(r"([0-9a-z]{1,12})-([0-9a-z]{1,12})$", re.IGNORECASE)


class Narrowing:
    """A turn is a guess at the problem's answer, a whole number of the range at the end of its prompt ("4-p").

    A wrong guess hears the numbers that are left: "i-p" where the secret is above h. So does any other text, which
    changes nothing. The guess that finds the secret ends the conversation and pays 1, less `cost` for every turn before
    it. All others pay nothing: if they cost something, a player who rarely wins would do best to give up. How many
    turns there are is `environment.max_turns`. Numbers are written in a `base` of 2 to 36, where "z" is 35.

    Raises:
      ValueError: `base` is out of range, or a prompt does not end with a range.
    """

    def __init__(self, cost: float = 0.05, base: int = 10):
        if not 2 <= base <= 36:
            raise ValueError(f"base must be in [2, 36], got {base}")
        self._cost, self._base = cost, base

    def reset(self, problem: Posed) -> Sequence[Message]:
        self._range(problem)
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        secret, (first, last) = int(problem.answer, self._base), self._range(problem)
        before = [message["content"] for message in messages if message["role"] == "assistant"]
        guesses = [self._number(text) for text in (*before, completion)]
        if guesses[-1] == secret:
            return Turn(reward=1 - self._cost * len(before), done=True)
        known = [guess for guess in guesses if guess is not None]
        first = max([first, *(guess + 1 for guess in known if guess < secret)])
        last = min([last, *(guess - 1 for guess in known if guess > secret)])
        return Turn("-".join(np.base_repr(number, self._base).lower() for number in (first, last)))

    def _range(self, problem: Posed) -> tuple[int, int]:
        found = _RANGE.search(problem.prompt.strip())
        if found is None:
            raise ValueError(f"a prompt of this game ends with a range, as '4-p', not {problem.prompt[-20:]!r}")
        return int(found[1], self._base), int(found[2], self._base)

    def _number(self, text: str) -> int | None:
        if not re.fullmatch(r"\s*-?[0-9a-zA-Z]{1,12}\s*", text):
            return None
        try:
            return int(text, self._base)
        except ValueError:  # a digit of a higher base
            return None
