"""Pallas TPU kernels of decoding: one-token attention over the filled part of a cache, and the write of a token.

Both take the cache of all layers as it lies in memory. A slice of one layer would be a copy. A scatter would copy too,
because XLA:TPU wants another layout for a scatter. On other platforms the kernels are interpreted, slowly.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from rpg_jax.models.logical import mesh_axes, multiplies_int8, partition_spec, platform, shards, tensor_cores

_MASKED = -1e30
LANES = 128
_BLOCK_BYTES = 2**17  # of a block's keys: a block then arrives in about the time of its instructions
_FLIGHT_BYTES = 2**21  # of blocks on their way to a core; assumed to hide HBM's latency, not measured
_WRITTEN_BYTES = 2**19  # most keys that one grid step of a write moves, of several layers

_CACHE = (None, "slots", "kv_heads", None, None)


def ragged_attention(
    keys: jax.Array, values: jax.Array, lengths: jax.Array, scales: tuple[jax.Array, ...] = ()
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns a function (q, k, v, layer) in which one new token per slot attends to the cached tokens and to itself,
    by a kernel that reads only the blocks that a slot has filled.

    The function takes q [S, N, H], k and v [S, K, H] of the new token, and the layer i32[]. It returns [S, N, H] in q's
    dtype. The grid runs over a list of (slot, block), made once for all layers. Two TensorCores of a device each take
    half of the list, cut between two slots. On a mesh each device takes its slots and heads. A device that has all
    key-value heads takes the heads of its queries. Raises ValueError if devices share the query heads but not the
    key-value heads, and neither the number of devices nor the number of key-value heads divides the other.

    Args:
      keys, values, lengths: [L, S, K, H, C], [L, S, K, C, H] and i32[S]; entries at or past a length are ignored.
      scales: empty, or in an int8 cache f32[L, S, K, 1, C] of keys and of values.
    """
    _, _, K, H, capacity = keys.shape
    cuts = shards("heads")
    groups = K // shards("kv_heads")  # on a device
    heads, first = groups, jnp.zeros(1, jnp.int32)
    if shards("kv_heads") == 1 and cuts > 1:
        if K % cuts and cuts % K:
            raise ValueError(f"{cuts} devices share the query heads of {K} key-value heads; one must divide the other")
        heads = max(1, K // cuts)
    block = _block(heads * H, keys.dtype.itemsize, capacity)

    def plan(lengths):
        return _walk(jnp.minimum(lengths, capacity), capacity, block, min(tensor_cores(), len(lengths)))

    slots, kv = partition_spec("slots"), partition_spec("slots", "kv_heads", None)
    if slots is not None:
        plan = jax.shard_map(plan, in_specs=slots, out_specs=slots, check_vma=False)
    walk = plan(lengths)

    def local(q, k, v, cache, layer, *walk):
        start = first
        if heads < groups:
            index = jax.lax.axis_index(mesh_axes("heads"))
            start = (index * K // cuts // heads).astype(jnp.int32)[None]
            k, v = (jax.lax.dynamic_slice_in_dim(x, start[0] * heads, heads, axis=1) for x in (k, v))
        return _attend(q, k, v, cache, layer, start, walk, heads, block)

    if slots is not None:
        queries, cache = partition_spec("slots", "heads", None), partition_spec(*_CACHE)
        specs = (queries, kv, kv, cache, PartitionSpec(), *[slots] * len(walk))
        # check_vma=False: the kernel's outputs do not declare over which axes they vary.
        local = jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)
    return lambda q, k, v, layer: local(q, k, v, (keys, values, *scales), jnp.reshape(layer, 1), *walk)


def ragged_append(
    cache: tuple[jax.Array, ...], lengths: jax.Array, token: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Returns the cache with one more token in each slot, at the slot's length; a full slot stays as it is. If the
    cache is donated, the write is in place, and moves only the tile of the token; a scatter would move the whole cache.

    Args:
      cache: keys [L, S, K, H, C], values [L, S, K, C, H], and in an int8 cache their scales f32[L, S, K, 1, C].
      lengths: i32[S], the place of each slot's token; at the capacity or above, the slot stays as it is.
      token: its keys and values [L, S, K, H] in the cache's dtype, and for an int8 cache both scales f32[L, S, K, 1].
    """
    slots = partition_spec("slots")
    if slots is None:
        return _append(cache, lengths, token)
    specs = partition_spec(*_CACHE), slots, partition_spec(*_CACHE[:4])
    return jax.shard_map(_append, in_specs=specs, out_specs=specs[0], check_vma=False)(cache, lengths, token)


def _block(numbers: int, width: int, capacity: int) -> int:
    """Returns the positions of a block, a divisor of the capacity, if a position's keys are `numbers` of `width` bytes
    each. A slot reads half a block too much in the mean, and every block costs instructions. `docs/performance.md` has
    the cycles of both by the compiler's listing. int8 arrives twice as fast, so its blocks have more positions."""
    least = _BLOCK_BYTES if width > 1 else 2 * _BLOCK_BYTES
    fitting = max(512 // width, least // (numbers * width))
    fitting = min(1 << fitting.bit_length() - 1, capacity)
    return next((n for n in range(fitting, 0, -LANES) if capacity % n == 0), capacity)


def _walk(lengths: jax.Array, capacity: int, block: int, cores: int) -> tuple[jax.Array, ...]:
    """Returns bounds i32[cores + 1], slot and block of each step i32[S · C/block], and lengths i32[S]. Core i takes the
    steps from bounds[i] to bounds[i + 1], of whole slots and of at least one. An empty slot has one step too."""
    slots, per_slot = len(lengths), jnp.maximum(1, -(-lengths // block))
    ends = jnp.cumsum(per_slot)
    bounds = [jnp.zeros(1, jnp.int32), ends[-1:]]
    if cores == 2:
        cut = jnp.clip(jnp.sum(2 * ends - per_slot <= ends[-1]), 1, slots - 1)
        bounds.insert(1, ends[cut - 1][None])
    step = jnp.arange(slots * -(-capacity // block), dtype=jnp.int32)
    owners = jnp.minimum(jnp.sum(step[:, None] >= ends, -1, dtype=jnp.int32), slots - 1)
    return jnp.concatenate(bounds), owners, step - (ends - per_slot)[owners], lengths


def _attend(q, k, v, cache, layer, first, walk, heads: int, block: int) -> jax.Array:
    (S, N, H), (bounds, slots, *_) = q.shape, walk
    cores, groups = len(bounds) - 1, N // heads
    shapes = [(heads, H, block), (heads, block, H), *[(heads, 1, block)] * (len(cache) - 2)]
    held = sum(math.prod(shape) * x.dtype.itemsize for shape, x in zip(shapes, cache, strict=True))
    depth = min(16, max(2, 1 + _FLIGHT_BYTES // held))
    rows, kind = (2 * groups, jnp.int8 if multiplies_int8() else jnp.bfloat16) if len(cache) > 2 else (groups, q.dtype)
    tokens = pl.BlockSpec(memory_space=pltpu.VMEM)
    out = pl.pallas_call(
        _attend_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(cores,),
            in_specs=[tokens] * 3 + [(pl.BlockSpec(memory_space=pltpu.HBM),) * len(cache)],
            out_specs=pl.BlockSpec((None, S, N, H), lambda core, *_: (core, 0, 0, 0)),
            scratch_shapes=[
                [pltpu.VMEM((depth, *shape), x.dtype) for shape, x in zip(shapes, cache, strict=True)],
                pltpu.SemaphoreType.DMA((len(cache), depth)),
                *[pltpu.VMEM((heads, groups, width), jnp.float32) for width in (1, 1, H, 1)],
                pltpu.VMEM((heads, rows, H), kind),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((cores, S, N, H), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=depth * held + 8 * S * (N + N // groups) * max(H, LANES) * q.dtype.itemsize + 2**23,
        ),
        interpret=platform() != "tpu",
        name="ragged_attention",
    )(layer, first, *walk, q * H**-0.5, k, v, cache)
    return out[0] if cores == 1 else jnp.where((jnp.arange(S) < slots[bounds[1]])[:, None, None], out[0], out[1])


def _attend_kernel(layer, head, bounds, slots, blocks, lengths, q, k, v, cache, out, buffers, arrived, *sums):
    """Takes the steps of one core. The blocks of later steps, of other slots too, are on their way meanwhile."""
    depth, heads, _, width = buffers[0].shape
    begin, end = (bounds[pl.program_id(0) + i] for i in (0, 1))

    def copies(step):
        here = pl.ds(pl.multiple_of(blocks[step] * width, width), width)
        of_slot = layer[0], slots[step], pl.ds(head[0], heads)
        buffer = jax.lax.rem(step - begin, depth)
        for i, (held, into) in enumerate(zip(cache, buffers, strict=True)):
            there = (here, slice(None)) if i == 1 else (slice(None), here)
            yield pltpu.make_async_copy(held.at[(*of_slot, *there)], into.at[buffer], arrived.at[i, buffer])

    def fetch(step):
        @pl.when(step < end)
        def _():
            for copy in copies(step):
                copy.start()

    @pl.loop(begin, begin + depth - 1)
    def _(step):
        fetch(step)

    @pl.loop(begin, end)
    def _(step):
        fetch(step + depth - 1)
        for copy in copies(step):
            copy.wait()
        slot, buffer = slots[step], jax.lax.rem(step - begin, depth)
        token, block = [x.at[slot] for x in (q, k, v)], [x.at[buffer] for x in buffers]
        _add_block(blocks[step], lengths[slot], *token, block, out.at[slot], *sums)


def _add_block(index, length, q, k, v, block, out, peak, total, mixed, unit, queries):
    """Adds one block of one slot to a running softmax, which starts from the new token itself; after the slot's last
    block, writes `out`. An int8 block is multiplied as it is by 8-bit queries and weights: int8, or on a v4 bf16."""
    keys, values, *scales = block
    heads, _, width = keys.shape
    filled, kind = length - index * width, jnp.int32 if queries.dtype == jnp.int8 else jnp.float32
    # 8-bit numbers are exact as they are: Mosaic refuses the precision that a model in float32 asks for.
    how = {"precision": jax.lax.Precision.DEFAULT if scales else None, "preferred_element_type": kind}

    @pl.when(index == 0)
    def _():
        own = q[...].astype(jnp.float32).reshape(heads, -1, q.shape[-1])
        peak[...] = jnp.sum(own * k[...].astype(jnp.float32)[:, None], -1, keepdims=True)
        total[...] = jnp.ones_like(total)
        mixed[...] = jnp.broadcast_to(v[...].astype(jnp.float32)[:, None], mixed.shape)
        if scales:
            queries[...], unit[...] = _halves(own, queries.dtype)
        else:
            queries[...] = own.astype(queries.dtype)

    scores = jnp.einsum("kgh,khc->kgc", queries[...], keys[...].astype(queries.dtype), **how)
    scores = _joined(scores, unit[...]) * scales[0][...] if scales else scores
    scores = jnp.where(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2) < filled, scores, _MASKED)
    higher = jnp.maximum(peak[...], scores.max(-1, keepdims=True))
    weights, decay = jnp.exp(scores - higher), jnp.exp(peak[...] - higher)
    peak[...] = higher
    total[...] = total[...] * decay + weights.sum(-1, keepdims=True)
    if scales:  # past the end a scale may be NaN, and an int8 is finite
        known = jax.lax.broadcasted_iota(jnp.int32, scales[1].shape, 2) < filled
        halves, of_weights = _halves(weights * jnp.where(known, scales[1][...], 0), queries.dtype)
        products = jnp.einsum("kgc,kch->kgh", halves, values[...].astype(halves.dtype), **how)
        seen = _joined(products, of_weights)
    else:
        known = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1) < filled
        own = jnp.where(known, values[...], 0)
        seen = jnp.einsum("kgc,kch->kgh", weights.astype(v.dtype), own, **how)
    mixed[...] = mixed[...] * decay + seen

    @pl.when(filled <= width)
    def _():
        out[...] = (mixed[...] / total[...]).reshape(out.shape).astype(out.dtype)


def _halves(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns 8-bit numbers [K, 2 G, N] in `dtype` and the unit f32[K, G, 1]: x f32[K, G, N] is unit · (first G + last
    G / 254). The error is at most a 64,000th of a row's largest number. bf16 rounds to a 512th of each number."""
    unit = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / 127
    x = x * (1 / unit)
    first = jnp.round(x)
    return jnp.concatenate([first, jnp.round((x - first) * 254)], 1).astype(dtype), unit


def _joined(product: jax.Array, unit: jax.Array) -> jax.Array:
    """Returns the product f32[K, G, N] with x, from `product` [K, 2 G, N] with the `_halves` of x, and their unit."""
    groups, product = unit.shape[1], product.astype(jnp.float32)
    return unit * (product[:, :groups] + product[:, groups:] * (1 / 254))


def _append(cache, lengths, token) -> tuple[jax.Array, ...]:
    (keys, values), (k, v) = cache[:2], token[:2]
    L, S, K, H, capacity = keys.shape
    lanes, rows = min(LANES, capacity), min(32 // values.dtype.itemsize, capacity)
    fitting = max(1, _WRITTEN_BYTES // (K * H * lanes * keys.dtype.itemsize))
    layers = math.gcd(L, 1 << fitting.bit_length() - 1)

    def tile(place, width):
        return jnp.minimum(place, capacity - 1) // width

    def of_keys(layer, slot, lengths):
        return layer, slot, 0, 0, tile(lengths[slot], lanes)

    def of_values(layer, slot, lengths):
        return layer, slot, 0, tile(lengths[slot], rows), 0

    def of_token(layer, slot, lengths):
        return layer, slot, 0, 0, 0

    held = [
        pl.BlockSpec((layers, None, K, H, lanes), of_keys),
        pl.BlockSpec((layers, None, K, rows, H), of_values),
        *[pl.BlockSpec((layers, None, K, 1, lanes), of_keys)] * (len(cache) - 2),
    ]
    return pl.pallas_call(
        functools.partial(_append_kernel, tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(L // layers, S),
            in_specs=[
                pl.BlockSpec((layers, K, H, S), lambda layer, slot, lengths: (layer, 0, 0, 0)),
                pl.BlockSpec((layers, None, K, 1, H), of_token),
                *[pl.BlockSpec((layers, None, K, 1, 1), of_token)] * (len(cache) - 2),
                *held,
            ],
            out_specs=held,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache],
        input_output_aliases={1 + len(token) + i: i for i in range(len(cache))},
        interpret=platform() != "tpu",
        name="ragged_append",
    )(lengths, k.transpose(0, 2, 3, 1), v[:, :, :, None], *[x[..., None] for x in token[2:]], *cache)


def _append_kernel(tile, lengths, *refs):
    n = len(refs) // 3
    token, held, new = refs[:n], refs[n : 2 * n], refs[2 * n :]
    (k, v, *token_scales), (keys, values, *scales), (new_keys, new_values, *new_scales) = token, held, new
    slot = pl.program_id(1)
    lane = lengths[slot] - tile(lengths[slot], keys.shape[-1]) * keys.shape[-1]
    row = lengths[slot] - tile(lengths[slot], values.shape[-2]) * values.shape[-2]
    # The slots lie along the lanes of `k`. A sum with one slot unmasked puts its key along the sublanes, as in `keys`.
    mine = jax.lax.broadcasted_iota(jnp.int32, k.shape, 3) == slot
    key = jnp.sum(jnp.where(mine, k[...].astype(jnp.float32), 0), -1, keepdims=True)
    here = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 3) == lane
    new_keys[...] = jnp.where(here, key, keys[...].astype(jnp.float32)).astype(keys.dtype)
    here = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2) == row
    value, old = v[...].astype(jnp.float32), values[...].astype(jnp.float32)
    new_values[...] = jnp.where(here, value, old).astype(values.dtype)
    for scale, old_scales, into in zip(token_scales, scales, new_scales, strict=True):
        here = jax.lax.broadcasted_iota(jnp.int32, into.shape, 3) == lane
        into[...] = jnp.where(here, scale[...], old_scales[...])
