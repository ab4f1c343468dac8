"""Causal segment attention by the Pallas TPU splash kernel, on one device or under a mesh."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.models.logical import partition_spec, platform, shards

_LANES = 128
BLOCK = 512  # queries and keys of a block
_UNROLLED = 8  # rows of a device, at most, that are attended one by one; packed rows are long and few
_PADDING = 2**30


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, axes: tuple[str | None, str | None]
) -> jax.Array:
    """Computes causal segment attention by a kernel that holds no scores in memory and skips blocks that are masked.

    It skips blocks above the diagonal. With at most 8 rows on a device it also skips blocks with the queries of one
    completion and the keys of another, where completions share a row. On a mesh each device computes its rows, its
    heads and its stretch of the queries, against all keys of the row. On other platforms than TPUs the kernel is
    interpreted, slowly. Returns [B, T, N, H] in q's dtype; rows of padding hold finite numbers without a meaning.

    Args:
      q, k, v: [B, T, N, H], and [B, T, K, H] where K divides N.
      segment_ids: i32[B, T]; a token attends to the earlier tokens with its id, and to no prompt that segments share.
      axes: logical names of B and T.
    """
    T, H = q.shape[1], q.shape[3]
    length_shards, head_shards = shards(axes[1]), shards("heads")
    block = min(BLOCK, _ceil(-(-T // length_shards), _LANES))
    padded = _ceil(T, block * length_shards)
    q, k, v = (jnp.pad(x, ((0, 0), (0, padded - T), (0, 0), (0, 0))) for x in (q * H**-0.5, k, v))
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padded - T)))

    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes: dict[str, Any] = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((padded, padded), shard_count=length_shards)] * q.shape[2]),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=head_shards,
        q_seq_shards=length_shards,
        interpret=platform() != "tpu",
    )
    rows = partition_spec(axes[0], axes[1])
    if rows is None:
        return _rows(kernel, q, k, v, segment_ids, segment_ids)[:, :T]
    # Each device needs the key-value heads of its queries, so heads are repeated until they divide over the devices.
    k, v = (jnp.repeat(x, head_shards // math.gcd(x.shape[2], head_shards), axis=2) for x in (k, v))
    q_spec = partition_spec(axes[0], axes[1], "heads", None)
    kv_spec = partition_spec(axes[0], None, "heads", None)
    assert q_spec is not None  # there are rules: without them `rows` would be None
    mesh = jax.sharding.get_abstract_mesh()
    kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(q_spec[2], q_spec[1])))
    specs = (kernel_spec, q_spec, kv_spec, kv_spec, rows, partition_spec(axes[0], None))
    # check_vma=False: the kernel's outputs do not declare over which axes they vary.
    sharded = jax.shard_map(_rows, in_specs=specs, out_specs=q_spec, check_vma=False)
    return sharded(kernel, q, k, v, segment_ids, segment_ids)[:, :T]


def _rows(kernel, q, k, v, q_segments, kv_segments) -> jax.Array:
    """Runs the kernel, which takes [N, T, H], on rows [B, T, N, H]."""
    by_head = (x.swapaxes(1, 2) for x in (q, k, v))
    return _attend(kernel, *by_head, q_segments, kv_segments).swapaxes(1, 2)


def _kernel(kernel, q, k, v, q_segments, kv_segments):
    def row(q, k, v, q_segments, kv_segments, skips=False):
        run = _skipping(kernel, q_segments, kv_segments) if skips else kernel
        return run(q, k, v, segment_ids=kernels.SegmentIds(q_segments, kv_segments))

    rows = q, k, v, q_segments, kv_segments
    if kernel.fwd_mask_info.block_mask.shape[-1] == 1 or len(q) > _UNROLLED:
        return jax.vmap(row)(*rows)
    return jnp.stack([row(*one, skips=True) for one in zip(*rows, strict=True)])


def _skipping(kernel, q_segments: jax.Array, kv_segments: jax.Array):
    """Returns the causal kernel that also skips the blocks without a query and a key of one segment, for one row."""
    causal = kernel.fwd_mask_info
    needed = needed_blocks(causal.q_sequence, q_segments, kv_segments, len(kv_segments) // causal.block_mask.shape[-1])
    nq, nk = needed.shape
    # A skipped step fetches the block of the next step that is not skipped: of keys, with the steps row by row. For the
    # gradients of keys and values it is a block of queries, with the steps of one block of keys.
    step = jnp.where(needed, jnp.arange(nq * nk).reshape(nq, nk), nq * nk).ravel()
    after = jax.lax.cummin(step, reverse=True)
    of_keys = (jnp.where(after < nq * nk, after, after[0]) % nk).reshape(nq, nk)
    below = jax.lax.cummin(jnp.where(needed, jnp.arange(nq)[:, None], nq), reverse=True)
    of_queries = jnp.where(below < nq, below, below[0]) % nq
    along_keys, along_queries = (
        causal._replace(data_next=x[None], block_mask=needed[None].astype(jnp.int32)) for x in (of_keys, of_queries)
    )
    return kernels.SplashAttentionKernel(along_keys, along_keys, along_queries, **kernel.kwargs)


def needed_blocks(positions: jax.Array, q_segments: jax.Array, kv_segments: jax.Array, block: int) -> jax.Array:
    """Returns bool[nq, nk]: whether a query of one block may attend to a key of another. Blocks of padding see
    themselves. It compares the least and the largest id of each block, so some blocks without a pair may be True.

    Args:
      positions: i32[Tq], the place of each query in its row, not in its segment.
      q_segments, kv_segments: i32[Tq] and i32[Tk], both a whole number of blocks; 0 is padding.
      block: tokens of a block, of queries and of keys.
    """
    keys = jnp.arange(len(kv_segments))
    q_ids = jnp.where(q_segments > 0, q_segments, _PADDING + positions // block).reshape(-1, block)
    kv_ids = jnp.where(kv_segments > 0, kv_segments, _PADDING + keys // block).reshape(-1, block)
    below = positions.reshape(-1, block).max(1)[:, None] >= keys[::block]
    return below & (q_ids.max(1)[:, None] >= kv_ids.min(1)) & (q_ids.min(1)[:, None] <= kv_ids.max(1))


_attend = jax.custom_vjp(_kernel)


def _attend_forward(kernel, q, k, v, q_segments, kv_segments):
    """Runs forward. The kernel writes each normalizer to all 128 lanes; the barrier makes XLA keep one of them."""
    out, pull = jax.vjp(lambda q, k, v: _kernel(kernel, q, k, v, q_segments, kv_segments), q, k, v)
    return jax.lax.optimization_barrier((out, pull))


def _attend_backward(pull, gradient):
    return None, *pull(gradient), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _ceil(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
