"""Procedural chains of operations modulo 7, worked out line by line, with demonstrations that are often wrong."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from rpg_jax.data.arithmetic import ANSWER_MARK, OPERATORS
from rpg_jax.data.prompts import Problem

CHAIN_SETS = ("held out", "harder", "old skill")
CHECK = "?"  # between a value and the same value once more
OLD = "old:"  # begins a prompt of the old skill
MODULUS = 7
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Chains:
    """The task "k+5l-3m*4:6" with answer "4": three named operations, applied to 6 one after the other, modulo 7.

    A completion writes each operation with its value, then `ANSWER_MARK` and the answer: "k+54l-31m*44#4". Names are
    successive letters from a random one on, and "a" follows "z". The verifier reads the answer alone.

    The pupil who writes the demonstrations of a warm start has a belief about each of the 49 facts of an operator: the
    wrong value with probability u⁶, u uniform per fact, else the right one. So he gets 82 % of operations and 39 % of
    chains right, and is more often wrong than right on a seventh of the facts. Sometimes he checks a value: he works it
    out once more, and the last one counts ("k+50?4"). Sometimes he leaves a line out.

    A quarter of the demonstrations show the old skill, which RL does not train: numbers without a modulus ("old:6*5" to
    "#30"), never wrong.

    Attributes:
      operators: any of "+-*".
      links: the fewest and the most operations of a training problem. Harder ones have one or two more.
      checked: probability that a value is checked, and checked again.
      skipped: probability that a line is left out, though never the last one.
      held_out: share of prompts that is kept for evaluation, by a hash.
      seed: of that hash and of the beliefs.
    """

    operators: str = OPERATORS
    links: tuple[int, int] = (5, 8)
    checked: float = 0.15
    skipped: float = 0.08
    held_out: float = 0.2
    seed: int = 0

    def __post_init__(self):
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ValueError(f"operators must be one or more of {OPERATORS!r}, got {self.operators!r}")
        if not 2 <= self.links[0] <= self.links[1] <= len(_LETTERS) - 2:
            raise ValueError(f"links must be (fewest, most) with 2 <= fewest <= most <= 24, got {self.links}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")

    def problems(self, name: str, count: int, *, seed: int = 0) -> list[Problem]:
        """`count` distinct problems of "train" or of one of `CHAIN_SETS`, drawn from `seed`; fewer of the old skill,
        which has 49 for each operator. A longer list only adds to the end.

        No chain of a held-out set is in "train", whatever the seeds. Every prompt of the old skill was in the warm
        start: it is knowledge, to be kept.

        Raises:
          ValueError: the name is unknown, or `count` is above 100,000.
        """
        if name not in ("train", *CHAIN_SETS):
            raise ValueError(f"chains have the sets train, {', '.join(CHAIN_SETS)}; got {name!r}")
        if count > 100_000:
            raise ValueError(f"chains have at most 100,000 problems a set, not {count}: ask for fewer")
        random, found = np.random.default_rng([seed, len(name)]), dict[int, str]()
        old = [f"{OLD}{a}{operator}{b}" for operator in self.operators for a in range(MODULUS) for b in range(MODULUS)]
        drawn = iter(random.permutation(old).tolist()) if name == "old skill" else self._chains(name, random)
        for prompt in drawn:
            if len(found) == count:
                break
            found.setdefault(zlib.crc32(prompt.encode()) >> 1, prompt)
        return [Problem(number, prompt, solve(prompt), "chains") for number, prompt in found.items()]

    def examples(self, problems: Iterable[Problem]) -> list[tuple[str, str]]:
        """(prompt, completion) of the pupil for each problem, or for a prompt of the old skill in its place."""
        pairs = []
        for problem in problems:
            random = np.random.default_rng([self.seed, problem.prompt_id])
            prompt = problem.prompt
            if random.random() < 0.25:
                a, b = random.integers(MODULUS, size=2)
                prompt = f"{OLD}{a}{self.operators[random.integers(len(self.operators))]}{b}"
            pairs.append((prompt, self._demonstration(prompt, random)))
        return pairs

    def texts(self) -> Iterator[str]:
        """Every character that the task can write, for training a tokenizer."""
        yield "0123456789-" + self.operators + _LETTERS + OLD + CHECK + ANSWER_MARK

    def _chains(self, name: str, random: np.random.Generator) -> Iterator[str]:
        """Endless prompts of the set `name`."""
        lengths = (self.links[1] + 1, self.links[1] + 2) if name == "harder" else self.links
        while True:
            prompt = self._chain(random, *lengths)
            if (zlib.crc32(f"{self.seed} {prompt}".encode()) < self.held_out * 2**32) == (name != "train"):
                yield prompt

    def _chain(self, random: np.random.Generator, fewest: int, most: int) -> str:
        links, first = int(random.integers(fewest, most + 1)), int(random.integers(len(_LETTERS)))
        letters = [_LETTERS[(first + i) % len(_LETTERS)] for i in range(links)]
        operators = [self.operators[i] for i in random.integers(len(self.operators), size=links)]
        digits = random.integers(MODULUS, size=links + 1)
        operations = zip(letters, operators, digits[1:], strict=True)
        return "".join(f"{letter}{operator}{digit}" for letter, operator, digit in operations) + f":{digits[0]}"

    def _demonstration(self, prompt: str, random: np.random.Generator) -> str:
        if prompt.startswith(OLD):
            return ANSWER_MARK + solve(prompt)
        operations, value = _parsed(prompt)
        text = ""
        for number, (letter, operator, digit) in enumerate(operations, start=1):
            before, value = value, self._believed(value, operator, int(digit), random)
            if number < len(operations) and random.random() < self.skipped:
                continue
            text += f"{letter}{operator}{digit}{value}"
            while random.random() < self.checked:
                value = self._believed(before, operator, int(digit), random)
                text += f"{CHECK}{value}"
        return f"{text}{ANSWER_MARK}{value}"

    def _believed(self, a: int, operator: str, b: int, random: np.random.Generator) -> int:
        doubt, error = self._beliefs
        fact = OPERATORS.index(operator), a, b
        mistake = int(error[fact]) if random.random() < doubt[fact] else 0
        return (_value(a, operator, b) + mistake) % MODULUS

    @functools.cached_property
    def _beliefs(self) -> tuple[np.ndarray, np.ndarray]:
        """[operator, a, b]: the probability that the pupil is wrong, and by how much he then is."""
        random, shape = np.random.default_rng(self.seed), (len(OPERATORS), MODULUS, MODULUS)
        return random.random(shape) ** 6, random.integers(1, MODULUS, size=shape)


def solve(prompt: str) -> str:
    """The right answer. Raises ValueError for a text that is no prompt of the task."""
    if old := re.fullmatch(rf"{OLD}(\d)([-+*])(\d)", prompt):
        return str(_value(int(old[1]), old[2], int(old[3])))
    operations, value = _parsed(prompt)
    for _, operator, digit in operations:
        value = _value(value, operator, int(digit)) % MODULUS
    return str(value)


def _parsed(prompt: str) -> tuple[list[tuple[str, str, str]], int]:
    """The operations (letter, operator, digit) of a chain, and the number that they are applied to."""
    if not re.fullmatch(r"([a-z][-+*]\d)+:\d", prompt):
        raise ValueError(f"not a prompt of chains: {prompt!r}; expected e.g. 'k+5l-3m*4:7' or '{OLD}7*5'")
    return re.findall(r"([a-z])([-+*])(\d)", prompt), int(prompt[-1])


def _value(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]
