"""The SwiGLU feed-forward layer on long rows and on a mesh."""

import functools

import jax
import jax.numpy as jnp

from rpg_jax.models.adapted import Weight, weight_spec
from rpg_jax.models.logical import mesh_axes, partition_spec
from rpg_jax.models.project import gathered

_STRETCH = 2560  # most positions of a row that are multiplied together


def swiglu(x: jax.Array, gate: Weight, up: Weight, down: Weight, axes: tuple[str | None, str | None]) -> jax.Array:
    """down(silu(gate(x)) · up(x)) of x [B, T, D], in x's dtype; `axes` names B and T.

    Long rows pass in n stretches, which the backward pass computes again, so that hidden units take [B, T / n, F]. On a
    mesh each device gathers its weights once. It adds up their gradient over all stretches, and then once over the
    devices, in the dtype of the weights. By itself, XLA's partitioner sums every stretch over the network.

    Args:
      gate, up: [D, F]. down: [F, D].
    """
    tokens = partition_spec(*axes, None)
    if tokens is None or jax.sharding.get_abstract_mesh().size == 1:
        return _in_stretches(x, *(w.astype(x.dtype) for w in (gate, up, down)))
    local = functools.partial(_local, embed=mesh_axes("embed"), hidden=mesh_axes("hidden"))
    wide, narrow = (
        [weight_spec(w, ("embed",), ("hidden",)) for w in (gate, up)],
        weight_spec(down, ("hidden",), ("embed",)),
    )
    # check_vma=False: gathered weights are equal on all devices, which the type system cannot see.
    specs = (tokens, *wide, narrow)
    return jax.shard_map(local, in_specs=specs, out_specs=tokens, check_vma=False)(x, gate, up, down)


def _local(x, gate, up, down, *, embed, hidden):
    gate, up = (gathered(w, embed, 0, x.dtype) for w in (gate, up))
    out = _in_stretches(x, gate, up, gathered(down, embed, 1, x.dtype))
    return jax.lax.psum(out, hidden) if hidden else out


def _in_stretches(x, gate, up, down):
    def apply(x):
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down

    B, T, D = x.shape
    stretches = _stretches(T)
    if stretches == 1:
        return apply(x.reshape(B * T, D)).reshape(B, T, D)
    parts = jnp.moveaxis(x.reshape(B, stretches, T // stretches, D), 1, 0).reshape(stretches, -1, D)
    out = jax.lax.map(jax.checkpoint(apply), parts)
    return jnp.moveaxis(out.reshape(stretches, B, T // stretches, D), 0, 1).reshape(B, T, D)


def _stretches(length: int) -> int:
    """The number of equal stretches of at most `_STRETCH` positions in a row; 1 if the length does not divide so."""
    fewest = -(-length // _STRETCH)
    return next((n for n in range(fewest, 4 * fewest) if length % n == 0), 1)
