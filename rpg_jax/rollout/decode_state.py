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
"""The most stop tokens of a request."""


@flax.struct.dataclass
class Prefix:
    """P prompts of T tokens, padding included, after a forward pass: the hidden states [P, D] of their last tokens,
    which predict the first completion tokens; the cache of their keys and values, a slot for each prompt; and the k
    experts of each token in each of L layers, [P, T, L, k], None if experts are not recorded."""

    hidden: jax.Array
    cache: KVCache
    experts: jax.Array | None = None


@flax.struct.dataclass
class SlotSampling:
    """The sampling parameters of each of S slots, as arrays.

    Attributes:
      temperature, top_p, min_p: f32[S]; temperature 0 is greedy, top_p 1 and min_p 0 are off.
      top_k: i32[S]; 0 is off.
      stop_tokens: i32[S, MAX_STOP_TOKENS], the tokens that end a completion; -1 where unused.
      limit: i32[S], the most tokens of the completion at the end of its present turn.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    stop_tokens: Any
    limit: Any

    @classmethod
    def of(cls, samplings: Sequence[Sampling], slots: int) -> SlotSampling:
        """Returns numpy arrays: slot i has the i-th of `samplings`, and the slots after them 0 and no stop token."""
        temperature, top_p, min_p = np.zeros((3, slots), np.float32)
        top_k, limit = np.zeros((2, slots), np.int32)
        stop_tokens = np.full((slots, MAX_STOP_TOKENS), -1, np.int32)
        for i, s in enumerate(samplings):
            temperature[i], top_p[i], top_k[i], min_p[i] = s.temperature, s.top_p, s.top_k, s.min_p
            stop_tokens[i, : len(s.stop_token_ids)], limit[i] = s.stop_token_ids, s.max_tokens
        return cls(temperature, top_p, top_k, min_p, stop_tokens, limit)

    def draw(self, logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws a token for each slot from logits f32[S, V] with typed random keys [S]. Returns the tokens i32[S] and
        their log-probabilities f32[S], in nats, after temperature and cuts; 0 where the temperature is 0."""
        return sample(logits, keys, self.temperature, self.top_p, self.top_k, self.min_p)

    def ends(self, tokens: jax.Array, emitted: jax.Array) -> jax.Array:
        """Returns bool[S], whether the token of `tokens` i32[S] that a slot has just drawn is a stop token or reaches
        the slot's limit. `emitted` i32[S] is the number of each completion's tokens, this token included."""
        return (tokens[:, None] == self.stop_tokens).any(-1) | (emitted >= self.limit)


Insertion = tuple[int, int, int, tuple[int, int, int, int], Sampling]
"""(slot, prefix row, emitted, (seed, step, prompt_id, index), sampling): the fields of `Insertions` for one slot."""

Extension = tuple[int, np.ndarray, int, bool, int, int]
"""(slot, tokens, start, begins, emitted, limit): the fields of `Extensions` for one slot."""


@flax.struct.dataclass
class Insertions:
    """The completions that one `DecodeState.insert` puts into slots, a row for each. The state has S slots.

    Attributes:
      count: i32, the number of rows. Later entries of the arrays are ignored.
      slots: i32[S], the slot of each row; out of range after `count`.
      prefix_rows: i32[S], the row of the `Prefix` that has the tokens to copy.
      emitted: i32[S], how many of the copied tokens belong to the completion; the others are its prompt.
      counters: u32[4, S], the seed, step, prompt_id and index from which each completion's random key is made.
      sampling: the sampling parameters of each row.
    """

    count: Any
    slots: Any
    prefix_rows: Any
    emitted: Any
    counters: Any
    sampling: SlotSampling

    @classmethod
    def of(cls, rows: Sequence[Insertion], slots: int) -> Insertions:
        """Returns numpy arrays of `rows`, in their order, for a state of `slots` slots. Counters are taken mod 2^32."""
        into, (prefix_rows, emitted) = np.full(slots, slots, np.int32), np.zeros((2, slots), np.int32)
        counters = np.zeros((4, slots), np.uint32)
        for i, (slot, prefix_row, drawn, origin, _) in enumerate(rows):
            into[i], prefix_rows[i], emitted[i] = slot, prefix_row, drawn
            counters[:, i] = [counter & 0xFFFFFFFF for counter in origin]
        sampling = SlotSampling.of([sampling for *_, sampling in rows], slots)
        return cls(np.int32(len(rows)), into, prefix_rows, emitted, counters, sampling)


@flax.struct.dataclass
class Extensions:
    """Tokens that one call of the engine's `extend` appends to slots that are not active, in P rows of T tokens.

    Attributes:
      tokens: i32[P, T], padded on the right.
      lengths: i32[P], the number of a row's tokens without padding; 0 for a row that is padding.
      slots: i32[P], the slot of each row; out of range for a row that is padding.
      starts: i32[P], the number of tokens in the slot before these tokens are appended, prompt included.
      begins: bool[P], whether the slot then draws tokens again. Otherwise a later call appends further tokens.
      emitted: i32[P], the number of the completion's tokens once all pieces of the observation are appended.
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
        """Returns numpy arrays of `rows`, in their order, for programs with `slots` slots. `shape` is (P, T), for at
        most P rows of at most T tokens; the remaining rows are padding."""
        tokens, into = np.zeros(shape, np.int32), np.full(shape[0], slots, np.int32)
        lengths, starts, emitted, limits = np.zeros((4, shape[0]), np.int32)
        begins = np.zeros(shape[0], bool)
        for i, (slot, appended, start, begin, drawn, limit) in enumerate(rows):
            tokens[i, : len(appended)], lengths[i], into[i], starts[i] = appended, len(appended), slot, start
            begins[i], emitted[i], limits[i] = begin, drawn, limit
        return cls(tokens, lengths, into, starts, begins, emitted, limits)


@flax.struct.dataclass
class DecodeState:
    """All S slots of a thread between two dispatches. Methods return a new state.

    Attributes:
      cache: the keys and values of the slots' tokens; the length of a slot that is not active is 0.
      hidden: [S, D], the hidden states that predict each slot's next token.
      keys: u32[S, 2], the raw random keys of the completions.
      emitted: i32[S], the number of tokens of each completion so far.
      sampling: the sampling parameters of each slot.
      active: bool[S], the slots that draw tokens; not free slots, nor slots whose turn or completion has ended.
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
        """Allocates a state of `slots` free slots of `capacity` tokens each, for the model `config`, in `dtype`.
        `int8_kv`: the cache is int8. `unstacked`: each layer has its own arrays. Both together raise ValueError."""
        return cls(
            cache=KVCache.empty(config, slots, capacity, dtype, int8=int8_kv, unstacked=unstacked),
            hidden=jnp.zeros((slots, config.embed_dim), dtype),
            keys=jnp.zeros((slots, 2), jnp.uint32),
            emitted=jnp.zeros(slots, jnp.int32),
            sampling=jax.tree.map(jnp.asarray, SlotSampling.of([], slots)),
            active=jnp.zeros(slots, bool),
        )

    @property
    def logical_axes(self) -> DecodeState:
        """The state with a tuple in place of each array: the logical axis, or None, of each dimension."""
        of_slots = jax.tree.map(lambda x: ("slots", None)[: x.ndim], self)
        return replace(of_slots, cache=self.cache.logical_axes)

    def insert(self, prefix: Prefix, rows: Insertions) -> DecodeState:
        """Copies the rows of `prefix` that `rows` names into their slots, and makes these slots active."""

        def copy(i, cache):
            return cache.insert(prefix.cache, rows.slots[i], rows.prefix_rows[i])

        def put(into, values):
            return into.at[rows.slots].set(values, mode="drop")

        return DecodeState(
            cache=jax.lax.fori_loop(0, rows.count, copy, self.cache),
            hidden=put(self.hidden, prefix.hidden[rows.prefix_rows]),
            keys=put(self.keys, completion_keys(*rows.counters)),
            emitted=put(self.emitted, rows.emitted),
            sampling=jax.tree.map(put, self.sampling, rows.sampling),
            active=put(self.active, True),
        )

    def continued(self, rows: Extensions, hidden: jax.Array, cache: KVCache) -> DecodeState:
        """Makes the slots of the rows that have `begins` active again. `hidden` [P, D] has the hidden state of the last
        token of each of the P rows. `cache` is this state's cache with the appended tokens of all rows."""
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
        """Makes the slots of the mask `ended` bool[S] inactive, and sets the cache's length of all inactive slots to 0.
        Their keys and values stay for the engine's `extend`, until an insertion fills the slot."""
        active = self.active & ~ended
        return replace(self, active=active, cache=replace(self.cache, lengths=jnp.where(active, self.cache.lengths, 0)))


@flax.struct.dataclass
class DecodeResult:
    """The tokens that S slots drew in one dispatch of at most K decode steps.

    Attributes:
      tokens: i32[S, K]. The first `counts` entries of a row are the slot's tokens; the others have no meaning.
      logprobs: f32[S, K], of these tokens, in nats.
      counts: i32[S], the number of tokens that each slot drew.
      active: bool[S], the slots that are active after the dispatch, and draw further tokens in the next one.
      experts: [S, K, L, k], the k experts of each token in each of L layers; None if they are not recorded.
    """

    tokens: Any
    logprobs: Any
    counts: Any
    active: Any
    experts: Any = None
