"""The key-value cache of a decoder: fixed capacity, one row per decode slot."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from rpg_jax.models.config import QwenConfig
from rpg_jax.models.logical import platform
from rpg_jax.models.ragged import ragged_append

DECODE_IMPLEMENTATIONS = ("auto", "xla", "ragged")


def decode_implementation(name: str) -> str:
    """What "auto" stands for on the platform that the program is compiled for.

    Raises:
      ValueError: an unknown name.
    """
    if name not in DECODE_IMPLEMENTATIONS:
        raise ValueError(f"unknown decode attention {name!r}; known: {', '.join(DECODE_IMPLEMENTATIONS)}")
    return {"tpu": "ragged"}.get(platform(), "xla") if name == "auto" else name


@flax.struct.dataclass
class KVCache:
    """Rotated keys and values of the tokens seen so far, for `S` independent slots of capacity `C`.

    Keys keep the position axis last and values the head axis last: the two matrix products of a decode step then read
    them as stored (with [C, K, H] for both, XLA:CPU transposes them at every step, three times the cost).
    Entries at or past a slot's length are never read, whatever they hold.

    Attributes:
      keys: [L, S, K, H, C].
      values: [L, S, K, C, H].
      lengths: i32[S], tokens held per slot; the next token is written there.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(cls, config: QwenConfig, slots: int, capacity: int, dtype=jnp.float32) -> KVCache:
        """A cache of zeros and lengths 0."""
        lead = (config.num_layers, slots, config.num_kv_heads)
        return cls(
            keys=jnp.zeros((*lead, config.head_dim, capacity), dtype),
            values=jnp.zeros((*lead, capacity, config.head_dim), dtype),
            lengths=jnp.zeros(slots, jnp.int32),
        )

    @classmethod
    def logical_axes(cls) -> KVCache:
        """Tuples of logical axis names in place of the arrays."""
        lead = ("layers", "slots", "act_kv_heads")
        return cls((*lead, None, "cache_length"), (*lead, "cache_length", None), ("slots",))

    @property
    def slots(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[-1]

    def insert(self, prefix: KVCache, slots: jax.Array | int, row: jax.Array | int = 0) -> KVCache:
        """This cache with row `row` of `prefix` (capacity at most this one's) copied into `slots`, an i32 or i32[G].

        Traceable; in place when this cache is donated.
        """
        width = prefix.capacity
        if width > self.capacity:
            raise ValueError(f"a prefix of capacity {width} does not fit a cache of capacity {self.capacity}")
        slots = jnp.atleast_1d(jnp.asarray(slots, jnp.int32))
        keys, values, lengths = self.keys, self.values, self.lengths
        for i in range(slots.shape[0]):
            keys = _put(keys, prefix.keys, slots[i], row)
            values = _put(values, prefix.values, slots[i], row)
            lengths = lengths.at[slots[i]].set(prefix.lengths[row])
        return KVCache(keys, values, lengths)

    def append(self, keys: jax.Array, values: jax.Array, *, implementation: str = "auto") -> KVCache:
        """This cache with one token [L, S, K, H] written at each slot's length, lengths + 1.

        Traceable; in place when this cache is donated. A slot already at capacity keeps its entries.
        """
        keys, values = keys.astype(self.keys.dtype), values.astype(self.values.dtype)
        if decode_implementation(implementation) == "ragged":
            return KVCache(*ragged_append(self.keys, self.values, self.lengths, keys, values), self.lengths + 1)
        slots = jnp.arange(self.slots)
        # Scatter windows come first in the update, hence the slot axis in front.
        return KVCache(
            self.keys.at[:, slots, :, :, self.lengths].set(keys.swapaxes(0, 1), mode="drop"),
            self.values.at[:, slots, :, self.lengths].set(values.swapaxes(0, 1), mode="drop"),
            self.lengths + 1,
        )


def _put(into: jax.Array, prefix: jax.Array, slot: jax.Array, row: jax.Array | int) -> jax.Array:
    block = jax.lax.dynamic_slice_in_dim(prefix, row, 1, axis=1).astype(into.dtype)
    return jax.lax.dynamic_update_slice(into, block, (0, slot, 0, 0, 0))
