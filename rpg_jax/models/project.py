"""Matrix products with sharded weights: each device gathers a weight, multiplies its own tokens, and no one else's.

The gradient of a weight is added up over a device's tokens first and exchanged once, in the dtype of the weight. Left
to itself the partitioner would walk the shards around the devices instead (a "windowed einsum"): many small products,
and copies of the activations between them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from rpg_jax.models.logical import partition_spec, wide_axes

Names = tuple[str | None, ...]


def project(x: jax.Array, weight: jax.Array, axes: Names, inputs: Names, outputs: Names) -> jax.Array:
    """x [B, T, *inputs] times weight [*inputs, *outputs], in x's dtype: [B, T, *outputs].

    Args:
      axes: logical names of B and T.
      inputs, outputs: logical names of the weight's dimensions; one of them may be "embed".
    """
    where = partition_spec(*axes, *map(_activation, inputs))
    if where is None or jax.sharding.get_abstract_mesh().size == 1:
        return _product(x, weight, inputs=len(inputs))
    local = functools.partial(
        _product,
        inputs=len(inputs),
        gather=wide_axes("embed"),
        dimension=0 if "embed" in inputs else 1,
        contracted=tuple(axis for name in inputs if name != "embed" for axis in wide_axes(name)),
    )
    # check_vma: gathered weights are equal on all devices, which the type system cannot see.
    specs = (where, partition_spec(*inputs, *outputs))
    out = partition_spec(*axes, *map(_activation, outputs))
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(weight: jax.Array, axes: tuple[str, ...], dimension: int, dtype) -> jax.Array:
    """Inside `shard_map`: the whole of a weight in `dtype`, of shards along `dimension` over mesh `axes`.

    Its gradient is summed over those axes, and scattered, in the weight's own dtype.
    """
    weight = weight.astype(dtype)
    return jax.lax.all_gather(weight, axes, axis=dimension, tiled=True) if axes else weight


def _gathered_forward(weight, axes, dimension, dtype):
    return gathered(weight, axes, dimension, dtype), jnp.zeros((), weight.dtype)


def _gathered_backward(axes, dimension, dtype, own, gradient):
    gradient = gradient.astype(own.dtype)
    return (jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True) if axes else gradient,)


gathered.defvjp(_gathered_forward, _gathered_backward)


def _product(x, weight, *, inputs, gather=(), dimension=0, contracted=()):
    """Gathers the weight as the matrix that it is multiplied as: gathered in its own shape, XLA:TPU would keep the
    stack of all layers a second time, laid out for that. A matrix made of heads is made again in the backward pass."""
    matrix = gathered(weight.reshape(math.prod(weight.shape[:inputs]), -1), gather, dimension, x.dtype)
    multiply = jax.checkpoint(_multiply) if gather and inputs > 1 else _multiply
    y = multiply(x, matrix).reshape(*x.shape[:2], -1, *weight.shape[inputs + 1 :])
    return jax.lax.psum(y, contracted) if contracted else y


def _multiply(x, matrix):
    """Rows and positions multiplied as one dimension: with two, XLA:CPU transposes both operands of every weight
    gradient in memory, half of the time of a backward pass."""
    return x.reshape(-1, matrix.shape[0]) @ matrix


def _activation(name: str | None) -> str | None:
    """The activation axis that a parameter axis produces or consumes."""
    return {"heads": "act_heads", "kv_heads": "act_kv_heads", "embed": "act_embed"}.get(name or "")
