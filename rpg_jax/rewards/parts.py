"""The parts of a reward by name: which there are, what each takes, and whether they go together."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rpg_jax.rewards.graded import REMEDY
from rpg_jax.rewards.judge import Server
from rpg_jax.rewards.shaping import format_match, length_penalty, overlong_penalty
from rpg_jax.rewards.verdicts import LARGEST
from rpg_jax.rewards.verifiers import BY_SOURCE, VERIFIERS, resolve

FORMS: dict[str, Callable[..., float]] = {"format": format_match}  # completion -> score
LENGTHS: dict[str, Callable[..., np.ndarray]] = {"length": length_penalty, "overlong": overlong_penalty}  # of i32[N]


def check(
    weights: Mapping[str, float],
    options: Mapping[str, Mapping[str, Any]],
    *,
    accuracy: str | None = None,
    right_above: float | None = None,
) -> None:
    """Raises as `make_scorer` does, but starts no process and therefore does not check a user's own functions."""
    for name in {**weights, **options}:
        if name not in weights:
            raise ValueError(f"options for {name!r}, which is not among the rewards {list(weights)}")
        given = options.get(name, {})
        _check_options(name, given)
        if name in FORMS:
            FORMS[name]("", **given)
        if name in LENGTHS:
            LENGTHS[name](np.ones(1, np.int32), **given)
    for name, weight in weights.items():
        if not abs(weight) <= LARGEST:
            raise ValueError(f"the weight of the reward {name!r} must be a number within ±{LARGEST:g}, got {weight}")
    if not any(map(is_verifier, weights)):
        raise ValueError(f"no verifier among {list(weights)}, so nothing measures accuracy: add one of {[*VERIFIERS]}")
    if accuracy is not None and (accuracy not in weights or not is_verifier(accuracy)):
        raise ValueError(f"rewards.accuracy={accuracy!r} must be a verifier among the rewards {[*weights]}")
    deciding = resolve(name := decides(weights, accuracy))
    if right_above is None and deciding and deciding.graded:
        raise ValueError(f"the reward {name!r} decides accuracy, and grades: {REMEDY}")


def decides(weights: Mapping[str, float], accuracy: str | None) -> str:
    """The part that decides accuracy: the one named, else the first verifier."""
    return accuracy or next(filter(is_verifier, weights))


def needs_answers(weights: Mapping[str, float]) -> bool:
    """Whether a part compares completions with reference answers. A part that sees the prompt may do without."""
    verifiers = {name: resolve(name) for name in weights if is_verifier(name)}
    return any(verifier is None or not verifier.sees_prompt for verifier in verifiers.values())


def is_verifier(name: str) -> bool:
    return name == BY_SOURCE or resolve(name) is not None


def _check_options(name: str, given: Mapping[str, Any]) -> None:
    known = {**FORMS, **LENGTHS, BY_SOURCE: lambda: None}
    verifier = resolve(name)
    if name not in known and verifier is None:
        names = ", ".join([*VERIFIERS, *known, "module:function"])
        raise ValueError(f"unknown reward {name!r}; known: {names}")
    if verifier and verifier.pooled:
        return  # only an import of foreign code can tell
    if verifier and verifier.remote:
        Server(**given)
        return
    parameters = inspect.signature(verifier.load() if verifier else known[name]).parameters.values()
    accepted = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(set(given) - set(accepted))
    missing = sorted(k for k, required in accepted.items() if required and k not in given)
    if unknown or missing:
        raise ValueError(f"reward {name!r}: unknown options {unknown}, missing {missing}; it takes {sorted(accepted)}")
