"""Procedural guessing games: ranges of digits with a secret in each, and pupils who rarely listen."""

import dataclasses
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from rpg_jax.data.prompts import Problem

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LISTENS = 1 / 3


@dataclasses.dataclass(frozen=True)
class Guessing:
    """The game "4-p" with answer "h": find the secret digit of a range of `DIGITS` by guesses, which are answered.

    The environment `guessing` answers with the range that is left. With five guesses and ranges of 14 to 20 digits, a
    player who guesses at random finds 26 % of the secrets. One who guesses at random in what is left finds 76 %, and
    one who halves it finds all.

    The demonstrations of a warm start are of two kinds of pupils. Two thirds repeat their first guess, whatever they
    hear, and find 6 %. The others guess in the middle half of what is left and find 97 %. Together they have 36 %.

    Attributes:
      sizes: the fewest and the most digits of a range.
      held_out: share of the ranges that is kept for evaluation, by a hash; training has none of their secrets.
      seed: of that hash and of the pupils.
    """

    sizes: tuple[int, int] = (14, 20)
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self):
        if not 2 <= self.sizes[0] <= self.sizes[1] <= len(DIGITS):
            raise ValueError(f"sizes must be (fewest, most) with 2 <= fewest <= most <= 36, got {self.sizes}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")

    def problems(self, name: str, count: int | None = None, *, seed: int = 0) -> list[Problem]:
        """The first `count` problems of "train" or "held out", or all, in an order drawn from `seed`.

        Raises:
          ValueError: the name is unknown, or the set has fewer problems.
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

    def guess(self, problem: Problem, heard: Sequence[str]) -> str:
        """A pupil's next turn after the ranges `heard`; the problem decides which pupil it is."""
        random = np.random.default_rng([self.seed, problem.prompt_id])
        listens, places = random.random() < _LISTENS, random.random(1 + len(heard))
        left, place = (heard[-1], places[-1]) if listens and heard else (problem.prompt, places[0])
        first, last = DIGITS.index(left[0]), DIGITS.index(left[2])
        if listens:
            margin = (last - first) // 4
            first, last = first + margin, last - margin
        return DIGITS[first + int(place * (last + 1 - first))]

    def texts(self) -> Iterator[str]:
        """Every character of the game, for training a tokenizer."""
        yield DIGITS + "-"

    def _is_held_out(self, first: int, last: int) -> bool:
        return zlib.crc32(f"{self.seed} {first}-{last}".encode()) < self.held_out * 2**32

    def _problem(self, first: int, last: int, secret: int) -> Problem:
        number = (first * len(DIGITS) + last) * len(DIGITS) + secret
        return Problem(number, f"{DIGITS[first]}-{DIGITS[last]}", DIGITS[secret], "guessing")
