"""Causal grouped-query attention within segments, and one-token attention over a cache.

Softmax is f32 at every compute dtype. Keys and values are never repeated over the query heads of their group.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rpg_jax.models.kv_cache import KVCache
from rpg_jax.models.logical import constrain, in_own_shard, mesh_axes, partition_spec, platform, shards
from rpg_jax.models.ragged import ragged_attention
from rpg_jax.models.splash import splash_attention
from rpg_jax.types import BRANCH

_MASKED = -1e30  # finite, so that a row of padding, where all is masked, does not become NaN
_BLOCK = 512  # queries that the path without a kernel takes at a time
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    axes: tuple[str | None, str | None] = ("batch", "length"),
    implementation: str = "auto",
) -> jax.Array:
    """Returns softmax(q kᵀ / √H) v. A token attends to itself, to the earlier tokens of its segment, and to its prompt.

    The result [B, T, N, H] is in q's dtype; rows of padding hold finite numbers without a meaning. With context
    parallelism (`length` on mesh axes), each device keeps its stretch of the queries and gathers the keys and values of
    the whole row. Raises ValueError for an unknown implementation.

    Args:
      q: [B, T, N, H].
      k, v: [B, T, K, H]; query head n reads key-value head n // (N / K).
      segment_ids: i32[B, T], 0 for padding. If completions share their prompt, the id of a completion modulo
        `types.BRANCH` is the id of the prompt. With "splash" a completion does not see a shared prompt.
      axes: logical names of B and T.
      implementation: "xla"; "cudnn" (GPU, bf16 or f16; it holds a segment mask [B, 1, T, T] in memory); "splash" (TPU);
        or "auto", which `chosen` chooses for the platform that the program is compiled for.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = chosen(q.dtype, q.shape[1], q.shape[3])
    if implementation == "splash":
        return splash_attention(q, k, v, segment_ids, axes)
    k, v = (constrain(x, axes[0], None, "kv_heads", None) for x in (k, v))
    if implementation == "cudnn":
        same = attends(segment_ids[:, None, :, None], segment_ids[:, None, None, :])
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation="cudnn")
    return _xla(q, k, v, segment_ids, axes)


def attends(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns a bool mask: whether queries may attend to earlier keys, by segment ids i32 in shapes that broadcast. The
    two ids are equal, or the key's id is the id of the query's prompt: the query's id modulo `types.BRANCH`."""
    return (queries == keys) | (queries % BRANCH == keys)


def chosen(dtype: jnp.dtype, length: int, head: int) -> str:
    """Returns what "auto" means for rows of `length` tokens and heads of `head` numbers in `dtype`: on the platform of
    `logical.platform` "splash" for a TPU, "cudnn" for a GPU if cuDNN has the kernel, else "xla". The kernel takes bf16
    and f16, a `head` that is a multiple of 8 up to 128, and an even `length`, and needs compute capability 8.0."""
    has_kernel = dtype in (jnp.bfloat16, jnp.float16) and length % 2 == 0 and head % 8 == 0 and head <= 128
    if platform() == "gpu" and has_kernel:
        major = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")[0]
        return "cudnn" if major.isdecimal() and int(major) >= 8 else "xla"
    return "splash" if platform() == "tpu" else "xla"


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, axes) -> jax.Array:
    """Computes `attention` without a kernel, from all scores in memory at once. Rows of n · 512 > 1,024 tokens that lie
    on one device take 512 queries at a time, whose scores the backward pass computes again."""
    B, T, N, H = q.shape
    K = k.shape[2]
    # With heads first and keys as [H, T], both products read rows as stored, and XLA:CPU does not transpose scores.
    queries = (q * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    index = jnp.arange(T)

    def block(queries, segments, index_q):
        scores = jnp.einsum("bkgth,bkhs->bkgts", queries, keys, preferred_element_type=jnp.float32)
        scores = constrain(scores, axes[0], "kv_heads", None, axes[1], None)
        mask = (index_q[:, None] >= index) & attends(segments[:, :, None], segment_ids[:, None, :])
        scores = jnp.where(mask[:, None, None], scores, _MASKED)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        total = weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return (mixed / total).astype(q.dtype)

    if T <= 2 * _BLOCK or T % _BLOCK or shards(axes[1]) > 1:
        out = block(queries, segment_ids, index)
    else:
        blocks = queries.reshape(B, K, N // K, T // _BLOCK, _BLOCK, H).transpose(3, 0, 1, 2, 4, 5)
        segments = segment_ids.reshape(B, T // _BLOCK, _BLOCK).swapaxes(0, 1)
        out = jax.lax.map(lambda args: jax.checkpoint(block)(*args), (blocks, segments, index.reshape(-1, _BLOCK)))
        out = out.transpose(1, 2, 3, 0, 4, 5).reshape(B, K, N // K, T, H)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def extend_attention(
    cache: KVCache, slots: jax.Array, starts: jax.Array
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns a function (q, k, v, layer): new tokens attend to the tokens in their slot and, causally, to each other.

    The function takes q [P, T, N, H], the new tokens' k and v [P, T, K, H], and the layer i32[] whose cache it reads.
    It returns [P, T, N, H] in q's dtype. Scores are f32[P, N, T, C + T] in memory.

    Args:
      cache: a stacked cache of capacity C, which does not hold the new tokens yet.
      slots: i32[P], the slot that each row continues.
      starts: i32[P], the number of tokens in the slot; entries from there on are ignored.
    """

    held = (cache.keys, cache.values, *cache.scales)
    attend = _extend_attend
    if (spec := partition_spec(None, "slots", "kv_heads", None, None)) is not None:
        # Each device answers for its own slots; XLA would gather the whole cache.
        heads, whole = partition_spec(None, None, "kv_heads", None), PartitionSpec()
        specs = (heads, heads, heads, spec, whole, whole, whole)
        attend = jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)
    return lambda q, k, v, layer: attend(q, k, v, held, layer, slots, starts)


def _extend_attend(q, k, v, cache, layer, slots, starts) -> jax.Array:
    """Runs the function of `extend_attention`; `cache` is (keys, values, *scales) of all slots or of this device's."""
    at, mine = in_own_shard(slots, "slots", cache[0].shape[1])
    keys, values, *scales = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[at] for x in cache)
    (P, T, N, H), K = q.shape, k.shape[2]
    grouped = q.reshape(P, T, K, N // K, H) * (H**-0.5)
    past = jnp.einsum("ptkgh,pkhc->pkgtc", grouped, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    past = past * scales[0][:, :, None] if scales else past
    filled = jnp.arange(keys.shape[-1]) < starts[:, None]
    past = jnp.where(filled[:, None, None, None], past, _MASKED)
    own = jnp.einsum("ptkgh,pskh->pkgts", grouped, k, preferred_element_type=jnp.float32)
    own = jnp.where(jnp.tri(T, dtype=bool), own, _MASKED)
    peak = jnp.maximum(past.max(-1, keepdims=True), own.max(-1, keepdims=True))
    past, own = jnp.exp(past - peak), jnp.exp(own - peak)
    total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    past = past * scales[1][:, :, None] if scales else past
    mixed = past.astype(v.dtype), values.astype(v.dtype)
    out = jnp.einsum("pkgtc,pkch->pkgth", *mixed, preferred_element_type=jnp.float32)
    out += jnp.einsum("pkgts,pskh->pkgth", own.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(P, T, N, H)
    axes = mesh_axes("slots")
    return jax.lax.psum(jnp.where(mine[:, None, None, None], out, 0), axes) if axes else out


def decode_attention(
    cache: KVCache, *, attend_length: int | None = None, ragged: bool = False
) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns a function (q, k, v, layer) in which one new token per slot attends to the cached tokens and to itself.

    The function takes q [S, N, H], the new token's k and v [S, K, H], and the layer i32[] whose cache it reads. It
    returns [S, N, H] in q's dtype. Entries at or past `cache.lengths` are ignored.

    Args:
      cache: a stacked cache of S slots, which does not hold the new tokens yet.
      attend_length: a promise that no length is larger; without `ragged`, only so many positions are read. None: all.
      ragged: whether `ragged_attention`, a TPU kernel, attends. It reads only the filled part of each slot.
    """
    if ragged:
        return ragged_attention(cache.keys, cache.values, cache.lengths, cache.scales)
    limit = cache.capacity if attend_length is None else attend_length

    def attend(q, k, v, layer):
        keys = jax.lax.dynamic_index_in_dim(cache.keys, layer, keepdims=False)[..., :limit]
        values = jax.lax.dynamic_index_in_dim(cache.values, layer, keepdims=False)[..., :limit, :]
        scales = [jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[..., :limit] for x in cache.scales]
        grouped = _grouped(q, k.shape[1])
        past = _cached_logits(grouped, keys, cache.lengths, *scales[:1])
        own = jnp.einsum("skgh,skh->skg", grouped, k, preferred_element_type=jnp.float32)[..., None]
        peak = jnp.maximum(past.max(-1, keepdims=True), own)
        past, own = jnp.exp(past - peak), jnp.exp(own - peak)
        total = past.sum(-1, keepdims=True) + own
        past = past * scales[1] if scales else past
        mixed = past.astype(v.dtype), values.astype(v.dtype)
        out = jnp.einsum("skgc,skch->skgh", *mixed, preferred_element_type=jnp.float32)
        return ((out + own * v[:, :, None]) / total).astype(q.dtype).reshape(q.shape)

    return attend


def layer_attention(q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the attention [S, N, H], in q's dtype, of one query a slot over the first `lengths` i32[S] tokens of the
    slot. `keys` [S, K, H, C] and `values` [S, K, C, H] are one layer of a cache, which holds the query's own token."""
    past = _cached_logits(_grouped(q, keys.shape[1]), keys, lengths)
    past = jnp.exp(past - past.max(-1, keepdims=True))
    mixed = past.astype(q.dtype), values.astype(q.dtype)
    out = jnp.einsum("skgc,skch->skgh", *mixed, preferred_element_type=jnp.float32)
    return (out / past.sum(-1, keepdims=True)).astype(q.dtype).reshape(q.shape)


def _grouped(q: jax.Array, K: int) -> jax.Array:
    """Returns q [S, N, H] times 1 / √H, as [S, K, N / K, H]."""
    S, N, H = q.shape
    return q.reshape(S, K, N // K, H) * (H**-0.5)


def _cached_logits(
    grouped: jax.Array, keys: jax.Array, lengths: jax.Array, scales: jax.Array | None = None
) -> jax.Array:
    """Returns the logits f32[S, K, G, C] of queries `grouped` [S, K, G, H] and keys [S, K, H, C]; -1e30 at or past
    `lengths` i32[S]. `scales` f32[S, K, 1, C] are the keys' scales; None: the keys have none."""
    logits = jnp.einsum("skgh,skhc->skgc", grouped, keys.astype(grouped.dtype), preferred_element_type=jnp.float32)
    logits = logits if scales is None else logits * scales
    filled = jnp.arange(keys.shape[-1]) < lengths[:, None]
    return jnp.where(filled[:, None, None], logits, _MASKED)
