"""Matrix products with sharded weights: each device gathers a weight and multiplies its own tokens only.

The gradient of a weight is summed over a device's tokens first, and over devices once, in the dtype of the weight.
By itself, XLA's partitioner passes the shards around the devices (a "windowed einsum"). That makes many small products,
and copies of the activations between them.
"""

import functools

import jax
import jax.numpy as jnp

from rpg_jax.models.adapted import Adapted, Names, Weight, as_matrix, weight_spec
from rpg_jax.models.logical import mesh_axes, partition_spec


def project(x: jax.Array, weight: Weight, axes: Names, inputs: Names, outputs: Names) -> jax.Array:
    """x [B, T, *inputs] times weight [*inputs, *outputs], in x's dtype: [B, T, *outputs].

    Args:
      axes: logical names of B and T.
      inputs, outputs: logical names of the weight's dimensions; one of them may be "embed".
    """
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
    """All-gathers a weight in `dtype`, inside a `shard_map`; its shards lie along `dimension` over mesh `axes`.

    Its gradient is reduce-scattered over the same axes, in the weight's own dtype. The weight is a matrix, or a stack
    of matrices. Of an adapter, the side that has the dimension is gathered.
    """
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
    """x times the weight, gathered as a matrix. If it were gathered in its own shape, XLA:TPU would keep a second copy
    of the stack of all layers in another layout. A matrix made of heads is made again in the backward pass."""
    matrix = gathered(as_matrix(weight, inputs), gather, dimension, x.dtype)
    multiply = jax.checkpoint(_multiply) if gather and inputs > 1 else _multiply
    y = multiply(x, matrix).reshape(*x.shape[:2], -1, *weight.shape[inputs + 1 :])
    return jax.lax.psum(y, contracted) if contracted else y


def _multiply(x, matrix):
    """x @ matrix with rows and positions as one dimension. With two, XLA:CPU transposes both operands of every weight
    gradient in memory, which takes half of the time of a backward pass."""
    return x.reshape(-1, matrix.shape[0]) @ matrix


def _of_activation(name: str | None) -> str | None:
    """The name that a parameter's dimension has in activations, where the model dimension is whole."""
    return None if name == "embed" else name
