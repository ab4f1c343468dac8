"""Products with sharded weights: projections, the SwiGLU layer, and the lookup of embeddings.

Each device gathers a weight and multiplies its own tokens only. The gradient of a weight is summed over a device's
tokens first, and over devices once, in the dtype of the weight. By itself, XLA's partitioner passes the shards around
the devices (a "windowed einsum"). That makes many small products, and copies of the activations between them.
"""

import functools

import jax
import jax.numpy as jnp

from rpg_jax.models.logical import in_own_shard, mesh_axes, partition_spec
from rpg_jax.models.weights import Adapted, Names, Weight, as_matrix, weight_spec


def project(x: jax.Array, weight: Weight, axes: Names, inputs: Names, outputs: Names) -> jax.Array:
    """Returns x [B, T, *inputs] times weight [*inputs, *outputs], in x's dtype: [B, T, *outputs]. `axes`, `inputs` and
    `outputs` are logical names: of B and T, and of the weight's dimensions, of which one may be "embed"."""
    where = partition_spec(*axes, *map(_of_activation, inputs))
    if where is None or jax.sharding.get_abstract_mesh().size == 1:
        return _product(x, weight, inputs=len(inputs))
    local = functools.partial(
        _product,
        inputs=len(inputs),
        gather=mesh_axes("embed"),
        dimension=0 if "embed" in inputs else 1,
        contracted=tuple(axis for name in inputs for axis in mesh_axes(_of_activation(name))),
    )
    # check_vma=False: gathered weights are equal on all devices, which the type system cannot see.
    specs = (where, weight_spec(weight, inputs, outputs))
    out = partition_spec(*axes, *map(_of_activation, outputs))
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(x, weight)


def gathered(weight: Weight, axes: tuple[str, ...], dimension: int, dtype) -> Weight:
    """All-gathers a weight in `dtype`, inside a `shard_map`; its shards lie along `dimension` over mesh `axes`. Without
    axes it is only cast. The gradient is reduce-scattered over the same axes, in the weight's own dtype. The weight is
    a matrix or a stack of matrices. Only the side A or B of an adapter that has the dimension is gathered."""
    if not isinstance(weight, Adapted):
        return _gathered(weight, axes, dimension, dtype)
    of_a, of_b = (axes, ()) if dimension == len(weight.shape) - 2 else ((), axes)
    a, b = _gathered(weight.a, of_a, dimension, dtype), _gathered(weight.b, of_b, dimension, dtype)
    return Adapted(_gathered(weight.base, axes, dimension, dtype), a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(weight: jax.Array, axes: tuple[str, ...], dimension: int, dtype) -> jax.Array:
    weight = weight.astype(dtype)
    return jax.lax.all_gather(weight, axes, axis=dimension, tiled=True) if axes else weight


def _gathered_forward(weight, axes, dimension, dtype):
    return _gathered(weight, axes, dimension, dtype), jnp.zeros((), weight.dtype)


def _gathered_backward(axes, dimension, dtype, own, gradient):
    gradient = gradient.astype(own.dtype)
    return (jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True) if axes else gradient,)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _product(x, weight, *, inputs, gather=(), dimension=0, contracted=()):
    """Returns x times the weight, which is gathered as a matrix. If the weight were gathered in its own shape, XLA:TPU
    would keep a second copy of all layers in another layout. Where a gathered weight has several input dimensions
    (heads), the backward pass makes x as a matrix again."""
    matrix = gathered(as_matrix(weight, inputs), gather, dimension, x.dtype)
    multiply = jax.checkpoint(_multiply) if gather and inputs > 1 else _multiply
    y = multiply(x, matrix).reshape(*x.shape[:2], -1, *weight.shape[inputs + 1 :])
    return jax.lax.psum(y, contracted) if contracted else y


def _multiply(x, matrix):
    """Returns x @ matrix with rows and positions as one dimension. With two, XLA:CPU transposes both operands of every
    weight gradient in memory, which takes half of the time of a backward pass."""
    return x.reshape(-1, matrix.shape[0]) @ matrix


def _of_activation(name: str | None) -> str | None:
    """Returns the name that a parameter's dimension has in activations, where the model dimension is whole."""
    return None if name == "embed" else name


_STRETCH = 2560  # most positions of a row that are multiplied together


def swiglu(x: jax.Array, gate: Weight, up: Weight, down: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
    """Returns down(silu(gate(x)) · up(x)) of x [B, T, D], in x's dtype. `gate` and `up` are [D, F], `down` is [F, D],
    and `axes` are the logical names of B and T.

    Rows of more than 2,560 tokens pass in n stretches, if a small n divides T. The backward pass computes them again,
    so hidden units take [B, T / n, F]. On a mesh each device gathers its weights once. The weights' gradient is added
    up over all stretches, and then once over the devices, in their dtype. XLA by itself sums each over the network.
    """
    tokens = partition_spec(*axes, None)
    if tokens is None or jax.sharding.get_abstract_mesh().size == 1:
        return _in_stretches(x, *(w.astype(x.dtype) for w in (gate, up, down)))
    local = functools.partial(_swiglu_shard, embed=mesh_axes("embed"), hidden=mesh_axes("hidden"))
    wide = [weight_spec(w, ("embed",), ("hidden",)) for w in (gate, up)]
    narrow = weight_spec(down, ("hidden",), ("embed",))
    # check_vma=False: gathered weights are equal on all devices, which the type system cannot see.
    specs = (tokens, *wide, narrow)
    return jax.shard_map(local, in_specs=specs, out_specs=tokens, check_vma=False)(x, gate, up, down)


def _swiglu_shard(x, gate, up, down, *, embed, hidden):
    gate, up = (gathered(w, embed, 0, x.dtype) for w in (gate, up))
    out = _in_stretches(x, gate, up, gathered(down, embed, 1, x.dtype))
    return jax.lax.psum(out, hidden) if hidden else out


def _in_stretches(x, gate, up, down):
    def apply(x):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    B, T, D = x.shape
    fewest = -(-T // _STRETCH)
    stretches = next((n for n in range(fewest, 4 * fewest) if T % n == 0), 1)  # 1 if the length does not divide so
    if stretches == 1:
        return apply(x.reshape(B * T, D)).reshape(B, T, D)
    parts = jnp.moveaxis(x.reshape(B, stretches, T // stretches, D), 1, 0).reshape(stretches, -1, D)
    out = jax.lax.map(jax.checkpoint(apply), parts)
    return jnp.moveaxis(out.reshape(stretches, B, T // stretches, D), 0, 1).reshape(B, T, D)


def lookup(table: jax.Array, tokens: jax.Array, axes: tuple[str | None, str | None], dtype) -> jax.Array:
    """Returns table[tokens] in `dtype`, [B, T, D], of table [V, D] and tokens i32[B, T]; `axes` are the logical names
    of B and T. With FSDP, rows of the batch and columns of the table share mesh axes. Each device then looks up its
    columns for the rows of all devices along these axes, and an all-to-all exchanges the results. Positions of a row
    may share the axes, too. By itself, XLA's partitioner gathers the whole table."""
    where = partition_spec(*axes)
    if where is None:
        return table[tokens].astype(dtype)
    cut = {axis: dimension for dimension, name in enumerate(axes) for axis in mesh_axes(name)}
    local = functools.partial(_lookup_shard, dtype=dtype, vocab=mesh_axes("vocab"), columns=mesh_axes("embed"), cut=cut)
    # check_vma=False: gathered columns are equal on all devices, which the type system cannot see.
    specs = (partition_spec("vocab", "embed"), where)
    return jax.shard_map(local, in_specs=specs, out_specs=partition_spec(*axes, None), check_vma=False)(table, tokens)


def _lookup_shard(table: jax.Array, tokens: jax.Array, *, dtype, vocab, columns, cut) -> jax.Array:
    """Does `lookup` on one device. `cut` has the dimension of `tokens` that each mesh axis cuts."""
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
