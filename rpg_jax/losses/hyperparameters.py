"""Names and numbers that a user may set: looked up and checked at trace time, with errors that say the fix."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax

Value = TypeVar("Value")

CHOICES: dict[str, tuple[str, ...]] = {
    "estimator": ("differentiable", "reinforce"),
    "clip": ("none", "dual", "truncate", "reward"),
    "form": ("paper", "verl"),
    "kl_weighting": ("none", "importance"),
}

# name: (test, what it says, whether None switches it off)
RANGES: dict[str, tuple[Callable[[float], bool], str, bool]] = {
    "kl_coef": (lambda x: 0 <= x < math.inf, "finite and >= 0", False),
    "clip_low": (lambda x: 0 <= x < 1, "in [0, 1)", False),
    "clip_high": (lambda x: 0 <= x < math.inf, "finite and >= 0", False),
    "clip_dual": (lambda x: x > 1, "> 1, or None for no dual clip", True),
    "kl_clamp": (lambda x: x > 0, "> 0, or None for no clamp", True),
    "behaviour_mass": (lambda x: 0 < x < math.inf, "finite and > 0", False),
    "truncated_importance_sampling": (lambda x: x > 0, "> 0, or None to switch it off", True),
    "constant_length": (lambda x: 0 < x < math.inf, "finite and > 0", True),
}


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a table: lists the known ones and guesses the meant one."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {what} {name!r}.{guess} Known: {', '.join(known)}")


def lookup(table: Mapping[str, Value], what: str, name: str) -> Value:
    """table[name], or a ValueError that lists the known names."""
    if not isinstance(name, str) or name not in table:
        raise unknown(what, name, table)
    return table[name]


def options(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of a loss and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check(loss: str, known: Iterable[str], given: Mapping[str, Any]) -> None:
    """Raises a ValueError unless every given hyperparameter is known to the loss and in its range.

    A `jax.Array` (a scheduled coefficient) is taken as it is: its value may not be known while tracing.
    """
    known = list(known)
    for name, value in given.items():
        if name not in known:
            raise unknown(f"hyperparameter of loss {loss!r}:", name, known)
        if name in CHOICES and value not in CHOICES[name]:
            raise unknown(name, value, CHOICES[name])
        if name not in RANGES or isinstance(value, jax.Array):
            continue
        accepts, range_text, optional = RANGES[name]
        if value is None and optional:
            continue
        if isinstance(value, (bool, str)) or value is None or not accepts(float(value)):
            raise ValueError(f"{name} of loss {loss!r} must be {range_text}; got {value!r}")
