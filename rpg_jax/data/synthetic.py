"""Synthetic problems: arithmetic of whole numbers, and chains of operations that are worked out line by line."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from rpg_jax.data.prompts import Problem

OPERATORS = "+-*"
ANSWER_MARK = "#"
SETS = ("held out", "carry", "negative")
"""The names of the held-out sets of `Arithmetic`."""
CHAIN_SETS = ("held out", "harder", "old skill")
"""The names of the held-out sets of `Chains`."""
CHECK = "?"  # between a value and the same value once more
OLD = "old:"  # begins a prompt of the old skill
MODULUS = 7
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENUMERABLE = 4_000_000
_DRAWN = 100_000


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The task a<op>b=, e.g. prompt "12+34=" with answer "46". Raises ValueError for attributes out of their range.

    Attributes:
      operators: one or more of "+-*".
      digits: operands are whole numbers below 10**digits; from 1 to 9.
      reverse: write the answer's last digit first ("64" for 46, "5-" for -5). Carries are known in this order, so a
        small transformer learns it much faster.
      held_out: fraction of operand pairs kept for evaluation, in [0, 1). The split hashes the unordered pair, so
        training has no operation on a held-out pair: neither a+b nor b+a nor another operator.
      seed: seed of the split.
    """

    operators: str = "+"
    digits: int = 2
    reverse: bool = False
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self):
        if not self.operators or set(self.operators) - set(OPERATORS):
            raise ValueError(f"operators must be one or more of {OPERATORS!r}, got {self.operators!r}")
        if not 1 <= self.digits <= 9:
            raise ValueError(f"digits must be in [1, 9], got {self.digits}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be in [0, 1), got {self.held_out}")

    def problems(
        self, split: Literal["train", "held_out"], count: int | None = None, *, seed: int = 0
    ) -> list[Problem]:
        """Returns `count` problems of a split in an order drawn from `seed`, no problem and no prompt id twice. Without
        `count`: all problems of the split if the task has at most 4,000,000; else those among 100,000 that it draws.
        Raises ValueError if the split is unknown, has fewer than `count` problems, or none, or if `count` is 0."""
        if split not in ("train", "held_out"):
            raise ValueError(f"split must be 'train' or 'held_out', got {split!r}")
        space = len(self.operators) * 10 ** (2 * self.digits)
        if space <= _ENUMERABLE:
            codes = np.random.default_rng(seed).permutation(space)
        else:
            share = self.held_out if split == "held_out" else 1 - self.held_out
            draws = max(_DRAWN, int(2 * (count or 0) / (share or 1)))  # more of them only add codes to the end
            codes = np.random.default_rng(seed).integers(space, size=draws)
            codes = codes[np.sort(np.unique(self._prompt_ids(codes), return_index=True)[1])]  # each prompt id once
        chosen = codes[self._is_held_out(codes) == (split == "held_out")][:count]
        if len(chosen) < (count or 1):
            raise ValueError(f"split {split!r} of {self} has only {len(chosen)} of the {count or 1} problems asked for")
        ids = self._prompt_ids(chosen).tolist()
        return [self._problem(*each) for each in zip(chosen.tolist(), ids, strict=True)]

    def belongs(self, problem: Problem, name: str) -> bool:
        """Tells whether a held-out problem belongs to the set `name`. "held out" has all problems, "carry" the sums and
        differences that carry or borrow at least `digits` - 1 times, "negative" the differences below zero. Raises
        ValueError for another name, or another task's problem."""
        if name not in SETS:
            raise ValueError(f"arithmetic has the sets {', '.join(SETS)}; got {name!r}")
        match = re.fullmatch(r"(\d+)([-+*])(\d+)=", problem.prompt)
        if match is None:
            raise ValueError(f"not an arithmetic prompt: {problem.prompt!r}; expected e.g. '12+34='")
        a, operator, b = int(match[1]), match[2], int(match[3])
        if name == "negative":
            return operator == "-" and a < b
        return name == "held out" or (operator != "*" and _carries(a, operator, b) >= self.digits - 1)

    def examples(self, problems: Iterable[Problem]) -> list[tuple[str, str]]:
        """Returns (prompt, answer) of each problem, for the supervised warm start. There is no stop token."""
        return [(problem.prompt, problem.answer) for problem in problems]

    def texts(self) -> Iterator[str]:
        """Yields one text with every character that prompts and answers can have, for training a tokenizer."""
        yield "0123456789=" + self.operators + "-"

    def _operands(self, code):
        operator, pair = divmod(code, 10 ** (2 * self.digits))
        return operator, *divmod(pair, 10**self.digits)

    def _is_held_out(self, codes: np.ndarray) -> np.ndarray:
        _, a, b = self._operands(codes)
        pairs = (np.minimum(a, b) * 10**self.digits + np.maximum(a, b)).astype(np.uint64)
        return _uniform(pairs, self.seed) < self.held_out

    def _problem(self, code: int, prompt_id: int) -> Problem:
        index, a, b = self._operands(code)
        operator = self.operators[index]
        answer = str(_value(a, operator, b))
        return Problem(
            prompt_id=prompt_id,
            prompt=f"{a}{operator}{b}=",
            answer=answer[::-1] if self.reverse else answer,
            source="arithmetic",
        )

    def _prompt_ids(self, codes: np.ndarray) -> np.ndarray:
        """Returns i64, the id of each code; it does not depend on the task's other operators. Ids are distinct up to
        four digits. With more digits, two problems share an id with probability 2**-31."""
        index, pairs = divmod(codes, 10 ** (2 * self.digits))
        known = np.array([OPERATORS.index(operator) for operator in self.operators])
        return (known[index] * 10 ** (2 * self.digits) + pairs) % (2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Chains:
    """The task "k+5l-3m*4:6" with answer "4": three named operations, applied to 6 one after the other, modulo 7.

    A completion writes each operation with its value, then `ANSWER_MARK` and the answer: "k+54l-31m*44#4". Names are
    successive letters from a random one on, and "a" follows "z". The verifier reads the answer alone.

    A simulated pupil writes the demonstrations of a warm start. Each time the pupil works out one of the 49 facts of an
    operator, the value is wrong with probability u⁶, u uniform per fact; the wrong value is always the same. With the
    default attributes the pupil gets 82 % of operations and 39 % of chains right, and is more often wrong than right on
    a seventh of the facts. Sometimes the pupil checks a value: the operation is worked out once more, and the last
    value counts ("k+50?4"). Sometimes the pupil leaves a line out.

    A quarter of the demonstrations show the old skill, which RL does not train: numbers without a modulus ("old:6*5" to
    "#30"), never wrong. Raises ValueError if `operators`, `links` or `held_out` is out of its range.

    Attributes:
      operators: one or more of "+-*".
      links: the fewest (at least 2) and the most (at most 24) operations of a training problem.
      checked: probability, below 1, that the pupil checks a value, and that the pupil then checks the value again.
      skipped: probability that the pupil leaves out a line; the last line is never left out.
      held_out: share of prompts that is kept for evaluation, by a hash; in (0, 1).
      seed: seed of the hash, of the pupil's mistakes and of the demonstrations.
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
        """Returns `count` distinct problems of the set `name`, drawn from `seed`. A larger `count` adds problems to the
        end. The sets: "train"; "held out", chains of the same lengths; "harder", chains with one or two operations
        more than the longest; "old skill", which has only 49 problems for each operator and returns at most these. No
        chain of another set is in "train", whatever the argument `seed` is. Raises ValueError if the name is unknown,
        `count` is above 100,000, or there are not so many chains."""
        if name not in ("train", *CHAIN_SETS):
            raise ValueError(f"chains have the sets train, {', '.join(CHAIN_SETS)}; got {name!r}")
        if count > 100_000:
            raise ValueError(f"chains have at most 100,000 problems a set, not {count}: ask for fewer")
        random, found, vain = np.random.default_rng([seed, len(name)]), dict[int, str](), 0
        old = [f"{OLD}{a}{operator}{b}" for operator in self.operators for a in range(MODULUS) for b in range(MODULUS)]
        for prompt in random.permutation(old).tolist() if name == "old skill" else self._chains(name, random):
            if len(found) >= count:
                break
            new = self._belongs(prompt, name) and found.setdefault(zlib.crc32(prompt.encode()) >> 1, prompt) is prompt
            vain = 0 if new else vain + 1
            if vain > 100_000 + 20 * len(found):
                more = "raise task.links, or lower task.generated or evaluation.problems"
                raise ValueError(f"{name!r} has some {len(found):,} chains of the {count:,} asked for: {more}")
        return [Problem(number, prompt, solve(prompt), "chains") for number, prompt in found.items()]

    def examples(self, problems: Iterable[Problem]) -> list[tuple[str, str]]:
        """Returns (prompt, the pupil's completion without a stop token) for each problem, the same at each call. In a
        quarter of the pairs a prompt of the old skill stands in place of the problem's prompt."""
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
        """Yields one text with every character that prompts and completions can have, for training a tokenizer."""
        yield "0123456789-" + self.operators + _LETTERS + OLD + CHECK + ANSWER_MARK

    def _chains(self, name: str, random: np.random.Generator) -> Iterator[str]:
        """Yields prompts without end, of the lengths of the set `name`. Prompts may repeat."""
        fewest, most = (self.links[1] + 1, self.links[1] + 2) if name == "harder" else self.links
        while True:
            links, first = int(random.integers(fewest, most + 1)), int(random.integers(len(_LETTERS)))
            letters = [_LETTERS[(first + i) % len(_LETTERS)] for i in range(links)]
            operators = [self.operators[i] for i in random.integers(len(self.operators), size=links)]
            digits = random.integers(MODULUS, size=links + 1)
            operations = zip(letters, operators, digits[1:], strict=True)
            yield "".join(f"{letter}{operator}{digit}" for letter, operator, digit in operations) + f":{digits[0]}"

    def _belongs(self, prompt: str, name: str) -> bool:
        held_out = zlib.crc32(f"{self.seed} {prompt}".encode()) < self.held_out * 2**32
        return name == "old skill" or held_out == (name != "train")

    def _demonstration(self, prompt: str, random: np.random.Generator) -> str:
        if prompt.startswith(OLD):
            return ANSWER_MARK + solve(prompt)
        operations, value = _parse_chain(prompt)
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
        """Two arrays [operator, a, b]: the probability that the pupil is wrong, and what a wrong pupil adds."""
        random, shape = np.random.default_rng(self.seed), (len(OPERATORS), MODULUS, MODULUS)
        return random.random(shape) ** 6, random.integers(1, MODULUS, size=shape)


def solve(prompt: str) -> str:
    """Returns the right answer to a prompt of `Chains`, "k+5l-3m*4:6" or "old:6*5". Raises ValueError otherwise."""
    if old := re.fullmatch(rf"{OLD}(\d)([-+*])(\d)", prompt):
        return str(_value(int(old[1]), old[2], int(old[3])))
    operations, value = _parse_chain(prompt)
    for _, operator, digit in operations:
        value = _value(value, operator, int(digit)) % MODULUS
    return str(value)


def _parse_chain(prompt: str) -> tuple[list[tuple[str, str, str]], int]:
    """Returns the operations (letter, operator, digit) of a chain, and the number that the first is applied to."""
    if not re.fullmatch(r"([a-z][-+*]\d)+:\d", prompt):
        raise ValueError(f"not a prompt of chains: {prompt!r}; expected e.g. 'k+5l-3m*4:7' or '{OLD}7*5'")
    return re.findall(r"([a-z])([-+*])(\d)", prompt), int(prompt[-1])


def _value(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def _carries(a: int, operator: str, b: int) -> int:
    """Returns the number of columns that carry in a + b or borrow in |a − b|. `operator` is "+" or "-"."""
    if operator == "-" and a < b:
        a, b = b, a
    count = carry = 0
    while a or b:
        column = a % 10 + b % 10 + carry if operator == "+" else a % 10 - b % 10 - carry
        carry = int(column > 9 or column < 0)
        count, a, b = count + carry, a // 10, b // 10
    return count


def _uniform(keys: np.ndarray, seed: int) -> np.ndarray:
    """f64 in [0, 1) per u64 key, by the splitmix64 finaliser (Steele, Lea, Flood 2014): the same on every machine."""
    offset = (seed + 1) * 0x9E3779B97F4A7C15 % 2**64
    with np.errstate(over="ignore"):
        x = keys * np.uint64(0x9E3779B97F4A7C15) + np.uint64(offset)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) / 2.0**53
