"""The policy's log-probabilities of the completion tokens of rows, without the logits of all positions at once."""

import math
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from rpg_jax import losses
from rpg_jax.models.logical import constrain, mesh_axes, platform, shards
from rpg_jax.types import Rows

# A TPU holds the logits of this many completion tokens at once; a CPU half as many, which is as fast; a GPU four times
# this. With a small vocabulary a device holds more tokens, up to this many logits (16 MB in f32).
_CHUNK, _LOGITS = 256, 1 << 22


def policy_logprobs(
    graphdef: Any, params: Any, rows: Rows, *, temperature: float
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns log-probabilities, in nats, of the completion tokens of `rows` at the sampling temperature.

    Returns:
      logprobs: f32[B, C], differentiable in `params`; entries where `rows.completion_ids` is 0 mean nothing.
      entropy: f32[B, C] of the full next-token distribution, in nats.
      experts: [B, C, L, k], unsigned integers: the k experts of each layer for the position that predicts the token.
        None for a model without experts.
    """
    model = nnx.merge(graphdef, params)
    with model.full_precision():
        hidden, experts = model.routed(rows.tokens, rows.positions, rows.segment_ids, experts=rows.experts)
        if experts is not None:
            experts = jnp.take_along_axis(experts, rows.predictors[..., None, None], axis=1)
        inputs, how = head_arguments(model, _predictors(hidden, rows), rows)
        return *losses.token_logprobs(*inputs, temperature=temperature, entropy=True, **how), experts


def completion_hidden(model: Any, rows: Rows) -> jax.Array:
    """Returns hidden states [B, C, D] of the policy `model` that predict the completion tokens. Where `rows.mask` is 0,
    0 replaces NaN and infinities: a NaN there would reach the gradient of the whole head, as 0 · NaN."""
    return _predictors(model(rows.tokens, rows.positions, rows.segment_ids, experts=rows.experts), rows)


def _predictors(hidden: jax.Array, rows: Rows) -> jax.Array:
    hidden = jnp.take_along_axis(hidden, rows.predictors[..., None], axis=1)
    return jnp.where((rows.mask[..., None] != 0) | jnp.isfinite(hidden), hidden, 0)


def head_arguments(
    model: Any, hidden: jax.Array, rows: Rows
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], dict[str, Any]]:
    """The arguments of `losses.token_logprobs` and `token_divergences`: (`hidden`, the head [V, E], targets [B, C]),
    and the keywords `cut` (mesh axes), `used` (i32[], leading columns; None: all) and `chunk_size` (columns at a time).

    `hidden` [B, C, E] are the states of the policy `model` that predict the completion tokens.

    The head skips the columns after the last completion of the fullest row: shared prompts leave a row fewer completion
    tokens than its length. On TPUs the head takes all columns, so that the compiler knows the cost of its loop.
    """
    head, local_rows, used, tokens = model.head(), rows.targets.shape[0], None, _CHUNK
    if platform() != "tpu":
        used = jnp.sum(jnp.any(rows.completion_ids > 0, axis=0), dtype=jnp.int32)
    tokens = {"cpu": tokens // 2, "gpu": 4 * tokens}.get(platform(), tokens)  # each chunk moves the head's gradient
    if cut := _cut(*rows.targets.shape):
        hidden = constrain(hidden, "batch", None, None)
        local_rows //= math.prod(cut.mesh.shape[axis] for axis in cut.rows)
    chunk = max(1, max(tokens, _LOGITS // head.shape[0]) // local_rows)
    return (hidden, head, rows.targets), {"cut": cut, "used": used, "chunk_size": chunk}


def _cut(rows: int, positions: int) -> losses.Cut | None:
    """Returns the mesh axes of B = `rows`, C = `positions` and the head, by the rules in force; None if nothing is
    sharded. Axes that do not divide `rows` or `positions` do not shard them."""
    mesh = jax.sharding.get_abstract_mesh()

    def axes(name: str, size: int) -> tuple[str, ...]:
        return () if size % shards(name) else mesh_axes(name)

    cut = losses.Cut(mesh, axes("batch", rows), axes("length", positions), axes("vocab", 0), axes("embed", 0))
    if not set(cut.width) <= set(cut.rows):
        cut = cut._replace(width=())
    return cut if any(cut[1:]) else None
