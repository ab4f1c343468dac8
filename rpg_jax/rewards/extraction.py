"""The answer that a completion gives, in a canonical spelling, so that completions can be counted as agreeing."""

from __future__ import annotations

from rpg_jax.rewards.boxed import last_boxed
from rpg_jax.rewards.math_dapo import INVALID, extract, normalise

_MARKS = ("####", "#")
_LONGEST_BARE_ANSWER = 100


def extract_answer(completion: str) -> str | None:
    """What a completion answers, for majority votes; None where no answer is found.

    The first of these that it has: the last "Answer:" line, the last \\boxed{…}, what follows the last "####" or "#",
    the whole text if it is one line of at most 100 characters. Spelt as `math_dapo` compares.
    """
    found = extract(completion)
    if found != INVALID:
        return found or None
    box = last_boxed(completion)
    if box is not None:
        return normalise(box) or None
    mark = next((m for m in _MARKS if m in completion), None)
    bare = (completion if mark is None else completion.rpartition(mark)[2]).strip()
    return normalise(bare) or None if len(bare) <= _LONGEST_BARE_ANSWER and "\n" not in bare else None
