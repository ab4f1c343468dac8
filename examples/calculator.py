"""Arithmetic with a calculator that costs: problems, an environment with the calculator, a pupil who rarely calls.

configs/calculator.py trains on the problems. examples/guessing.py is the simpler example.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rpg_jax.environments import Message, Posed, Turn, play
from rpg_jax.rewards.expression import evaluate

if TYPE_CHECKING:
    from rpg_jax.data import Problem

SETS = ("held out", "easy", "hard")
CALL, UNREADABLE = "calc ", "?"
_SMALL, _LARGE = 10, 99
_FOUR_DIGITS = 32  # 32² > 1000 > 31²


@dataclasses.dataclass(frozen=True)
class Problems:
    """The task "37*84=" with answer "3108": answer it, or have the calculator of the environment work it out before.

    Operands have two digits. A sum is easy: it never carries, so that each column can be added by itself. A product is
    hard: no small model works it out in its head. Products have four digits, their operands are 32 or more.

    A simulated pupil writes the demonstrations of a warm start. For a sixth of the problems, easy or hard, the pupil
    calls the calculator and copies the result. Otherwise the pupil answers at once: a sum with a wrong digit in a tenth
    of the cases, a product with any number. So 92 % of sums are right, 17 % of products, and 35 % of all problems where
    a quarter of the problems are sums.

    Attributes:
      easy: share of sums among the problems of "train" and "held out".
      held_out: share of the unordered pairs of operands that is kept for evaluation, by a hash.
      seed: of that hash and of the pupil.
    """

    easy: float = 1 / 4
    held_out: float = 0.2
    seed: int = 0

    def problems(self, name: str, count: int | None = None, *, seed: int = 0) -> list[Problem]:
        """The first `count` problems (None: all) of "train", "held out", "easy" or "hard", in an order by `seed`.

        "easy" and "hard" have the sums and the products that are held out; the other sets mix both. Raises ValueError
        for another name, or if the set has fewer problems.
        """
        if name not in ("train", *SETS):
            raise ValueError(f"calculator has the sets train, {', '.join(SETS)}; got {name!r}")
        random = np.random.default_rng(seed)
        numbers = range(_SMALL, _LARGE + 1)
        pairs = [(a, b) for a in numbers for b in numbers if self._is_held_out(a, b) == (name != "train")]
        pairs = [pairs[i] for i in random.permutation(len(pairs)).tolist()]
        sums = [self._problem(a, "+", b) for a, b in pairs if a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10]
        products = [self._problem(a, "*", b) for a, b in pairs if min(a, b) >= _FOUR_DIGITS]
        found = {"easy": sums, "hard": products}.get(name) or self._mixed(sums, products, random)
        if len(found) < (count or 1):
            raise ValueError(f"calculator has {len(found)} problems in {name!r}, fewer than {count}: ask for fewer")
        return found[:count]

    def examples(self, problems: Sequence[Problem], *, turns: int) -> list[list[Message]]:
        """The messages of the pupil's conversation about each problem, of at most `turns` turns."""
        return [play(Game(), Posed.of(p), functools.partial(self.turn, p), turns=turns)[-1] for p in problems]

    def turn(self, problem: Problem, heard: Sequence[str]) -> str:
        """The pupil's next turn after the calculator's results `heard`: the last result, a call, or an answer."""
        random = np.random.default_rng([self.seed, problem.prompt_id, len(heard)])
        if heard:
            return heard[-1]
        if random.random() < 1 / 6:
            return CALL + problem.prompt[:-1]
        if "*" in problem.prompt:
            return str(random.integers(_FOUR_DIGITS**2, _LARGE**2 + 1))
        return _with_mistake(problem.answer, random) if random.random() < 0.1 else problem.answer

    def texts(self) -> Iterator[str]:
        """Yields a text with every character of the task, for training a tokenizer."""
        yield "0123456789+-*/()=?" + CALL

    def _mixed(self, sums: list[Problem], products: list[Problem], random: np.random.Generator) -> list[Problem]:
        """Sums and products in random order, `easy` of them sums, until one kind is used up."""
        found, waiting = [], {True: iter(sums), False: iter(products)}
        while problem := next(waiting[random.random() < self.easy], None):
            found.append(problem)
        return found

    def _is_held_out(self, a: int, b: int) -> bool:
        return zlib.crc32(f"{self.seed} {min(a, b)} {max(a, b)}".encode()) < self.held_out * 2**32

    def _problem(self, a: int, operator: str, b: int) -> Problem:
        from rpg_jax.data import Problem  # it loads JAX, and the processes that run `Game` start faster without

        answer = a + b if operator == "+" else a * b
        number = ("+*".index(operator) * (_LARGE + 1) + a) * (_LARGE + 1) + b
        return Problem(number, f"{a}{operator}{b}=", str(answer), "calculator")


class Game:
    """A turn that begins with "calc " asks for the value of the expression behind it; any other turn is the answer.

    A call costs `cost`, and is answered by the value: a whole number, an exact fraction ("7/2"), or "?" if the
    expression is none. It is parsed, never executed; `rewards.expression.evaluate` has the grammar. An answer ends
    the conversation, and pays 1 if it has the characters of the problem's answer, blanks around it aside.
    """

    def __init__(self, cost: float = 0.1):
        self._cost = cost

    def reset(self, problem: Posed) -> Sequence[Message]:
        """The messages that begin the conversation: those of the problem."""
        return problem.messages

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        """The answer to the turn `completion`: the value that a call asks for, or the end with its reward."""
        if not completion.startswith(CALL):
            return Turn(reward=float(completion.strip() == problem.answer), done=True)
        try:
            heard = str(evaluate(completion.removeprefix(CALL)))
        except ValueError:
            heard = UNREADABLE
        return Turn(heard, -self._cost)


def _with_mistake(digits: str, random: np.random.Generator) -> str:
    """The number with another digit at one place."""
    place = random.integers(len(digits))
    wrong = (int(digits[place]) + random.integers(1, 10)) % 10
    return f"{digits[:place]}{wrong}{digits[place + 1 :]}"
