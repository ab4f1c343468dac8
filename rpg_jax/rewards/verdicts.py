"""Tasks of verifiers, which functions can be one, and their verdicts: a score within bounds, or the kind of error."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

KINDS = ("timeout", "crash", "memory", "error", "value", "forbidden", "unreachable", "status")
"""How a verdict fails. error: the function raised. value: what it returned is no score, see `checked_score`.

unreachable: a judge's server did not answer. status: it answered with an error of HTTP."""
CHANCE = frozenset({"timeout", "crash", "memory", "unreachable", "status"})
"""The kinds that the load of the machine or a server may cause: the same call may succeed another time."""
LARGEST = 1e6  # of a score's absolute value: sums over a group and their squares stay far inside float32


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of a verifier: strings and plain JSON options only."""

    function: str
    arguments: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a task: a finite `score`, or None with the kind of error (one of `KINDS`) and its detail."""

    score: float | None
    error: str | None = None
    detail: str = ""


class BadScore(ValueError):
    """A verifier returned something that is no score."""


def checked_score(value: Any) -> float:
    """The score as a float. Raises BadScore for text and other types, NaN, and numbers beyond ±`LARGEST`."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise BadScore(f"a score is a number, got {type(value).__name__}")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several numbers, a whole number of 400 digits
        raise BadScore(f"a score is one number: {error}") from error
    if not (math.isfinite(score) and abs(score) <= LARGEST):
        raise BadScore(f"a score is within ±{LARGEST:g}, got {score}")
    return score


def check_call(function: Callable[..., Any], path: str, arguments: Sequence[str]) -> None:
    """Raises ValueError if `function`, known as `path`, cannot be called with `arguments` and its own keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtin functions have none
        return
    options = {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        name = path.partition(":")[2]
        called = f"{name}({', '.join(arguments)})"
        raise ValueError(f"{path} is called as {called}, with strings, and is {name}{signature}: {error}") from error
