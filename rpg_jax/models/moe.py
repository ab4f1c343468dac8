"""A mixture of SwiGLU experts: every token goes to its k most probable experts, and no token is dropped."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from rpg_jax.models.config import DecoderConfig, Experts
from rpg_jax.models.logical import mesh_axes, partition_spec, platform
from rpg_jax.models.projections import gathered
from rpg_jax.models.weights import Adapted, Declare, Weight, weight_spec


class MoE(nnx.Module):
    """Σ_e p_e · expert_e(x) over the chosen experts; p is the router's f32 softmax, renormalised if configured. Pairs
    (token, expert) are sorted by expert and multiplied group by group (`grouped_product`). So shapes are static, and
    only the chosen experts cost work. On a mesh, each device gathers the tokens of the devices that hold the other
    experts, applies its own experts to them, and scatters the sums back. This is exact at any imbalance."""

    def __init__(self, config: DecoderConfig, experts: Experts, declare: Declare):
        D, E, F = config.embed_dim, experts.count, experts.hidden_dim
        self.k, self.renormalise = experts.per_token, experts.renormalise
        self.router = declare.matrix((D, E), ("embed", "router"), fan_in=D)
        self.gate = declare.matrix((E, D, F), ("experts", "embed", "hidden"), fan_in=D)
        self.up = declare.matrix((E, D, F), ("experts", "embed", "hidden"), fan_in=D)
        self.down = declare.matrix((E, F, D), ("experts", "hidden", "embed"), fan_in=F * 2 * config.num_layers)

    def __call__(self, x: jax.Array, axes, recorded: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns the mixture [B, T, D] of x [B, T, D], in x's dtype, and the chosen experts i32[B, T, k]. `axes` has
        the logical names of B and T. `recorded`, ints [B, T, k], replaces the router's choice of experts."""
        weights, experts = self.route(x, recorded)
        matrices = self.gate[...], self.up[...], self.down[...]
        tokens = partition_spec(*axes, None)
        if tokens is None:
            return _mix(x, weights, experts, *(w.astype(x.dtype) for w in matrices)).astype(x.dtype), experts
        mix = functools.partial(_mix_sharded, token_axes=tuple(jax.tree.leaves(tuple(tokens))))
        wide = [weight_spec(w, ("embed",), ("hidden",), ("experts",)) for w in matrices[:2]]
        narrow = weight_spec(matrices[2], ("hidden",), ("embed",), ("experts",))
        # check_vma=False: the sums are equal along expert and hidden axes, which the type system cannot see.
        specs = (tokens, tokens, tokens, *wide, narrow)
        sharded = jax.shard_map(mix, in_specs=specs, out_specs=tokens, check_vma=False)
        return sharded(x, weights, experts, *matrices).astype(x.dtype), experts

    def route(self, x: jax.Array, recorded: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns mixture weights f32[B, T, k] and expert indices i32[B, T, k] of x [B, T, D]; k experts for each
        token. The weights are the router's softmax over all experts; if configured, the k weights are divided by their
        sum. `recorded`, ints [B, T, k], replaces the choice of experts (rollout routing replay, arXiv:2510.11370). The
        weights of `recorded` experts are also this router's, with its gradient."""
        logits = jnp.einsum("btd,de->bte", x, self.router[...].astype(x.dtype), preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1)
        if recorded is None:
            weights, experts = jax.lax.top_k(probabilities, self.k)
        else:
            experts = recorded.astype(jnp.int32)
            weights = jnp.take_along_axis(probabilities, experts, axis=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, experts


def _mix(x, weights, experts, gate, up, down, first=0) -> jax.Array:
    """Returns the part f32[B, T, D] of the mixture from experts `first` to `first` + E - 1; gate is [E, D, F]."""
    held, k = gate.shape[0], experts.shape[-1]
    local = experts.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < held), local, held)  # pairs of other devices' experts sort to the end
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=held + 1)[:held]
    rows = x.reshape(-1, x.shape[-1])[order // k]
    hidden = jax.nn.silu(grouped_product(rows, gate, sizes)) * grouped_product(rows, up, sizes)
    out = grouped_product(hidden, down, sizes, dtype=jnp.float32)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return jnp.einsum("btkd,btk->btd", out[back].reshape(*experts.shape, -1), weights)


def _mix_sharded(x, weights, experts, gate, up, down, *, token_axes) -> jax.Array:
    """Does `_mix` on the tokens, experts and hidden units of one device, and sums the results of the devices."""
    expert_axes, hidden_axes, embed_axes = (mesh_axes(name) for name in ("experts", "hidden", "embed"))
    gate, up = (gathered(w, embed_axes, 1, x.dtype) for w in (gate, up))
    down = gathered(down, embed_axes, 2, x.dtype)
    shared = tuple(axis for axis in expert_axes if axis in token_axes)
    first = jax.lax.axis_index(expert_axes) * gate.shape[0]
    if shared:
        x, weights, experts = (jax.lax.all_gather(y, shared, axis=0, tiled=True) for y in (x, weights, experts))
    out = _mix(x, weights, experts, gate, up, down, first)
    rest = tuple(axis for axis in (*expert_axes, *hidden_axes) if axis not in shared)
    if shared:
        out = jax.lax.psum_scatter(out, shared, scatter_dimension=0, tiled=True)
    return jax.lax.psum(out, rest) if rest else out


_LANES = 128
_WIDE = 1024  # largest side of a matrix tile


def grouped_product(
    rows: jax.Array, matrices: Weight, sizes: jax.Array, *, dtype=None, megablox: bool | None = None
) -> jax.Array:
    """Returns rows [M, D], sorted by group, times their groups' matrices [E, D, F]: [M, F], zeros past the last group.

    The forward pass and both gradients multiply each row once. TPUs do not use `ragged_dot`, because XLA:TPU computes
    its gradient of the matrices as dense products over all rows, with E times the work.

    Args:
      matrices: an array, or an `Adapted` whose W, A and B are stacked over the groups.
      sizes: i32[E], number of rows of each group.
      dtype: of the result; None for the dtype of `rows`. Sums are f32.
      megablox: use JAX's Pallas kernels for TPU, interpreted elsewhere; else `ragged_dot`. None: True on a TPU.
    """
    megablox = platform() == "tpu" if megablox is None else megablox
    dtype = jnp.dtype(dtype or rows.dtype)
    if isinstance(matrices, Adapted):
        by_group = functools.partial(grouped_product, sizes=sizes, megablox=megablox)
        low = by_group(rows, matrices.a)
        return by_group(rows, matrices.base, dtype=dtype) + by_group(low, matrices.b, dtype=dtype)
    if megablox:
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
    """Returns a tile's rows: 512 or 256 if groups have as many on average, else 128. Last tiles are partly wasted."""
    return next((tile for tile in (512, 256) if rows >= tile * groups), 128)


def _padded(x, tile):
    return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
