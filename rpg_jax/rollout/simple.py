"""The plain driver: prefill, then a jitted loop, one token at a time. The engine is tested and timed against it."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax.models import KVCache, QwenConfig
from rpg_jax.rollout.decode_state import SlotSampling
from rpg_jax.rollout.decoding import Decoding, power_of_two
from rpg_jax.rollout.request import Request, Rollout
from rpg_jax.rollout.sampling import completion_keys, token_keys
from rpg_jax.rollout.weights import Params, RolloutError, Staged, Weights
from rpg_jax.types import Completion


class SimpleRollout(Rollout):
    """Decodes all completions of a request as one batch, until the last one stops.

    Prompts that are done are decoded too, because the batch is one. Of the `decoding` it uses the capacity and
    `int8_kv`: it has no slots, and decodes on the weights' devices.
    """

    def __init__(self, config: QwenConfig, graphdef: nnx.GraphDef, weights: Weights, decoding: Decoding):
        self.weights, self._limits = weights, {"capacity": decoding.capacity, "vocab_size": config.vocab_size}
        self._busy = threading.Lock()
        complete = functools.partial(_complete, graphdef, decoding.int8_kv)
        self._complete = jax.jit(complete, static_argnames=("group_size", "max_tokens"))

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        """Waits until no rollout runs."""
        with self._busy:
            super().sync_weights(params, version)

    def generate(self, request: Request) -> list[list[Completion]]:
        request.check_one_turn("the simple driver")
        request.check_fits(**self._limits)
        if not request.prompts or request.enough == 0:
            return [[] for _ in request.prompts]
        prompts, sampling, step, group_size = request.prompts, request.sampling, request.step, request.group_size
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), power_of_two(int(lengths.max()))), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        counters = (np.uint32(request.seed & 0xFFFFFFFF), np.uint32(step), np.asarray(request.prompt_ids, np.uint32))
        arrays, sizes = SlotSampling.of([sampling], 1), {"group_size": group_size, "max_tokens": sampling.max_tokens}
        with self._busy, self.weights.pinned() as params:
            version = self.weights.version
            try:
                drawn = jax.device_get(self._complete(params, tokens, lengths, counters, arrays, **sizes))
            except Exception as fault:
                raise RolloutError(f"the rollout of step {step} failed: {type(fault).__name__}: {fault}") from fault
        _, logprobs, counts = drawn
        if not np.isfinite(logprobs).all():
            raise RolloutError(f"step {step}: non-finite log-probabilities under weights of version {version}")
        completions = [
            Completion(t[:n], p[:n], "stop" if t[n - 1] in sampling.stop_token_ids else "length", version)
            for t, p, n in zip(*drawn, strict=True)
        ]
        groups = [completions[i : i + group_size] for i in range(0, len(completions), group_size)]
        by_length = np.argsort(counts.reshape(-1, group_size).max(1), kind="stable")
        first = [int(i) for i in by_length if i not in request.done][: request.enough]
        if request.on_group is not None:
            for i in first:
                request.on_group(i, groups[i])
        return [group if i in first else [] for i, group in enumerate(groups)]


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
        hidden, cache = module.decode(token, cache)
        drawn, logprobs = drawn.at[:, i].set(token), logprobs.at[:, i].set(logprob)
        return i + 1, hidden, cache, drawn, logprobs, counts + active, active & ~sampling.ends(token, i + 1)

    with module.full_precision():
        hidden, prefix = module.prefill(tokens, lengths)
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
