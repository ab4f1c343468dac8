"""The oracle of the engine: prefill, then a jitted loop, one token of every completion at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax.models import KVCache
from rpg_jax.rollout import Decoding, Request
from rpg_jax.rollout.decode_state import SlotSampling
from rpg_jax.rollout.decoding import completion_keys, power_of_two, token_keys
from rpg_jax.types import Completion


class SimpleRollout:
    """Decodes all completions of a request as one batch, until the last completion stops.

    Of the `decoding` it uses `int8_kv` alone: it has no slots, and it decodes on the weights' devices.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any, decoding: Decoding):
        self._params = params
        complete = functools.partial(_complete, graphdef, decoding.int8_kv)
        self._complete = jax.jit(complete, static_argnames=("group_size", "max_tokens"))

    def generate(self, request: Request) -> list[list[Completion]]:
        prompts, sampling, group_size = request.prompts, request.sampling, request.group_size
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), power_of_two(int(lengths.max()))), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        prompt_ids = np.asarray(request.prompt_ids, np.uint32)
        counters = (np.uint32(request.seed & 0xFFFFFFFF), np.uint32(request.step), prompt_ids)
        arrays, sizes = SlotSampling.of([sampling], 1), {"group_size": group_size, "max_tokens": sampling.max_tokens}
        drawn = jax.device_get(self._complete(self._params, tokens, lengths, counters, arrays, **sizes))
        completions = [
            Completion(t[:n], p[:n], "stop" if t[n - 1] in sampling.stop_token_ids else "length", 0)
            for t, p, n in zip(*drawn, strict=True)
        ]
        return [completions[i : i + group_size] for i in range(0, len(completions), group_size)]

    def close(self) -> None:
        pass


def _complete(graphdef, int8_kv, params, tokens, lengths, counters, sampling, *, group_size: int, max_tokens: int):
    """Tokens i32[B, max_tokens], logprobs f32[B, max_tokens], counts i32[B], B = P · G with groups together."""
    module, rows = nnx.merge(graphdef, params), tokens.shape[0] * group_size
    seed, step, prompt_id = counters
    index = jnp.tile(jnp.arange(group_size, dtype=jnp.uint32), tokens.shape[0])
    keys = completion_keys(
        jnp.full(rows, seed), jnp.full(rows, step), jnp.repeat(prompt_id.astype(jnp.uint32), group_size), index
    )
    sampling = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), sampling)

    def unfinished(carry):
        return (carry[0] < max_tokens) & carry[-1].any()

    def body(carry):
        i, hidden, cache, drawn, logprobs, counts, active = carry
        token, logprob = sampling.draw(module.logits(hidden), token_keys(keys, jnp.full(rows, i)))
        hidden, cache, _ = module.decode(token, cache)
        drawn, logprobs = drawn.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        return i + 1, hidden, cache, drawn, logprobs, counts + active, active & ~sampling.ends(token, i + 1)

    with module.full_precision():
        hidden, prefix, _ = module.prefill(tokens, lengths)
        hidden, cache = jnp.repeat(hidden, group_size, axis=0), _grown(prefix, group_size, max_tokens)
        cache = cache.rounded() if int8_kv else cache
        blank = jnp.zeros((rows, max_tokens), jnp.int32)
        start = (jnp.int32(0), hidden, cache, blank, blank.astype(jnp.float32), jnp.zeros(rows, jnp.int32))
        _, _, _, *drawn, _ = jax.lax.while_loop(unfinished, body, (*start, jnp.ones(rows, bool)))
    return drawn


def _grown(prefix: KVCache, group_size: int, room: int) -> KVCache:
    """Each row of the prefix `group_size` times, with capacity for `room` more tokens."""
    keys, values = (jnp.repeat(x, group_size, axis=1) for x in (prefix.keys, prefix.values))
    return KVCache(
        jnp.pad(keys, ((0, 0),) * 4 + ((0, room),)),
        jnp.pad(values, ((0, 0),) * 3 + ((0, room), (0, 0))),
        jnp.repeat(prefix.lengths, group_size),
    )
