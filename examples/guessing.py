"""A guessing game of one's own: its problems, the environment that answers guesses, and pupils to imitate.

configs/guessing.py trains on the game. A task of one's own is a class with `problems`, `texts` and `examples`. An
environment of one's own is a class with `reset` and `step`. docs/environments.md explains both.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rpg_jax.environments import Message, Posed, Turn, play

if TYPE_CHECKING:
    from rpg_jax.data import Problem

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LISTENS = 1 / 3
_RANGE = re.compile(r"([0-9a-z]{1,12})-([0-9a-z]{1,12})$", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Problems:
    """The game "4-p" with answer "h": find the secret digit of a range of `DIGITS` by guesses, which are answered.

    The `Game` answers with the range that is left. With five guesses and ranges of 14 to 20 digits, random guesses
    find 26 % of the secrets. Random guesses in the range that is left find 76 %, and guesses at its middle find all.

    Two kinds of simulated pupils write the demonstrations of a warm start. Two thirds of the pupils repeat their first
    guess, whatever the answer is, and find 6 %. The others guess in the middle half of the range that is left, and find
    97 %. Together the pupils find 36 %.

    Attributes:
      sizes: the fewest and the most digits of a range.
      held_out: share of the ranges that is kept for evaluation, by a hash; training has none of their secrets.
      seed: of that hash and of the pupils.
    """

    sizes: tuple[int, int] = (14, 20)
    held_out: float = 0.2
    seed: int = 0

    def problems(self, name: str, count: int | None = None, *, seed: int = 0) -> list[Problem]:
        """The first `count` problems of "train" or "held out" (None: all), in an order drawn from `seed`.

        Raises ValueError for another name, or if the set has fewer problems.
        """
        if name not in ("train", "held out"):
            raise ValueError(f"guessing has the sets train, held out; got {name!r}")
        every = [
            (first, last, secret)
            for size in range(self.sizes[0], self.sizes[1] + 1)
            for first in range(len(DIGITS) + 1 - size)
            if self._is_held_out(first, last := first + size - 1) == (name == "held out")
            for secret in range(first, last + 1)
        ]
        if len(every) < (count or 1):
            raise ValueError(f"guessing has {len(every)} problems in {name!r}, fewer than {count or 1}: ask for fewer")
        order = np.random.default_rng(seed).permutation(len(every))[:count]
        return [self._problem(*every[i]) for i in order.tolist()]

    def examples(self, problems: Sequence[Problem], *, turns: int) -> list[list[Message]]:
        """The messages of a pupil's conversation about each problem, of at most `turns` turns."""
        game = Game(base=len(DIGITS))
        return [play(game, Posed.of(p), functools.partial(self.guess, p), turns=turns)[-1] for p in problems]

    def guess(self, problem: Problem, heard: Sequence[str]) -> str:
        """A pupil's next guess, a digit, after the ranges `heard`. The problem decides which kind of pupil plays."""
        random = np.random.default_rng([self.seed, problem.prompt_id])
        listens, places = random.random() < _LISTENS, random.random(1 + len(heard))
        left, place = (heard[-1], places[-1]) if listens and heard else (problem.prompt, places[0])
        first, last = DIGITS.index(left[0]), DIGITS.index(left[2])
        if listens:
            margin = (last - first) // 4
            first, last = first + margin, last - margin
        return DIGITS[first + int(place * (last + 1 - first))]

    def texts(self) -> Iterator[str]:
        """Yields a text with every character of the game, for training a tokenizer."""
        yield DIGITS + "-"

    def _is_held_out(self, first: int, last: int) -> bool:
        return zlib.crc32(f"{self.seed} {first}-{last}".encode()) < self.held_out * 2**32

    def _problem(self, first: int, last: int, secret: int) -> Problem:
        from rpg_jax.data import Problem  # it loads JAX, and the processes that run `Game` start faster without

        number = (first * len(DIGITS) + last) * len(DIGITS) + secret
        return Problem(number, f"{DIGITS[first]}-{DIGITS[last]}", DIGITS[secret], "guessing")


class Game:
    """A turn is a guess at the problem's answer, a whole number of the range at the end of its prompt ("4-p").

    A wrong guess is answered by the range that is left: "i-p" where the secret is above h. Any other text is answered
    by the same range as before. The guess that finds the secret ends the conversation and pays 1, less `cost` for every
    turn before. All other turns pay nothing: if a wrong guess cost something, a player who rarely wins would do best to
    give up. `environment.max_turns` is the number of turns. Numbers are written in a `base` of 2 to 36; "z" is 35.

    Raises ValueError if `base` is out of range, and later if a prompt does not end with a range.
    """

    def __init__(self, cost: float = 0.05, base: int = 10):
        if not 2 <= base <= 36:
            raise ValueError(f"base must be in [2, 36], got {base}")
        self._cost, self._base = cost, base

    def reset(self, problem: Posed) -> Sequence[Message]:
        """The messages that begin the conversation: those of the problem."""
        self._range(problem)
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        """The answer to the turn `completion` after `messages`: the range that is left, or the end with its reward."""
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
