"""The reward of a completion: a weighted sum of verifiers and shaping terms, with the accuracy kept apart."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rpg_jax.rewards.exact import exact
from rpg_jax.rewards.shaping import format_match, length_penalty, overlong_penalty


class Scorable(Protocol):
    """What a scorer reads of a problem."""

    prompt: str
    answer: str
    source: str


@dataclasses.dataclass(frozen=True)
class Scores:
    """Rewards of N completions in the order given.

    Attributes:
      rewards: f32[N], Σ weight · part: what advantages are computed from.
      accuracy: f32[N], 1 where the verifier found the answer right, else 0: what dynamic sampling and evaluation read.
      parts: f32[N] by part name, unweighted.
    """

    rewards: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray]


# (completion, answer) -> score, above 0 where the answer is right.
VERIFIERS: dict[str, Callable[..., float]] = {"exact": exact}
# completion -> score.
FORMS: dict[str, Callable[..., float]] = {"format": format_match}
# lengths i32[N] -> scores f32[N].
LENGTHS: dict[str, Callable[..., np.ndarray]] = {"length": length_penalty, "overlong": overlong_penalty}


class Scorer:
    """Scores completions; made by `build`."""

    def __init__(self, weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]]):
        self._weights = dict(weights)
        self._options = {name: dict(options.get(name, {})) for name in weights}
        self._accuracy = next((name for name in weights if name in VERIFIERS), None)
        if self._accuracy is None:
            raise ValueError(
                f"no verifier among {list(weights)}, so nothing measures accuracy: add one of {list(VERIFIERS)}"
            )

    def __call__(
        self,
        problems: Sequence[Scorable],
        texts: Sequence[str],
        finish_reasons: Sequence[str],
        lengths: Sequence[int],
    ) -> Scores:
        """Scores N completions.

        Args:
          problems: N, the problem of each completion (repeated within its group).
          texts: N decoded completions, without special tokens.
          finish_reasons: N, "stop" or "length".
          lengths: i32[N] completion tokens, stop token included.

        Raises:
          ValueError: the four do not have the same length.
        """
        sizes = [len(x) for x in (problems, texts, finish_reasons, lengths)]
        if len(set(sizes)) > 1:
            raise ValueError(f"problems, texts, finish reasons and lengths must be as many, got {sizes}")
        parts = {name: self._part(name, problems, texts, np.asarray(lengths)) for name in self._weights}
        rewards = sum(
            (np.float32(w) * parts[name] for name, w in self._weights.items()), np.zeros(len(texts), np.float32)
        )
        return Scores(rewards, (parts[self._accuracy] > 0).astype(np.float32), parts)

    def _part(self, name: str, problems, texts, lengths: np.ndarray) -> np.ndarray:
        options = self._options[name]
        if name in LENGTHS:
            return LENGTHS[name](lengths, **options)
        if name in FORMS:
            return np.array([FORMS[name](text, **options) for text in texts], np.float32)
        verify = VERIFIERS[name]
        return np.array([verify(t, p.answer, **options) for p, t in zip(problems, texts, strict=True)], np.float32)

    def close(self) -> None:
        """Ends the worker processes, where there are any."""


def build(reward: str | Mapping[str, float], *, options: Mapping[str, Mapping[str, Any]] | None = None) -> Scorer:
    """The scorer for one part name, or for {part name: weight}.

    The first verifier named decides accuracy. `options` holds keyword arguments by part, e.g.
    {"overlong": {"limit": 2048, "buffer": 512}}.

    Raises:
      ValueError: unknown part or option, with the known ones; a missing option; no verifier.
    """
    weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
    options = options or {}
    known = {**VERIFIERS, **FORMS, **LENGTHS}
    for name in [*weights, *options]:
        if name not in known:
            raise ValueError(f"unknown reward {name!r}; known: {', '.join(known)}")
    for name in weights:
        _check_options(name, known[name], options.get(name, {}))
    return Scorer(weights, options)


def _check_options(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    accepted = {
        p.name: p.default is p.empty
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    unknown = sorted(set(given) - set(accepted))
    missing = sorted(k for k, required in accepted.items() if required and k not in given)
    if unknown or missing:
        raise ValueError(f"reward {name!r}: unknown options {unknown}, missing {missing}; it takes {sorted(accepted)}")
