"""Log-probabilities of given completions under a policy, by the program that training uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rpg_jax import data
from rpg_jax.runs.experiment import Experiment
from rpg_jax.runs.learner import learner_programs, make_learner, policy_objective
from rpg_jax.types import Completion

_ROWS = 4  # of a device in one pass
_MULTIPLE = 128  # of the tokens of a row: few shapes are compiled, and every kernel takes them


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A prompt with its completion, as `data.pack` takes them."""

    prompt: np.ndarray
    completions: Sequence[Completion]
    counted: tuple[bool, ...] = (True,)


def compute(
    experiment: Experiment,
    params: Any,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    *,
    temperature: float,
) -> list[np.ndarray]:
    """f32[n], in nats, of the n tokens of `completions[i]` after the tokens `prompts[i]`.

    Raises ValueError for a completion without a token, or with one that the model does not have.
    """
    vocabulary, pairs = experiment.layout.model.vocab_size, []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = np.asarray(completion, np.int32)
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"completion {i} has no token; its shape is {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"completion {i} has a token outside 0..{vocabulary - 1}")
        pairs.append(_Pair(prompt, [Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)]))
    if not pairs:
        return []
    layout = experiment.layout
    length = max(len(p.prompt) + len(p.completions[0].tokens) for p in pairs)
    longest = max(len(p.completions[0].tokens) for p in pairs)
    shape = data.RowShape(_ROWS * layout.mesh.size, _rounded(length), _rounded(longest))
    packed = data.pack(pairs, shape, pad_id=experiment.tokenizer.pad_id, sharding=layout.row_sharding)
    with layout.activate():
        learner = make_learner(layout, supervised=True)
        objective = policy_objective(layout.config)
        programs = learner_programs(layout, learner, objective, temperature=temperature)
        found = [programs.logprobs(params, batch.rows)[0] for batch in packed.batches]
    return [own[0] for own in packed.packing.gather(found)]


def _rounded(tokens: int) -> int:
    return -(-tokens // _MULTIPLE) * _MULTIPLE
