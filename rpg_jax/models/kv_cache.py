"""The key-value cache of a decoder: fixed capacity, one row per decode slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.logical import in_own_shard, partition_spec, platform
from rpg_jax.models.ragged import LANES, ragged_append
from rpg_jax.models.weights import eight_bits


@flax.struct.dataclass
class KVCache:
    """The rotated keys, and the values, of the tokens so far, for `S` independent slots of capacity `C`.

    The position axis is the last axis of keys, and the head axis is the last axis of values. So the two matrix products
    of a decode step read them as stored. With [C, K, H] for both, XLA:CPU transposes them at every step, which costs
    three times as much. Finite entries at or past a slot's length change nothing.

    Attributes:
      keys: [L, S, K, H, C]; an unstacked cache has a tuple of L arrays [S, K, H, C].
      values: [L, S, K, C, H]; an unstacked cache has a tuple of L arrays [S, K, C, H].
      lengths: i32[S], the number of tokens in each slot; the next token goes to this position.
      scales: an int8 cache has two arrays: the scales of keys f32[L, S, K, 1, C], and of values in the same shape. An
        int8 entry times its scale is the key or value. Another cache has no scales.
    """

    keys: Any
    values: Any
    lengths: jax.Array
    scales: tuple[jax.Array, ...] = ()

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        slots: int,
        capacity: int,
        dtype=jnp.float32,
        *,
        int8: bool = False,
        unstacked: bool = False,
    ) -> KVCache:
        """Makes a cache of `slots` empty slots, for `capacity` tokens each. On a TPU the capacity is rounded up to
        whole tiles of 128 tokens, which the kernels copy. `int8` stores int8 and scales in place of `dtype`.
        `unstacked` makes an array for each layer. Raises ValueError for both together."""
        if platform() == "tpu":
            capacity = -(-capacity // LANES) * LANES
        lead = (config.num_layers, slots, config.num_kv_heads)
        dtype = jnp.int8 if int8 else dtype
        cache = cls(
            keys=jnp.zeros((*lead, config.head_dim, capacity), dtype),
            values=jnp.zeros((*lead, capacity, config.head_dim), dtype),
            lengths=jnp.zeros(slots, jnp.int32),
            scales=tuple(jnp.zeros((*lead, 1, capacity)) for _ in range(2 * int8)),
        )
        return cache.unstacked() if unstacked else cache

    @property
    def logical_axes(self) -> KVCache:
        """The cache with a tuple in place of each array: the logical axis, or None, of each dimension."""
        names = (None, "slots", "kv_heads", None, None)
        return jax.tree.map(lambda x: ("slots",) if x.ndim == 1 else names[5 - x.ndim :], self)

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """The tokens that a slot can hold, C."""
        return jax.tree.leaves(self.keys)[0].shape[-1]

    def unstacked(self) -> KVCache:
        """Returns the cache with an array per layer, to update in place. Raises ValueError for an int8 cache."""
        if self.scales:
            raise ValueError("an int8 cache is not unstacked: its scales are read from one array of all layers")
        return replace(self, keys=tuple(self.keys), values=tuple(self.values))

    def stacked(self) -> KVCache:
        """Joins the arrays of all layers into one array [L, ...]; returns a stacked cache as it is."""
        if not isinstance(self.keys, tuple):
            return self
        return replace(self, keys=jnp.stack(self.keys), values=jnp.stack(self.values))

    def insert(self, prefix: KVCache, slot: jax.Array | int, row: jax.Array | int = 0) -> KVCache:
        """Returns the cache with row `row` of `prefix`, one prompt, and its length in slot `slot`. `prefix` is stacked
        and not int8; it is cast or rounded to this cache's dtype. The copy is in place if this cache is donated. Raises
        ValueError if `prefix` has more capacity than this cache."""
        width = prefix.capacity
        if width > self.capacity:
            raise ValueError(f"a prefix of capacity {width} does not fit a cache of capacity {self.capacity}")
        keys, values = (jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1) for x in (prefix.keys, prefix.values))
        one = KVCache(keys, values, prefix.lengths[row])
        one = one.rounded() if self.scales else one
        one = one.unstacked() if isinstance(self.keys, tuple) else one

        def put(into, one):
            if one.ndim == 0:
                return into.at[slot].set(one)
            corner = (0, slot, 0, 0, 0)[5 - into.ndim :]  # the array of one layer has no first axis
            return jax.lax.dynamic_update_slice(into, one.astype(into.dtype), corner)

        return jax.tree.map(put, self, one)

    def rounded(self) -> KVCache:
        """Returns a cache in int8. Each key and each value of a head has its own scale, max |x| / 127 over the head."""
        (keys, key_scales), (values, value_scales) = eight_bits(self.keys, -2), eight_bits(self.values, -1)
        scales = key_scales, value_scales.swapaxes(-1, -2)
        return KVCache(keys.astype(jnp.int8), values.astype(jnp.int8), self.lengths, scales)

    def extend(self, chunk: KVCache, slots: jax.Array, starts: jax.Array) -> KVCache:
        """Returns the cache with the first `chunk.lengths[p]` tokens of each row p of `chunk` in slot slots[p], from
        starts[p] to the capacity at most; `slots` and `starts` are i32[P]. Both caches are stacked. `chunk` is not int8
        and has no larger capacity. The caller sets this cache's lengths. If it is donated, the write is in place."""
        chunk = chunk.rounded() if self.scales else chunk
        held, rows = ((x.keys, x.values, *x.scales) for x in (self, chunk))
        write = _write_rows
        if (spec := partition_spec(None, "slots", "kv_heads", None, None)) is not None:
            # Each device writes into its own slots; XLA would gather the whole cache.
            whole = partition_spec(None, None, "kv_heads", None, None)
            write = jax.shard_map(
                write, in_specs=(spec, whole, *[PartitionSpec()] * 3), out_specs=spec, check_vma=False
            )
        keys, values, *scales = write(held, rows, chunk.lengths, slots, starts)
        return KVCache(keys, values, self.lengths, tuple(scales))

    def append(
        self, keys: jax.Array, values: jax.Array, *, active: jax.Array | None = None, ragged: bool = False
    ) -> KVCache:
        """Returns the stacked cache with one more token a slot, at the slot's length, and with all lengths larger by 1.
        `keys` and `values` are [L, S, K, H]. A full slot and a slot outside the mask `active` bool[S] (None: all) keep
        their entries. Their lengths grow too. If this cache is donated, the write is in place. With `ragged` a TPU
        kernel writes, which moves less memory."""
        places = self._next(active)
        scales: tuple[jax.Array, ...] = ()
        if self.scales:
            (keys, *key_scale), (values, *value_scale) = eight_bits(keys, -1), eight_bits(values, -1)
            scales = (*key_scale, *value_scale)
        keys, values = keys.astype(self.keys.dtype), values.astype(self.values.dtype)
        if ragged:
            written = ragged_append((self.keys, self.values, *self.scales), places, (keys, values, *scales))
            return KVCache(written[0], written[1], self.lengths + 1, tuple(written[2:]))
        slots = jnp.arange(self.slots)

        def last(into, token):
            # Slices separate the two index arrays, so their axis, the slots, comes first in the update (NumPy's rule).
            return into.at[:, slots, :, :, places].set(token.swapaxes(0, 1), mode="drop")

        return KVCache(
            last(self.keys, keys),
            self.values.at[:, slots, :, places].set(values.swapaxes(0, 1), mode="drop"),
            self.lengths + 1,
            tuple(map(last, self.scales, scales)),
        )

    def append_to_layer(
        self, layer: int, key: jax.Array, value: jax.Array, *, active: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Writes the key and value [S, K, H] of one token a slot into one layer of an unstacked cache. Returns the
        layer's keys [S, K, H, C] and values [S, K, C, H]. This cache itself does not change. A full slot keeps its
        entries, and so does a slot outside the mask `active` bool[S] (None: all slots are in it)."""
        places, slots = self._next(active), jnp.arange(self.slots)
        keys, values = self.keys[layer], self.values[layer]
        return (
            keys.at[slots, :, :, places].set(key.astype(keys.dtype), mode="drop"),
            values.at[slots, :, places].set(value.astype(values.dtype), mode="drop"),
        )

    def _next(self, active: jax.Array | None) -> jax.Array:
        """Returns each slot's next position i32[S]; for an inactive slot it is `capacity`, where no write lands."""
        return self.lengths if active is None else jnp.where(active, self.lengths, self.capacity)


def _write_rows(
    held: tuple[jax.Array, ...], chunk: tuple[jax.Array, ...], lengths: jax.Array, slots: jax.Array, starts: jax.Array
) -> tuple[jax.Array, ...]:
    """Does `KVCache.extend` on the arrays (keys, values, *scales) of caches, of all slots or of one device's slots."""
    at, mine = in_own_shard(slots, "slots", held[0].shape[1])
    capacity, width = held[0].shape[-1], chunk[0].shape[-1]

    def write(row, held):
        start = jnp.minimum(starts[row], capacity - width)
        places = start + jnp.arange(width)
        new = (places >= starts[row]) & (places < starts[row] + lengths[row]) & mine[row]

        def put(into, rows, axis):
            corner = tuple(start if i == axis else at[row] if i == 1 else 0 for i in range(5))
            one = jnp.roll(jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=1), starts[row] - start, axis=axis)
            old = jax.lax.dynamic_slice(into, corner, one.shape)
            mask = new[:, None] if axis == 3 else new
            return jax.lax.dynamic_update_slice(into, jnp.where(mask, one.astype(into.dtype), old), corner)

        return tuple(
            put(into, rows, 3 if i == 1 else 4) for i, (into, rows) in enumerate(zip(held, chunk, strict=True))
        )

    return jax.lax.fori_loop(0, len(slots), write, held)
