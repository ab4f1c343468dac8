"""The weights of a model: their declaration, int8 matrices, and matrices with a low-rank adapter."""

import math
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.models.logical import partition_spec

Names = tuple[str | None, ...]


@flax.struct.dataclass
class Adapted:
    """A frozen matrix W with its adapter A B. `x @ adapted` is x W + (x A) B.

    In this form, neither the sum W + A B nor the gradient of W is ever computed. The model reads every weight as
    `weight[...]`, so an `Adapted` can stand in the place of an array.

    Attributes:
      base: W [*stack, *inputs, *outputs]: an array, or an `Int8`, of which `adapted[...]` makes an array.
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
        """The shape of W, which must be an array."""
        return self.base.shape

    def astype(self, dtype) -> "Adapted":
        """Returns an `Adapted` of W, which must be an array, A and B, all three in `dtype`."""
        return Adapted(self.base.astype(dtype), self.a.astype(dtype), self.b.astype(dtype))

    def merged(self) -> jax.Array:
        """Returns W + A B, summed in float32 and rounded once to the dtype of W."""
        base = self.base[...]
        stack = self.a.ndim + self.b.ndim - 2 - base.ndim
        rank, lead, exact = self.a.shape[-1], base.shape[:stack], jax.lax.Precision.HIGHEST
        wide = jnp.promote_types(base.dtype, jnp.float32)
        a, b = (x.astype(wide).reshape(*lead, *ends) for x, ends in ((self.a, (-1, rank)), (self.b, (rank, -1))))
        product = jnp.matmul(a, b, precision=exact).reshape(base.shape)
        return (base.astype(wide) + product).astype(base.dtype)


def _recomputed(x: jax.Array, b: jax.Array) -> jax.Array:
    """Returns x B, computed with a batch dimension of size one. The remat policy `dots` keeps the products that have no
    batch dimension, which are x W and x A. So the backward pass computes x B again from x A, which costs little. To
    keep x B would need as much memory as x W."""
    return jax.lax.dot_general(x[None], b[None], (((x.ndim,), (1,)), ((0,), (0,))))[0]


Weight = jax.Array | Adapted


def as_matrix(weight: Weight, inputs: int) -> Weight:
    """Returns the weight as a matrix: its first `inputs` dimensions become the rows, and the other dimensions the
    columns. The adapter's A and B become matrices too. The weight has no stacked dimensions."""
    if isinstance(weight, Adapted):
        return Adapted(_flat(weight.base, inputs), _flat(weight.a, inputs), _flat(weight.b, 1))
    return _flat(weight, inputs)


def _flat(x: jax.Array, inputs: int) -> jax.Array:
    return x.reshape(math.prod(x.shape[:inputs]), -1)


def weight_spec(weight: Weight, inputs: Names, outputs: Names, stack: Names = ()) -> Any:
    """Returns the PartitionSpec of a weight [*stack, *inputs, *outputs] from the logical names of its dimensions; for
    an `Adapted` weight an `Adapted` with the specs of W, A and B. The rank is not split. None without rules or mesh."""
    whole = partition_spec(*stack, *inputs, *outputs)
    if not isinstance(weight, Adapted):
        return whole
    return Adapted(whole, partition_spec(*stack, *inputs, None), partition_spec(*stack, None, *outputs))  # type: ignore[arg-type]


# The dimensions that each matrix of a layer sums over. All other weights keep their dtype: norms, biases, the router,
# and the embeddings, whose errors would go straight into the logits.
_CONTRACTED = {"q": (1,), "k": (1,), "v": (1,), "o": (1, 2), "gate": (-2,), "up": (-2,), "down": (-2,)}


@flax.struct.dataclass
class Int8:
    """A matrix as values · scale. The model reads every weight as `weight[...]`, so an `Int8` can replace an array.

    Attributes:
      values: i8, of the matrix's shape.
      scale: a number for each output channel, in the matrix's dtype. Its shape is the matrix's shape, with size 1 along
        the dimensions that a product sums over.
    """

    values: jax.Array
    scale: jax.Array

    def __getitem__(self, index: Any) -> jax.Array:
        return (self.values.astype(self.scale.dtype) * self.scale)[index]


def quantized(params: Any) -> Any:
    """Rounds each stacked matrix q, k, v, o, gate, up and down of the layers to an `Int8`. Returns the params, whose
    other weights stay. In each output channel, 127 stands for the largest absolute value."""

    def leaf(path, weight):
        axes = _summed(path, weight)
        if axes is None:
            return weight
        steps, scale = eight_bits(weight, axes, weight.dtype)
        return Int8(steps.astype(jnp.int8), scale)

    return jax.tree_util.tree_map_with_path(leaf, params)


def eight_bits(x: jax.Array, axes: int | tuple[int, ...], dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Rounds to eight bits along `axes`: returns x / scale as whole numbers from -127 to 127, still f32, and the scale
    max |x| / 127 in `dtype`, with size 1 along `axes`."""
    x = x.astype(jnp.float32)
    scale = (jnp.maximum(jnp.max(jnp.abs(x), axes, keepdims=True), 1e-30) / 127).astype(dtype)
    steps = jnp.round(x / scale.astype(jnp.float32))  # the scale as it is stored: its rounding adds no error
    return jnp.clip(steps, -127, 127), scale


def quantized_shardings(shardings: Any, params: Any) -> Any:
    """Returns the tree of `quantized(params)` with a NamedSharding for each array, from the `shardings` of `params`."""

    def leaf(path, weight, sharding: NamedSharding):
        axes = _summed(path, weight)
        if axes is None:
            return sharding
        spec = [*sharding.spec, *[None] * (weight.ndim - len(sharding.spec))]
        for axis in axes:
            spec[axis] = None
        along = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return Int8(sharding, along)  # type: ignore[arg-type]  # shardings, not arrays

    return jax.tree_util.tree_map_with_path(leaf, params, shardings)


def _summed(path: tuple[Any, ...], weight: Any) -> tuple[int, ...] | None:
    """Returns the dimensions of a stacked matrix [L, ...] that products sum over; None if a weight keeps its dtype."""
    return _CONTRACTED.get(getattr(path[-1], "key", "")) if weight.ndim > 2 else None


_TRUNCATED_STD = 0.87962566103423978  # standard deviation of a standard normal that is truncated to [-2, 2]


class Declare:
    """Creates parameters in `dtype`. Every matrix takes the next key of `keys`. With `stack`, the number of layers of a
    scanned stack, every parameter gets this number of layers as its first dimension, beside the given shape; None: no
    stack. Matrices are drawn from a normal distribution that is truncated at two standard deviations, and are scaled to
    the standard deviation 1/√fan_in: gain 1 at every width. At Qwen's widths, this is about the 0.02 of its configs."""

    def __init__(self, keys: Iterator[jax.Array], dtype, stack: int | None = None):
        self.keys, self.dtype = keys, dtype
        self.lead = ((), ()) if stack is None else ((stack,), ("layers",))

    def matrix(self, shape: tuple[int, ...], axes: tuple[str | None, ...], *, fan_in: float) -> nnx.Param:
        """Draws a matrix of `shape`. `fan_in` is the number of terms that its products sum, or more for smaller
        weights. `axes` names each dimension."""
        shape, axes = self.lead[0] + shape, self.lead[1] + axes
        normal = jax.random.truncated_normal(next(self.keys), -2, 2, shape, self.dtype)
        return nnx.Param(normal * (fan_in**-0.5 / _TRUNCATED_STD), axes=axes)

    def constant(self, value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
        """Makes a parameter of `shape` that is `value` everywhere. `axes` names each dimension."""
        shape, axes = self.lead[0] + shape, self.lead[1] + axes
        return nnx.Param(jnp.full(shape, value, self.dtype), axes=axes)
