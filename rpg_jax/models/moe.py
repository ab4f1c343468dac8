"""A mixture of SwiGLU experts: every token goes to its k most probable experts, and no token is dropped."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from rpg_jax.models.adapted import weight_spec
from rpg_jax.models.config import DecoderConfig, Experts
from rpg_jax.models.declare import Declare
from rpg_jax.models.grouped import grouped_product
from rpg_jax.models.logical import mesh_axes, partition_spec
from rpg_jax.models.project import gathered


class MoE(nnx.Module):
    """Σ_e p_e · expert_e(x) over the chosen experts; p is the router's f32 softmax, renormalised if configured.

    Pairs (token, expert) are sorted by expert and multiplied group by group (`grouped_product`). So shapes are static,
    and only the chosen experts cost work. On a mesh, each device gathers the tokens of the devices that hold the other
    experts, applies its own experts to them, and scatters the sums back. This is exact at any imbalance.
    """

    def __init__(self, config: DecoderConfig, experts: Experts, declare: Declare):
        D, E, F = config.embed_dim, experts.count, experts.hidden_dim
        self.k, self.renormalise = experts.per_token, experts.renormalise
        self.router = declare.matrix((D, E), ("embed", "router"), fan_in=D)
        self.gate = declare.matrix((E, D, F), ("experts", "embed", "hidden"), fan_in=D)
        self.up = declare.matrix((E, D, F), ("experts", "embed", "hidden"), fan_in=D)
        self.down = declare.matrix((E, F, D), ("experts", "hidden", "embed"), fan_in=F * 2 * config.num_layers)

    def __call__(self, x: jax.Array, axes) -> tuple[jax.Array, jax.Array]:
        """The mixture [B, T, D] of x [B, T, D], and the experts that mix it, i32[B, T, k]; `axes` names B and T."""
        weights, experts = self.route(x)
        matrices = self.gate[...], self.up[...], self.down[...]
        tokens = partition_spec(*axes, None)
        if tokens is None:
            return _mix(x, weights, experts, *(w.astype(x.dtype) for w in matrices)).astype(x.dtype), experts
        mix = functools.partial(
            _mix_sharded,
            expert_axes=mesh_axes("experts"),
            hidden_axes=mesh_axes("hidden"),
            token_axes=tuple(jax.tree.leaves(tuple(tokens))),
            embed_axes=mesh_axes("embed"),
        )
        wide = [weight_spec(w, ("embed",), ("hidden",), ("experts",)) for w in matrices[:2]]
        narrow = weight_spec(matrices[2], ("hidden",), ("embed",), ("experts",))
        # check_vma=False: the sums are equal along expert and hidden axes, which the type system cannot see.
        specs = (tokens, tokens, tokens, *wide, narrow)
        sharded = jax.shard_map(mix, in_specs=specs, out_specs=tokens, check_vma=False)
        return sharded(x, weights, experts, *matrices).astype(x.dtype), experts

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mixture weights f32[B, T, k] and expert indices i32[B, T, k] of x [B, T, D]."""
        logits = jnp.einsum("btd,de->bte", x, self.router[...].astype(x.dtype), preferred_element_type=jnp.float32)
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.k)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, experts


def _mix(x, weights, experts, gate, up, down, first=0) -> jax.Array:
    """The part f32[B, T, D] of the mixture from experts `first` to `first` + E - 1; gate is [E, D, F]."""
    held, k = gate.shape[0], experts.shape[-1]
    local = experts.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < held), local, held)  # pairs of experts that others hold sort to the end
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=held + 1)[:held]
    rows = x.reshape(-1, x.shape[-1])[order // k]
    hidden = jax.nn.silu(grouped_product(rows, gate, sizes)) * grouped_product(rows, up, sizes)
    out = grouped_product(hidden, down, sizes, dtype=jnp.float32)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return jnp.einsum("btkd,btk->btd", out[back].reshape(*experts.shape, -1), weights)


def _mix_sharded(x, weights, experts, gate, up, down, *, expert_axes, hidden_axes, token_axes, embed_axes) -> jax.Array:
    """`_mix` on the tokens, experts and hidden units of one device, summed over the devices."""
    gate, up = (gathered(w, embed_axes, 1, x.dtype) for w in (gate, up))
    down = gathered(down, embed_axes, 2, x.dtype)
    shared = tuple(axis for axis in expert_axes if axis in token_axes)
    first: jax.Array | int = 0
    for axis in expert_axes:
        first = first * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    first = first * gate.shape[0]
    if shared:
        x, weights, experts = (jax.lax.all_gather(y, shared, axis=0, tiled=True) for y in (x, weights, experts))
    out = _mix(x, weights, experts, gate, up, down, first)
    rest = tuple(axis for axis in (*expert_axes, *hidden_axes) if axis not in shared)
    if shared:
        out = jax.lax.psum_scatter(out, shared, scatter_dimension=0, tiled=True)
    return jax.lax.psum(out, rest) if rest else out
