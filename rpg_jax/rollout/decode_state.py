"""Arrays of the engine: prefilled prompts, rows to insert or extend, the decode state, the tokens of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.models import DecoderConfig, KVCache
from rpg_jax.rollout.decoding import completion_keys, sample
from rpg_jax.types import Sampling

MAX_STOP_TOKENS = 8


@flax.struct.dataclass
class Prefix:
    """Prefilled prompts: the hidden states [P, D] that predict their first completion tokens, their cache, and if they
    are recorded their experts [P, T, L, k]."""

    hidden: jax.Array
    cache: KVCache
    experts: jax.Array | None = None


@flax.struct.dataclass
class SlotSampling:
    """`types.Sampling` of each slot, as arrays.

    Attributes:
      temperature, top_p, min_p: f32[S]. top_k: i32[S].
      stop_tokens: i32[S, MAX_STOP_TOKENS], -1 where unused.
      limit: i32[S], the most tokens of the completion.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    stop_tokens: Any
    limit: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], slots: int) -> SlotSampling:
        """Numpy arrays [slots, …] that begin with `samplings`. The other entries are zero and have no stop token."""
        temperature, top_p, min_p = np.zeros((3, slots), np.float32)
        top_k, limit = np.zeros((2, slots), np.int32)
        stop_tokens = np.full((slots, MAX_STOP_TOKENS), -1, np.int32)
        for i, s in enumerate(samplings):
            temperature[i], top_p[i], top_k[i], min_p[i] = s.temperature, s.top_p, s.top_k, s.min_p
            stop_tokens[i, : len(s.stop_token_ids)], limit[i] = s.stop_token_ids, s.max_tokens
        return cls(temperature, top_p, top_k, min_p, stop_tokens, limit)

    def draw(self, logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A token per slot, i32[S], and its log-probability, f32[S]; see `decoding.sample`."""
        return sample(logits, keys, self.temperature, self.top_p, self.top_k, self.min_p)

    def ends(self, tokens: jax.Array, emitted: jax.Array) -> jax.Array:
        """bool[S], whether each slot's completion ends with its token, the `emitted`-th, counted from 1."""
        return (tokens[:, None] == self.stop_tokens).any(-1) | (emitted >= self.limit)


Insertion = tuple[int, int, int, tuple[int, int, int, int], Sampling]
"""A row (slot, prefix row, emitted, counters, sampling) of `Insertions`."""

Extension = tuple[int, np.ndarray, int, bool, int, int]
"""A row (slot, tokens, start, begins, emitted, limit) of `Extensions`."""


@flax.struct.dataclass
class Insertions:
    """The rows that one `insert` puts into slots. Entries past `count` are ignored.

    Attributes:
      count: i32, number of rows.
      slots, prefix_rows: i32[S], the decode slot of each row and its prompt's row in the `Prefix`. Unused slot numbers
        are out of range.
      emitted: i32[S], tokens of the completion that are in the prefix already.
      seed, step, prompt_id, index: u32[S], the counters of its random key.
      sampling: the sampling parameters of each row.
    """

    count: Any
    slots: Any
    prefix_rows: Any
    emitted: Any
    seed: Any
    step: Any
    prompt_id: Any
    index: Any
    sampling: SlotSampling

    @classmethod
    def of(cls, rows: Sequence[Insertion], slots: int) -> Insertions:
        """Numpy arrays of `rows`, for programs with `slots` slots."""
        into, (prefix_rows, emitted) = np.full(slots, slots, np.int32), np.zeros((2, slots), np.int32)
        counters = np.zeros((4, slots), np.uint32)
        for i, (slot, prefix_row, drawn, origin, _) in enumerate(rows):
            into[i], prefix_rows[i], emitted[i] = slot, prefix_row, drawn
            counters[:, i] = [counter & 0xFFFFFFFF for counter in origin]
        seed, step, prompt_id, index = counters
        sampling = SlotSampling.of([sampling for *_, sampling in rows], slots)
        return cls(np.int32(len(rows)), into, prefix_rows, emitted, seed, step, prompt_id, index, sampling)


@flax.struct.dataclass
class Extensions:
    """Tokens that one `extend` appends to the caches of slots that are not active.

    Attributes:
      tokens: i32[P, T], right-padded. lengths: i32[P], 0 where a row is padding.
      slots: i32[P], the slot of each row; out of range where a row is padding.
      starts: i32[P], the number of tokens in the slot before.
      begins: bool[P], whether the slot then draws tokens again. Otherwise further tokens are to be appended.
      emitted: i32[P], tokens of the completion, `tokens` included.
      limit: i32[P], the most tokens of the completion at the end of its next turn.
    """

    tokens: Any
    lengths: Any
    slots: Any
    starts: Any
    begins: Any
    emitted: Any
    limit: Any

    @classmethod
    def of(cls, rows: Sequence[Extension], slots: int, shape: tuple[int, int]) -> Extensions:
        """Numpy arrays of `rows`, for programs with `slots` slots and `shape` (P, T)."""
        tokens, into = np.zeros(shape, np.int32), np.full(shape[0], slots, np.int32)
        lengths, starts, emitted, limits = np.zeros((4, shape[0]), np.int32)
        begins = np.zeros(shape[0], bool)
        for i, (slot, appended, start, begin, drawn, limit) in enumerate(rows):
            tokens[i, : len(appended)], lengths[i], into[i], starts[i] = appended, len(appended), slot, start
            begins[i], emitted[i], limits[i] = begin, drawn, limit
        return cls(tokens, lengths, into, starts, begins, emitted, limits)


@flax.struct.dataclass
class DecodeState:
    """All slots between two dispatches.

    Attributes:
      cache: KVCache of S slots.
      hidden: [S, D], from which each slot's next token is predicted.
      keys: u32[S, 2], raw completion keys.
      emitted: i32[S], tokens of the completion so far.
      sampling: the sampling parameters of each slot.
      active: bool[S], slots whose completion has not ended.
    """

    cache: KVCache
    hidden: jax.Array
    keys: jax.Array
    emitted: jax.Array
    sampling: SlotSampling
    active: jax.Array

    @classmethod
    def empty(
        cls, config: DecoderConfig, slots: int, capacity: int, dtype, *, int8_kv: bool = False, unstacked: bool = False
    ) -> DecodeState:
        """A state in which all slots are free."""
        return cls(
            cache=KVCache.empty(config, slots, capacity, dtype, int8=int8_kv, unstacked=unstacked),
            hidden=jnp.zeros((slots, config.embed_dim), dtype),
            keys=jnp.zeros((slots, 2), jnp.uint32),
            emitted=jnp.zeros(slots, jnp.int32),
            sampling=jax.tree.map(jnp.asarray, SlotSampling.of([], slots)),
            active=jnp.zeros(slots, bool),
        )

    @classmethod
    def logical_axes(cls, *, int8_kv: bool = False, layers: int = 0) -> DecodeState:
        """The names of every array's dimensions. `layers` is the number of layers of an unstacked cache, or else 0."""
        slot: Any = ("slots",)
        row: Any = ("slots", None)
        sampling = SlotSampling(slot, slot, slot, slot, stop_tokens=row, limit=slot)
        cache = KVCache.logical_axes(int8=int8_kv, layers=layers)
        return cls(cache, row, row, slot, sampling, active=slot)

    def insert(self, prefix: Prefix, rows: Insertions) -> DecodeState:
        """Copies prefix rows into slots, and starts them."""

        def copy(i, cache):
            return cache.insert(prefix.cache, rows.slots[i], rows.prefix_rows[i])

        def put(into, values):
            return into.at[rows.slots].set(values, mode="drop")

        return DecodeState(
            cache=jax.lax.fori_loop(0, rows.count, copy, self.cache),
            hidden=put(self.hidden, prefix.hidden[rows.prefix_rows]),
            keys=put(self.keys, completion_keys(rows.seed, rows.step, rows.prompt_id, rows.index)),
            emitted=put(self.emitted, rows.emitted),
            sampling=jax.tree.map(put, self.sampling, rows.sampling),
            active=put(self.active, True),
        )

    def continued(self, rows: Extensions, hidden: jax.Array, cache: KVCache) -> DecodeState:
        """Starts the rows that have `begins`. `hidden` [P, D] belongs to their last tokens; `cache` has all tokens."""
        slots = jnp.where(rows.begins, rows.slots, self.active.size)

        def put(into, values):
            return into.at[slots].set(values, mode="drop")

        return replace(
            self,
            cache=replace(cache, lengths=put(cache.lengths, rows.starts + rows.lengths)),
            hidden=put(self.hidden, hidden),
            emitted=put(self.emitted, rows.emitted),
            sampling=replace(self.sampling, limit=put(self.sampling.limit, rows.limit)),
            active=put(self.active, True),
        )

    def stop(self, ended: jax.Array) -> DecodeState:
        """Ends the completions in the slots of the mask `ended` bool[S]. Nothing reads or overwrites their cache until
        the slot is filled or continued."""
        active = self.active & ~ended
        return replace(self, active=active, cache=replace(self.cache, lengths=jnp.where(active, self.cache.lengths, 0)))


@flax.struct.dataclass
class DecodeResult:
    """The tokens of one dispatch of at most K decode steps. A slot's tokens are the first entries of its row.

    Attributes:
      tokens: i32[S, K].
      logprobs: f32[S, K] in nats. The sign bit is always set: probability 1 gives -0.0. So the bits of a log-prob
        are a negative integer, and a token id is never negative.
      counts: i32[S], number of tokens that each slot drew.
      active: bool[S], slots whose completion goes on.
      emitted: i32[S], number of tokens of each slot's completion so far.
      experts: [S, K, L, k], the experts of each token in each layer; None if they are not recorded.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    active: Any
    emitted: Any
    experts: Any = None
