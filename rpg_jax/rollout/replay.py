"""Completions decoded a second time with their tokens given, to see what the sampler has computed on the way."""

from collections.abc import Sequence

import numpy as np

from rpg_jax.rollout.chunks import Planner
from rpg_jax.rollout.engine import QwenEngine, Replayed
from rpg_jax.rollout.interface import Request
from rpg_jax.types import Sampling


def replay(
    engine: QwenEngine, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], sampling: Sampling
) -> list[Replayed]:
    """What the engine computes at the tokens i32[n] of completions: entry t is about token t + 1, t = 0 … n - 2.

    Prompts are prefilled, and then one token of every completion is decoded a step, in slots of the engine's number and
    by its programs. The first token is left out: a prefill predicts it. Memory is that of a rollout.

    Args:
      prompts: one a completion, i32[m] each.
      sampling: of the completions; its temperature is that of the log-probs.

    Raises:
      ValueError: there are more completions than slots, or one does not fit.
    """
    slots, K = engine.decoding.slots, engine.decoding.steps_per_dispatch
    if not 0 < len(completions) <= slots:
        raise ValueError(f"a replay takes 1 to {slots} completions, one a slot, got {len(completions)}")
    request = Request(prompts, range(len(prompts)), 1, sampling, seed=0, step=0)
    state = engine.init_decode_state()
    for chunk in Planner(engine).plan(request)[1]:
        prefix = engine.prefill(tokens=chunk.tokens, lengths=chunk.lengths)
        rows = [(row.group, row.prompt_row, 0, row.counters, row.sampling) for row in chunk.rows]
        state = engine.insert(prefix, state, rows)
    read = np.zeros(slots, np.int32)
    read[: len(completions)] = [len(tokens) - 1 for tokens in completions]
    steps = -(-int(read.max()) // K) * K
    given = np.zeros((slots, steps + 1), np.int32)
    for row, tokens in zip(given, completions, strict=False):  # the other slots are idle
        row[: len(tokens)] = tokens
    longest, parts = max(map(len, prompts)), []
    for first in range(0, steps, K):
        block, counts = given[:, first : first + K + 1], np.clip(read - first, 0, K)
        attend = min(longest + first + K, engine.decoding.capacity)
        state, replayed = engine.replay(state, block, counts, attend)
        parts.append(engine.fetch_replayed(replayed))
    if not parts:
        raise ValueError("a replay needs a completion of at least two tokens")
    logprobs = np.concatenate([part.logprobs for part in parts], 1)
    experts = None if parts[0].experts is None else np.concatenate([part.experts for part in parts], 1)
    return [
        Replayed(logprobs[s, :n], None if experts is None else experts[s, :n])
        for s, n in enumerate(read[: len(completions)])
    ]
