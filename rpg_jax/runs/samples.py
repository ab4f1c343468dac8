"""Encodes prompts and draws completions of them from a policy, as text with the tokens behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rpg_jax import data
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


def encoded(experiment: Experiment, prompts: Sequence[str]) -> list[np.ndarray]:
    """The token ids i32[n] of each prompt, inside the chat template.

    Raises ValueError if a prompt has more tokens than `task.max_prompt_tokens`.
    """
    tokenizer, task = experiment.tokenizer, experiment.config.task
    problems = [data.Problem(i, text, answer="", source="prompt") for i, text in enumerate(prompts)]
    tokens = [data.encode_prompt(p, tokenizer, thinking=task.thinking) for p in problems]
    for text, ids in zip(prompts, tokens, strict=True):
        if len(ids) > task.max_prompt_tokens:
            raise ValueError(
                f"{text!r} has {len(ids)} tokens, more than task.max_prompt_tokens={task.max_prompt_tokens}"
            )
    return tokens


def surprises(experiment: Experiment, prompts: Sequence[str]) -> Iterator[str]:
    """A line on each prompt with characters that the tokenizer does not know, and on answers written backwards."""
    task = experiment.config.task
    for text in prompts:
        if unknown := experiment.tokenizer.unknown(text):
            yield f"{text!r}: the run's tokenizer does not know {', '.join(map(repr, unknown))}"
    if task.name == "arithmetic" and task.reverse and not experiment.config.model.path:
        yield "answers are written from the lowest digit (task.reverse): 24 is 42"


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
