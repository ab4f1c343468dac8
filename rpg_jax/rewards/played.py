"""The part "environment" of a reward: what an environment has paid for the turns of a conversation."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Played(Protocol):
    """The fields of `types.Turns` that a scorer reads."""

    @property
    def rewards(self) -> np.ndarray: ...
    @property
    def error(self) -> str | None: ...


def total(turns: Played) -> float:
    """The sum of the turns' rewards. After a failure of the environment it is at most 0, so that failing never pays."""
    paid = float(np.sum(turns.rewards, dtype=np.float64))
    return paid if turns.error is None else min(paid, 0.0)


def of_all(turns: Sequence[Played | None]) -> list[Played]:
    """The turns of all completions. Raises ValueError if one has none."""
    played = [each for each in turns if each is not None]
    if len(played) < len(turns):
        raise ValueError("the reward 'environment' needs completions that an environment played: set environment.name")
    return played
