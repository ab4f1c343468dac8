"""What the engine keeps on the device between two dispatches, and what is put into it."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.models import KVCache, QwenConfig
from rpg_jax.rollout.sampling import completion_keys

MAX_STOP_TOKENS = 8


@flax.struct.dataclass
class Prefix:
    """Prefilled prompts: the hidden states [P, D] that predict their first completion tokens, and their cache."""

    hidden: jax.Array
    cache: KVCache


@flax.struct.dataclass
class Requests:
    """What to sample, one entry per slot to fill; entries past `count` are ignored.

    Attributes:
      count: i32, how many.
      slots, rows: i32[S], the decode slot and the prefix row of each.
      seed, step, prompt_id, index: u32[S], the counters of its random key.
      limit: i32[S], tokens it may have.
      temperature, top_p, min_p: f32[S]. top_k: i32[S].
      stop_tokens: i32[S, MAX_STOP_TOKENS], -1 where unused.
    """

    count: Any
    slots: Any
    rows: Any
    seed: Any
    step: Any
    prompt_id: Any
    index: Any
    limit: Any
    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    stop_tokens: Any

    @classmethod
    def empty(cls, slots: int) -> Requests:
        """Numpy arrays to fill in; slot numbers start out of range, so that unused entries are dropped."""
        i32, u32, f32 = (functools.partial(np.zeros, slots, dtype) for dtype in (np.int32, np.uint32, np.float32))
        return cls(
            count=np.int32(0),
            slots=np.full(slots, slots, np.int32),
            rows=i32(),
            seed=u32(),
            step=u32(),
            prompt_id=u32(),
            index=u32(),
            limit=i32(),
            temperature=f32(),
            top_p=f32(),
            top_k=i32(),
            min_p=f32(),
            stop_tokens=np.full((slots, MAX_STOP_TOKENS), -1, np.int32),
        )


@flax.struct.dataclass
class DecodeState:
    """All slots between two dispatches.

    Attributes:
      cache: KVCache of S slots.
      hidden: [S, D], predicting each slot's next token.
      keys: u32[S, 2], raw completion keys.
      emitted, limit: i32[S], tokens drawn so far and at most.
      temperature, top_p, min_p: f32[S]. top_k: i32[S].
      stop_tokens: i32[S, MAX_STOP_TOKENS].
      active: bool[S].
    """

    cache: KVCache
    hidden: jax.Array
    keys: jax.Array
    emitted: jax.Array
    limit: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    stop_tokens: jax.Array
    active: jax.Array

    @classmethod
    def empty(cls, config: QwenConfig, slots: int, capacity: int, dtype, *, int8_kv: bool = False) -> DecodeState:
        """All slots free."""
        zeros = functools.partial(jnp.zeros, slots)
        return cls(
            cache=KVCache.empty(config, slots, capacity, dtype, int8=int8_kv),
            hidden=jnp.zeros((slots, config.embed_dim), dtype),
            keys=jnp.zeros((slots, 2), jnp.uint32),
            emitted=zeros(jnp.int32),
            limit=zeros(jnp.int32),
            temperature=zeros(jnp.float32),
            top_p=zeros(jnp.float32),
            top_k=zeros(jnp.int32),
            min_p=zeros(jnp.float32),
            stop_tokens=jnp.zeros((slots, MAX_STOP_TOKENS), jnp.int32),
            active=zeros(bool),
        )

    @classmethod
    def logical_axes(cls, *, int8_kv: bool = False) -> DecodeState:
        """The names of every array's dimensions."""
        per_slot = ("slots",)
        return cls(
            cache=KVCache.logical_axes(int8=int8_kv),
            hidden=("slots", "act_embed"),
            keys=("slots", None),
            emitted=per_slot,
            limit=per_slot,
            temperature=per_slot,
            top_p=per_slot,
            top_k=per_slot,
            min_p=per_slot,
            stop_tokens=("slots", None),
            active=per_slot,
        )

    def insert(self, prefix: Prefix, requests: Requests) -> DecodeState:
        """Copies prefix rows into the slots that `requests` names, and starts them."""

        def copy(i, cache):
            return cache.insert(prefix.cache, requests.slots[i], requests.rows[i])

        def put(into, values):
            return into.at[requests.slots].set(values, mode="drop")

        return DecodeState(
            cache=jax.lax.fori_loop(0, requests.count, copy, self.cache),
            hidden=put(self.hidden, prefix.hidden[requests.rows]),
            keys=put(self.keys, completion_keys(requests.seed, requests.step, requests.prompt_id, requests.index)),
            emitted=put(self.emitted, 0),
            limit=put(self.limit, requests.limit),
            temperature=put(self.temperature, requests.temperature),
            top_p=put(self.top_p, requests.top_p),
            top_k=put(self.top_k, requests.top_k),
            min_p=put(self.min_p, requests.min_p),
            stop_tokens=put(self.stop_tokens, requests.stop_tokens),
            active=put(self.active, True),
        )
