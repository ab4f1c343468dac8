"""Sums of two numbers as questions to a chat model, and the reward of the last number in the answer.

configs/smollm2_135m_sums.py trains SmolLM2-135M-Instruct on them. A task and a reward of one's own look like this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from rpg_jax.data import Problem

_NUMBER = re.compile(r"\d+")


def last_number(completion: str, answer: str, prompt: str) -> float:
    """1 if the last number in the completion is the answer, else 0."""
    numbers = _NUMBER.findall(completion)
    return float(bool(numbers) and numbers[-1] == answer)


@dataclasses.dataclass(frozen=True)
class Problems:
    """ "What is a + b?" for all a and b from 0 to `largest`.

    Attributes:
      held_out: the share of the pairs that is kept for evaluation, drawn from `seed`.
    """

    held_out: float = 0.2
    largest: int = 15
    seed: int = 0

    def problems(self, name: str, count: int | None = None) -> list[Problem]:
        """The first `count` problems of "train" or "held out", or all."""
        pairs = [(a, b) for a in range(self.largest + 1) for b in range(self.largest + 1)]
        order = np.random.default_rng(self.seed).permutation(len(pairs)).tolist()
        cut = round(self.held_out * len(pairs))
        chosen = {"train": order[cut:], "held out": order[:cut]}[name][:count]
        return [Problem(i, f"What is {a} + {b}?", str(a + b), "sums") for i in chosen for a, b in [pairs[i]]]

    def texts(self) -> list[str]:
        """The text of every problem, for a tokenizer that is trained on them."""
        return [problem.prompt for name in ("train", "held out") for problem in self.problems(name)]

    def examples(self, problems: Sequence[Problem], *, turns: int) -> list[str]:
        """A demonstration of each problem, for a warm start."""
        return [problem.answer for problem in problems]
