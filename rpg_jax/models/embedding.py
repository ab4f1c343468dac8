"""Embedding lookup in a table that is sharded along both dimensions, without gathering the table."""

import functools

import jax
import jax.numpy as jnp

from rpg_jax.models.logical import in_own_shard, mesh_axes, partition_spec


def lookup(table: jax.Array, tokens: jax.Array, axes: tuple[str | None, str | None], dtype) -> jax.Array:
    """table[tokens] in `dtype`, [B, T, D], of table [V, D] and tokens i32[B, T]; `axes` names B and T.

    With FSDP, rows of the batch and columns of the table share mesh axes. Each device then looks up its columns for the
    rows of all devices along these axes, and an all-to-all exchanges the results. Positions of a row may share them,
    too. By itself, XLA's partitioner gathers the whole table.
    """
    where = partition_spec(*axes)
    if where is None:
        return table[tokens].astype(dtype)
    cut = {axis: dimension for dimension, name in enumerate(axes) for axis in mesh_axes(name)}
    local = functools.partial(_local, dtype=dtype, vocab=mesh_axes("vocab"), columns=mesh_axes("embed"), cut=cut)
    # check_vma=False: gathered columns are equal on all devices, which the type system cannot see.
    specs = (partition_spec("vocab", "embed"), where)
    return jax.shard_map(local, in_specs=specs, out_specs=partition_spec(*axes, None), check_vma=False)(table, tokens)


def _local(table: jax.Array, tokens: jax.Array, *, dtype, vocab, columns, cut) -> jax.Array:
    """`cut` has the dimension of `tokens` that each mesh axis cuts."""
    for axis in columns:
        if axis in cut:
            tokens = jax.lax.all_gather(tokens, axis, axis=cut[axis], tiled=True)
    entry, held = in_own_shard(tokens, "vocab", table.shape[0])
    x = jnp.where(held[..., None], table[entry], 0).astype(dtype)
    if vocab:
        x = jax.lax.psum(x, vocab)
    for axis in reversed(columns):  # neighbouring columns differ in the last axis, so it is joined first
        if axis in cut:
            x = jax.lax.all_to_all(x, axis, split_axis=cut[axis], concat_axis=2, tiled=True)
        else:
            x = jax.lax.all_gather(x, axis, axis=2, tiled=True)
    return x
