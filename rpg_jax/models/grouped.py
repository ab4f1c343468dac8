"""Rows times the matrix of their group: what a mixture of experts multiplies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from rpg_jax.models.logical import platform

IMPLEMENTATIONS = ("auto", "xla", "megablox")

_LANES = 128
_WIDE = 1024  # tile of a matrix, at most


def grouped_product(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, dtype=None, implementation: str = "auto"
) -> jax.Array:
    """[M, F]: rows [M, D], sorted by group, times their groups' matrices [E, D, F]; zeros past the last group.

    Its work, and that of both gradients, is that of the rows. XLA:TPU computes the gradient of the matrices from
    `ragged_dot` as dense products over all rows, E times too much.

    Args:
      sizes: i32[E], rows of each group.
      dtype: of the result; by default that of `rows`. Sums are f32.
      implementation: "xla": `ragged_dot`; "megablox": JAX's Pallas kernels for TPU, interpreted elsewhere; "auto".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    if implementation == "auto":
        implementation = "megablox" if platform() == "tpu" else "xla"
    dtype = jnp.dtype(dtype or rows.dtype)
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
    if matrices.shape[2] % _LANES and not matrices.shape[1] % _LANES:  # so XLA:TPU stores them, to pad nothing
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
    """Rows past the groups are unspecified, and could be NaN."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, 0)


def _height(rows: int, groups: int) -> int:
    """Rows of a tile: no more than a group has on average, which its last tile would waste."""
    return next((tile for tile in (512, 256) if rows >= tile * groups), 128)


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
