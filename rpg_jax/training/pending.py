"""Groups carried over to the next step, as text in a checkpoint's record and back, bit for bit."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Sequence

import numpy as np

from rpg_jax.data import Problem
from rpg_jax.training.experience import Group
from rpg_jax.types import Completion


def encode(groups: Sequence[Group]) -> str:
    """Groups with their behaviour log-probs; an empty string for none.

    Arrays are compressed as they are: printed as decimal numbers they would make most of a large run's checkpoint time.
    """
    if not groups:
        return ""
    completions = [c for g in groups for c in g.completions]
    texts = {
        "problems": [dataclasses.asdict(g.problem) for g in groups],
        "texts": [g.texts for g in groups],
        "finish_reasons": [c.finish_reason for c in completions],
    }
    arrays = {
        "texts": np.frombuffer(json.dumps(texts).encode(), np.uint8),
        "group_sizes": np.array([len(g.completions) for g in groups]),
        "lengths": np.array([len(c.tokens) for c in completions]),
        "prompt_lengths": np.array([len(g.prompt) for g in groups]),
        "prompts": np.concatenate([g.prompt for g in groups]),
        "tokens": np.concatenate([c.tokens for c in completions]),
        "versions": np.concatenate([c.versions for c in completions]),
        "sampler_logprobs": np.concatenate([c.logprobs for c in completions]),
        "behaviour_logprobs": np.concatenate([x for g in groups for x in g.behaviour_logprobs or ()]),
        "rewards": np.concatenate([g.rewards for g in groups]),
        "accuracy": np.concatenate([g.accuracy for g in groups]),
    }
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    return base64.b64encode(packed.getvalue()).decode()


def decode(text: str) -> list[Group]:
    """What `encode` was given."""
    if not text:
        return []
    with np.load(io.BytesIO(base64.b64decode(text))) as arrays:
        a = dict(arrays)
    texts = json.loads(a["texts"].tobytes())

    def split(name: str, lengths: str) -> list[np.ndarray]:
        return np.split(a[name], np.cumsum(a[lengths])[:-1])

    completions = [
        Completion(tokens, logprobs, reason, int(versions[0]), versions if (versions != versions[0]).any() else None)
        for tokens, logprobs, reason, versions in zip(
            split("tokens", "lengths"),
            split("sampler_logprobs", "lengths"),
            texts["finish_reasons"],
            split("versions", "lengths"),
            strict=True,
        )
    ]
    members = np.split(np.arange(len(completions)), np.cumsum(a["group_sizes"])[:-1])
    behaviour = split("behaviour_logprobs", "lengths")
    return [
        Group(Problem(**problem), prompt, [completions[i] for i in chosen], texts_, rewards, accuracy,
              [behaviour[i] for i in chosen])
        for problem, prompt, chosen, texts_, rewards, accuracy in zip(
            texts["problems"], split("prompts", "prompt_lengths"), members, texts["texts"],
            split("rewards", "group_sizes"), split("accuracy", "group_sizes"), strict=True,
        )
    ]  # fmt: skip
