"""The matrix product of a mixture of experts: each row times the matrix of its group."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from rpg_jax.models.adapted import Adapted, Weight
from rpg_jax.models.logical import platform

IMPLEMENTATIONS = ("auto", "xla", "megablox")

_LANES = 128
_WIDE = 1024  # largest side of a matrix tile


def grouped_product(
    rows: jax.Array, matrices: Weight, sizes: jax.Array, *, dtype=None, implementation: str = "auto"
) -> jax.Array:
    """Rows [M, D], sorted by group, times the matrices [E, D, F] of their groups: [M, F], zeros past the last group.

    The forward pass and both gradients multiply each row once. TPUs do not use `ragged_dot`, because XLA:TPU computes
    its gradient of the matrices as dense products over all rows, with E times the work.

    Args:
      sizes: i32[E], number of rows of each group.
      dtype: of the result; None for the dtype of `rows`. Sums are f32.
      implementation: "xla" is `ragged_dot`; "megablox" is JAX's Pallas kernels for TPU, interpreted elsewhere; "auto"
        is "megablox" on a TPU, else "xla".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = "megablox" if platform() == "tpu" else "xla"
    dtype = jnp.dtype(dtype or rows.dtype)
    if isinstance(matrices, Adapted):
        by_group = functools.partial(grouped_product, sizes=sizes, implementation=implementation)
        return by_group(rows, matrices.base, dtype=dtype) + by_group(
            by_group(rows, matrices.a), matrices.b, dtype=dtype
        )
    if implementation == "megablox":
        return _product(rows, matrices, sizes.astype(jnp.int32), dtype)
    return _zero_past(jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=dtype), sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows, matrices, sizes, dtype):
    return _multiplied(rows, matrices, sizes, dtype, transposed=False)


def _forward(rows, matrices, sizes, dtype):
    return _product(rows, matrices, sizes, dtype), (rows, matrices, sizes)


def _backward(dtype, residuals, gradient):
    rows, matrices, sizes = residuals
    gradient = gradient.astype(rows.dtype)
    g_rows = _multiplied(gradient, matrices, sizes, rows.dtype, transposed=True)
    (height, D), F = rows.shape, gradient.shape[1]
    tile = _height(height, len(sizes))
    rows, gradient = _padded(rows, tile), _padded(gradient, tile)
    tiles = tile, min(D, _WIDE), min(F, _WIDE)
    interpret = platform() != "tpu"
    g_matrices = tgmm(rows.swapaxes(0, 1), gradient, sizes, matrices.dtype, tiles, interpret=interpret)
    return g_rows, g_matrices, None


_product.defvjp(_forward, _backward)


def _multiplied(rows, matrices, sizes, dtype, *, transposed):
    tile = _height(len(rows), len(sizes))
    if matrices.shape[2] % _LANES and not matrices.shape[1] % _LANES:  # XLA:TPU stores them so, to avoid padding
        matrices, transposed = matrices.swapaxes(1, 2), not transposed
    wide, narrow = matrices.shape[1:][:: -1 if transposed else 1]
    out = gmm(
        _padded(rows, tile),
        matrices,
        sizes,
        dtype,
        (tile, min(wide, _WIDE), min(narrow, _WIDE)),
        transpose_rhs=transposed,
        interpret=platform() != "tpu",
    )
    return _zero_past(out[: len(rows)], sizes)


def _zero_past(x, sizes):
    """`x` with zeros past the last group; there the kernels may leave any number, and NaN."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, 0)


def _height(rows: int, groups: int) -> int:
    """Rows of a tile: at most the average size of a group, because a group's last tile is partly wasted."""
    return next((tile for tile in (512, 256) if rows >= tile * groups), 128)


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
