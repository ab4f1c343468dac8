"""Sums and short stories of two numbers as questions to a chat model, and rewards of their answers.

configs/smollm2_135m_*.py train SmolLM2-135M-Instruct on them. A task and a reward of one's own look like this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from rpg_jax.data import Problem

_NUMBER = re.compile(r"\d+")
_STORIES = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "{name} has {sum} {things} and gives {a} of them away. How many {things} does {name} have left?",
    "{name} has {a} boxes with {b} {things} in each box. How many {things} does {name} have?",
)
_ANSWERS = ("{sum}", "{b}", "{product}")
_NAMES, _THINGS = ("Anna", "Ben", "Clara", "Mia", "Paul", "Tom"), ("apples", "books", "pencils", "shells", "stamps")


def last_number(completion: str, answer: str, prompt: str) -> float:
    """1 if the last run of digits in the completion is the answer, else 0; the prompt does not count."""
    return float(_NUMBER.findall(completion)[-1:] == [answer])


def equation(completion: str, answer: str, prompt: str) -> float:
    """1 if the first run of digits after the first = in the completion is the answer, else 0."""
    return float(_NUMBER.findall(completion.partition("=")[2])[:1] == [answer])


def last_integer(completion: str, answer: str, prompt: str) -> float:
    """1 if the last whole number in the completion, with its sign, is the answer, else 0."""
    return float(re.findall(r"-?\d+", completion)[-1:] == [answer])


@dataclasses.dataclass(frozen=True)
class Problems:
    """ "What is a + b?" for all a and b from 0 to `largest`.

    Attributes:
      tellings: the questions about each pair.
      held_out: the share of the pairs that is kept for evaluation, drawn from `seed`.
    """

    held_out: float = 0.2
    largest: int = 15
    tellings: int = 1
    seed: int = 0

    def problems(self, name: str, count: int | None = None) -> list[Problem]:
        """The first `count` problems of "train" or "held out" (None: all). Raises KeyError for another name."""
        pairs = [(a, b) for a in range(self.largest + 1) for b in range(self.largest + 1)]
        order = np.random.default_rng(self.seed).permutation(len(pairs)).tolist()
        cut = round(self.held_out * len(pairs))
        chosen = {"train": order[cut:], "held out": order[:cut]}[name]
        numbers = [(i + telling * len(pairs), *pairs[i]) for telling in range(self.tellings) for i in chosen]
        return [Problem(number, *self.question(number, a, b), "sums") for number, a, b in numbers[:count]]

    def question(self, number: int, a: int, b: int) -> tuple[str, str]:
        """The question "What is a + b?" and its answer as texts, whatever `number` is."""
        return f"What is {a} + {b}?", str(a + b)

    def texts(self) -> list[str]:
        """The text of every problem, for a tokenizer that is trained on them."""
        return [problem.prompt for name in ("train", "held out") for problem in self.problems(name)]

    def examples(self, problems: Sequence[Problem], *, turns: int) -> list[str]:
        """The answer of each problem, as a demonstration for a warm start, whatever `turns` is."""
        return [problem.answer for problem in problems]


@dataclasses.dataclass(frozen=True)
class Stories(Problems):
    """A story in which somebody gets, gives away or has boxes of things, for all a and b from 2 to `largest` + 2."""

    largest: int = 7
    tellings: int = 4

    def question(self, number: int, a: int, b: int) -> tuple[str, str]:
        """The question and its answer about a + 2 and b + 2; `number` and `seed` decide the story and its words."""
        rng = np.random.default_rng((self.seed, number))
        story, name, things = (int(rng.integers(len(x))) for x in (_STORIES, _NAMES, _THINGS))
        words = {"a": a + 2, "b": b + 2, "sum": a + b + 4, "product": (a + 2) * (b + 2)}
        text = _STORIES[story].format(**words, name=_NAMES[name], things=_THINGS[things])
        return text, _ANSWERS[story].format(**words)
