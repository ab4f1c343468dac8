"""A frozen matrix and its low-rank adapter, which layers multiply by as if they were one matrix."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rpg_jax.models.logical import partition_spec

Names = tuple[str | None, ...]


@flax.struct.dataclass
class Adapted:
    """W + A B. `x @ adapted` is x W + (x A) B, so that neither the sum nor the gradient of W is ever computed.

    The model reads it like an array, because it reads every weight as `weight[...]`.

    Attributes:
      base: W [*stack, *inputs, *outputs]: an array or an `Int8`.
      a: A [*stack, *inputs, r].
      b: B [*stack, r, *outputs], which has the factor alpha / rank.
    """

    base: Any
    a: jax.Array
    b: jax.Array

    def __getitem__(self, index: Any) -> "Adapted":
        if index is not ...:
            raise ValueError(f"an adapted matrix is read whole, as weight[...], not at {index}")
        return Adapted(self.base[...], self.a, self.b)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.base + _recomputed(x @ self.a, self.b)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def astype(self, dtype) -> "Adapted":
        return Adapted(self.base.astype(dtype), self.a.astype(dtype), self.b.astype(dtype))

    def merged(self, dtype=None) -> jax.Array:
        """W + A B, summed in float32 and rounded once to `dtype`; by default W's."""
        base = self.base[...]
        stack = self.a.ndim + self.b.ndim - 2 - base.ndim
        rank, lead, exact = self.a.shape[-1], base.shape[:stack], jax.lax.Precision.HIGHEST
        wide = jnp.promote_types(base.dtype, jnp.float32)
        a, b = (x.astype(wide).reshape(*lead, *ends) for x, ends in ((self.a, (-1, rank)), (self.b, (rank, -1))))
        product = jnp.matmul(a, b, precision=exact).reshape(base.shape)
        return (base.astype(wide) + product).astype(dtype or base.dtype)


def _recomputed(x: jax.Array, b: jax.Array) -> jax.Array:
    """x B as a product with a batch of one, which `model.remat=dots` does not keep.

    It keeps x W, as wide as x B, and x A. From these, x B costs little, and the backward pass needs only the sum.
    """
    return jax.lax.dot_general(x[None], b[None], (((x.ndim,), (1,)), ((0,), (0,))))[0]


Weight = jax.Array | Adapted


def as_matrix(weight: Weight, inputs: int) -> Weight:
    """The weight with its first `inputs` dimensions as one, and the others as one."""
    if isinstance(weight, Adapted):
        return Adapted(_flat(weight.base, inputs), _flat(weight.a, inputs), _flat(weight.b, 1))
    return _flat(weight, inputs)


def _flat(x: jax.Array, inputs: int) -> jax.Array:
    return x.reshape(math.prod(x.shape[:inputs]), -1)


def weight_spec(weight: Weight, inputs: Names, outputs: Names, stack: Names = ()) -> Any:
    """The PartitionSpec of each array of a weight, by the logical names of its dimensions; ranks are not split."""
    whole = partition_spec(*stack, *inputs, *outputs)
    if not isinstance(weight, Adapted):
        return whole
    return Adapted(whole, partition_spec(*stack, *inputs, None), partition_spec(*stack, None, *outputs))  # type: ignore[arg-type]
