"""Procedural expressions modulo 10, evaluated line by line, with demonstrations of a pupil who makes mistakes."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from rpg_jax.data.arithmetic import ANSWER_MARK, OPERATORS
from rpg_jax.data.prompts import Problem

EXPRESSION_SETS = ("held out", "harder", "old skill")
SORT = "s"  # begins a prompt of the old skill
_SORTED_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Expressions:
    """The task "7+5-3*4=" with answer "6": evaluated from left to right, without precedence, modulo 10.

    A completion writes what is left of the expression after each operation, then `ANSWER_MARK` and the answer:
    "2-3*4=9*4=6#6". The verifier reads the answer alone.

    The pupil who writes the demonstrations of a warm start has a belief about each of the 100 facts of an operator: the
    right value with probability 1 − u³, else one wrong value, with u uniform per fact. So he gets 75 % of operations
    right, about a third of expressions, and is more often wrong than right on a fifth of the facts. He also writes
    lines twice and leaves lines out. A quarter of his demonstrations sort digits ("s520813=" to "#012358"), without a
    mistake: the old skill, which RL does not train.

    Attributes:
      operators: any of "+-*".
      terms: the fewest and the most terms of a training expression. Harder ones have one or two more.
      repeated: probability that a line is written once more; the next copy has the same.
      skipped: probability that a line is left out, whose value then enters the next line.
      held_out: share of prompts that is kept for evaluation, by a hash.
      seed: of that hash and of the beliefs.
    """

    operators: str = OPERATORS
    terms: tuple[int, int] = (5, 7)
    repeated: float = 0.1
    skipped: float = 0.1
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self):
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ValueError(f"operators must be one or more of {OPERATORS!r}, got {self.operators!r}")
        if not 2 <= self.terms[0] <= self.terms[1]:
            raise ValueError(f"terms must be (fewest, most) with 2 <= fewest <= most, got {self.terms}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")

    def problems(self, name: str, count: int, *, seed: int = 0) -> list[Problem]:
        """`count` distinct problems of "train" or of one of `EXPRESSION_SETS`, drawn from `seed`; a longer list only
        adds to the end. No prompt of a held-out set is in "train", whatever the seeds.

        Raises:
          ValueError: the name is unknown, or `count` is above half of what there is.
        """
        if name not in ("train", *EXPRESSION_SETS):
            raise ValueError(f"expressions have the sets train, {', '.join(EXPRESSION_SETS)}; got {name!r}")
        longest = self.terms[1]
        space = 10**_SORTED_DIGITS if name == "old skill" else len(self.operators) ** (longest - 1) * 10**longest
        most = int(space * (1 - self.held_out if name == "train" else self.held_out) / 2)
        if count > most:
            raise ValueError(f"{self} draws at most {most} problems of {name!r}, not {count}: ask for fewer")
        random, found = np.random.default_rng([seed, len(name)]), dict[int, str]()
        while len(found) < count:
            prompt = self._draw(name, random)
            if self._is_held_out(prompt) == (name != "train"):
                found.setdefault(zlib.crc32(prompt.encode()) >> 1, prompt)
        return [Problem(number, prompt, solve(prompt), "expressions") for number, prompt in found.items()]

    def examples(self, problems: Iterable[Problem]) -> list[tuple[str, str]]:
        """(prompt, completion) of the pupil for each problem, or for a prompt of the old skill in its place."""
        pairs = []
        for problem in problems:
            random = np.random.default_rng([self.seed, problem.prompt_id])
            prompt = problem.prompt
            if random.random() < 0.25:
                prompt = self._draw("old skill", random)
                while self._is_held_out(prompt):
                    prompt = self._draw("old skill", random)
            pairs.append((prompt, self._demonstration(prompt, random)))
        return pairs

    def texts(self) -> Iterator[str]:
        """Every character that the task can write, for training a tokenizer."""
        yield "0123456789=" + self.operators + SORT + ANSWER_MARK

    def _draw(self, name: str, random: np.random.Generator) -> str:
        if name == "old skill":
            return SORT + "".join(map(str, random.integers(10, size=_SORTED_DIGITS))) + "="
        fewest, most = (self.terms[1] + 1, self.terms[1] + 2) if name == "harder" else self.terms
        terms = int(random.integers(fewest, most + 1))
        operators = [self.operators[i] for i in random.integers(len(self.operators), size=terms - 1)]
        digits = random.integers(10, size=terms)
        return "".join(f"{digit}{operator}" for digit, operator in zip(digits, [*operators, "="], strict=True))

    def _is_held_out(self, prompt: str) -> bool:
        return zlib.crc32(f"{self.seed} {prompt}".encode()) < self.held_out * 2**32

    def _demonstration(self, prompt: str, random: np.random.Generator) -> str:
        if prompt.startswith(SORT):
            return ANSWER_MARK + solve(prompt)
        text, rest = "", prompt
        while len(rest) > 2:
            rest = _reduced(rest, lambda a, operator, b: self._believed(a, operator, b, random))
            last = len(rest) == 2
            if last or random.random() >= self.skipped:
                text += rest
                while random.random() < self.repeated:
                    text += rest
        return text[:-1] + ANSWER_MARK + rest[0]

    def _believed(self, a: int, operator: str, b: int, random: np.random.Generator) -> int:
        doubt, error = self._beliefs
        fact = OPERATORS.index(operator), a, b
        right = _value(a, operator, b)
        return (right + int(error[fact])) % 10 if random.random() < doubt[fact] else right

    @functools.cached_property
    def _beliefs(self) -> tuple[np.ndarray, np.ndarray]:
        """[operator, a, b]: the probability that the pupil is wrong, and by how much he then is."""
        random = np.random.default_rng(self.seed)
        shape = len(OPERATORS), 10, 10
        return random.random(shape) ** 3, random.integers(1, 10, size=shape)


def solve(prompt: str) -> str:
    """The right answer. Raises ValueError for a text that is no prompt of the task."""
    if re.fullmatch(rf"{SORT}\d+=", prompt):
        return "".join(sorted(prompt[1:-1]))
    if not re.fullmatch(r"\d([-+*]\d)*=", prompt):
        raise ValueError(f"not a prompt of expressions: {prompt!r}; expected e.g. '7+5-3*4=' or 's520813='")
    while len(prompt) > 2:
        prompt = _reduced(prompt, _value)
    return prompt[0]


def _reduced(line: str, value: Callable[[int, str, int], int]) -> str:
    """ "7+5-3=" -> "2-3="."""
    return f"{value(int(line[0]), line[1], int(line[2]))}{line[3:]}"


def _value(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator] % 10
