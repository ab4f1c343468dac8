"""How parameters come to be: every weight declares shape, logical axes and initial scale together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

_TRUNCATED_STD = 0.87962566103423978  # of a standard normal truncated to [-2, 2]


class Declare:
    """Creates parameters of one dtype, with `stack` in front of every shape (the layers of a scanned stack).

    Matrices are drawn from a normal truncated at two standard deviations, of standard deviation 1/√fan_in: the 0.02
    of Qwen's own config at its widths, and unit gain at any other.
    """

    def __init__(self, rngs: nnx.Rngs, dtype, stack: int | None = None):
        self.rngs, self.dtype = rngs, dtype
        self.lead = ((), ()) if stack is None else ((stack,), ("layers",))

    def matrix(self, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: float) -> nnx.Param:
        shape, axes = self.lead[0] + shape, self.lead[1] + axes
        normal = jax.random.truncated_normal(self.rngs.params(), -2, 2, shape, self.dtype)
        return nnx.Param(normal * (fan_in**-0.5 / _TRUNCATED_STD), axes=axes)

    def constant(self, value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
        shape, axes = self.lead[0] + shape, self.lead[1] + axes
        return nnx.Param(jnp.full(shape, value, self.dtype), axes=axes)
