"""Weights for decoding in eight bits: half of the bytes of bf16, expanded to the weights' dtype where they are used."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

# The dimensions that each matrix of a layer sums over; what is not named stays as it is: norms, biases, the router and
# the embeddings, whose errors would go straight into the logits.
_CONTRACTED = {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2), "gate": (-2,), "up": (-2,), "down": (-2,)}


@flax.struct.dataclass
class Int8:
    """A matrix as values · scale, in the place of an array: the model indexes it as `weight[...]` where it is used.

    Attributes:
      values: i8, of the matrix's shape.
      scale: in the matrix's dtype, one per output channel; of size 1 where the matrix is summed over.
    """

    values: jax.Array
    scale: jax.Array

    def __getitem__(self, index: Any) -> jax.Array:
        return (self.values.astype(self.scale.dtype) * self.scale)[index]


def quantized(params: Any) -> Any:
    """`params` with every matrix of its layers rounded to 255 steps between ± the largest of each output channel."""

    def leaf(path, weight):
        axes = _summed(path, weight)
        if axes is None:
            return weight
        wide = weight.astype(jnp.float32)
        scale = (jnp.maximum(jnp.max(jnp.abs(wide), axes, keepdims=True), 1e-30) / 127).astype(weight.dtype)
        steps = jnp.round(wide / scale.astype(jnp.float32))  # of the scale as it is kept: its rounding is no error
        return Int8(jnp.clip(steps, -127, 127).astype(jnp.int8), scale)

    return jax.tree_util.tree_map_with_path(leaf, params)


def quantized_shardings(shardings: Any, params: Any) -> Any:
    """The shardings of `quantized(params)`, of those of `params`."""

    def leaf(path, weight, sharding: NamedSharding):
        axes = _summed(path, weight)
        if axes is None:
            return sharding
        spec = [*sharding.spec, *[None] * (weight.ndim - len(sharding.spec))]
        for axis in axes:
            spec[axis] = None
        return Int8(sharding, NamedSharding(sharding.mesh, PartitionSpec(*spec)))

    return jax.tree_util.tree_map_with_path(leaf, params, shardings)


def _summed(path: tuple[Any, ...], weight: Any) -> tuple[int, ...] | None:
    """A stacked matrix has its layers in front; a bias of the same prefix has another name."""
    return _CONTRACTED.get(getattr(path[-1], "key", "")) if weight.ndim > 2 else None
