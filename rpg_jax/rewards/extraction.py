"""Extracts the answer of a completion in a canonical spelling, so that equal answers can be counted."""

from collections.abc import Callable

from rpg_jax.rewards import exact, expression, gsm8k
from rpg_jax.rewards.boxed import last_boxed
from rpg_jax.rewards.math_dapo import INVALID, extract, normalise

_MARKS = ("####", "#")
_LONGEST_BARE_ANSWER = 100


def extract_answer(completion: str, verifier: str | None = None) -> str | None:
    """The answer of a completion, for majority votes; None if no answer is found.

    It is the text that the `verifier` of that name compares, in its normal form. Without a verifier, or with a user's
    own function, it is the first of these that exists, in the spelling that `math_dapo` compares: the last "Answer:"
    line, the last \\boxed{…}, the text after the last "####" or "#", the whole text if it is one line of at most 100
    characters. The equality of "math_verify" has no normal form: see `votes`.
    """
    return _OF_VERIFIER.get(verifier or "", _any)(completion)


def _any(completion: str) -> str | None:
    if extract(completion) != INVALID:
        return _answer_line(completion)
    if last_boxed(completion) is not None:
        return _box(completion)
    mark = next((m for m in _MARKS if m in completion), None)
    bare = (completion if mark is None else completion.rpartition(mark)[2]).strip()
    return normalise(bare) or None if len(bare) <= _LONGEST_BARE_ANSWER and "\n" not in bare else None


def _answer_line(completion: str) -> str | None:
    found = extract(completion)
    return None if found == INVALID else found or None


def _box(completion: str) -> str | None:
    box = last_boxed(completion)
    return None if box is None else normalise(box) or None


def _number(completion: str) -> str | None:
    found = gsm8k.marked_number(completion)
    return None if found is None else f"{found.normalize():f}"


_OF_VERIFIER: dict[str, Callable[[str], str | None]] = {
    "exact": lambda completion: exact.final(completion) or None,
    "math_dapo": _answer_line,
    "boxed": _box,
    "gsm8k": _number,
    "countdown": expression.last_expression,
}
