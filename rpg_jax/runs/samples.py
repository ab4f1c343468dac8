"""Draws completions of prompts from a policy, as text with the tokens behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rpg_jax.rollout import Request
from rpg_jax.runs.experiment import Experiment, make_rollout
from rpg_jax.types import FinishReason, Sampling


class Sample(NamedTuple):
    """One completion of a prompt.

    `text` is without special tokens. `tokens` i32[n] are the sampled ids, with the stop token if one was drawn, and
    `logprobs` f32[n] their log-probabilities in nats, of the distribution sampled from. `finish_reason` is "stop" or
    "length".
    """

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


def draw(
    experiment: Experiment,
    params: Any,
    prompts: Sequence[np.ndarray],
    *,
    k: int,
    sampling: Sampling,
    seed: int,
    step: int,
) -> list[list[Sample]]:
    """`k` completions of each prompt i32[n]; `seed` and `step` are counters of their random numbers."""
    layout, tokenizer = experiment.layout, experiment.tokenizer
    with layout.activate():
        rollout = make_rollout(layout, params)
        try:
            groups = rollout.generate(Request(prompts, range(len(prompts)), k, sampling, seed, step))
        finally:
            rollout.close()
    stops = set(tokenizer.stop_token_ids)

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode([t for t in tokens.tolist() if t not in stops])

    return [[Sample(text(c.tokens), c.tokens, c.logprobs, c.finish_reason) for c in group] for group in groups]
