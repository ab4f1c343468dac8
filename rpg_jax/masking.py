"""Masked reductions over tokens: sums, means and scans over each completion or over the batch.

A mask is any array that is nonzero where a token counts. Values where the mask is zero are replaced before they are
used. So a NaN or an infinity there reaches no result and no gradient.
"""

import jax
import jax.numpy as jnp


def masked_fill(x: jax.Array, mask: jax.Array, value: float = 0.0) -> jax.Array:
    """x [...] where `mask` [...] is nonzero, `value` elsewhere, in x's dtype; no gradient reaches a replaced entry."""
    return jnp.where(mask != 0, x, jnp.asarray(value, x.dtype))


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ x over the entries of x [...] where `mask` [...] is nonzero, a scalar."""
    return jnp.sum(masked_fill(x, mask))


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """The largest x where `mask` is nonzero, a scalar, for x >= 0; 0 if the mask is zero everywhere."""
    return jnp.max(masked_fill(x, mask), initial=0)


def completion_sum(x: jax.Array, mask: jax.Array, completion_ids: jax.Array | None = None) -> jax.Array:
    """The sum over each token's own completion: y[b, t] = Σ_u x[b, u] · [mask[b, u] ≠ 0] · [id(b, u) = id(b, t)].

    Args:
      x: f[B, T].
      mask: [B, T], nonzero where a token counts.
      completion_ids: i32[B, T] in 0 … T, the number of the token's completion in the row; None is one completion a row.

    Returns:
      f[B, T], constant over the tokens of a completion.
    """
    x = masked_fill(x, mask)
    if completion_ids is None:
        return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), x.shape)
    segments = x.shape[1] + 1
    return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, segments)[ids])(x, completion_ids)


def completion_mean(x: jax.Array, mask: jax.Array, completion_ids: jax.Array | None = None) -> jax.Array:
    """The mean of x over the tokens of each token's own completion where `mask` is nonzero; 0 if there are none. x and
    the result are f[B, T], mask [B, T]. `completion_ids` i32[B, T] in 0 … T has the number of the token's completion in
    the row; None is one completion a row."""
    lengths = completion_sum(jnp.ones_like(x), mask, completion_ids)
    return completion_sum(x, mask, completion_ids) / jnp.maximum(lengths, 1)


def completion_count(mask: jax.Array, completion_ids: jax.Array | None = None) -> jax.Array:
    """The number of completions with a token whose `mask` [B, T] is nonzero, i32[]; an empty row has none.
    `completion_ids` i32[B, T] in 0 … T is the token's completion in the row; None: one completion a row."""
    present = mask != 0
    if completion_ids is None:
        return jnp.sum(jnp.any(present, axis=1), dtype=jnp.int32)
    count = mask.shape[1] + 1
    tokens = jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, count))(present.astype(jnp.int32), completion_ids)
    return jnp.sum(tokens > 0, dtype=jnp.int32)


def completion_scan(
    x: jax.Array,
    mask: jax.Array,
    completion_ids: jax.Array | None = None,
    *,
    decay: jax.Array | None = None,
    reverse: bool = False,
) -> jax.Array:
    """y_t = x_t + decay_t · y_{t−1} along each completion; without `decay` y_t is the sum up to and with token t.

    One associative scan computes y. The scan starts anew with each completion: no rounding error passes to the next.

    Args:
      x: f[B, T]; counts as 0 where the mask is zero. Elsewhere finite: ±inf makes other completions of the row NaN.
      mask: [B, T], nonzero where a token counts.
      completion_ids: i32[B, T], the number of the token's completion in the row, also where the mask is zero; the
        tokens of a completion stand together. None is one completion a row.
      decay: f[B, T]; counts as 1 where the mask is zero, so y passes such a token unchanged. None is 1 everywhere.
      reverse: runs from the last token back, y_t = x_t + decay_t · y_{t+1}.

    Returns:
      f[B, T], y at every token, also where the mask is zero.
    """
    x = masked_fill(x, mask)
    decay = jnp.ones_like(x) if decay is None else masked_fill(decay, mask, 1)
    if completion_ids is not None:
        neighbour = jnp.roll(completion_ids, -1 if reverse else 1, axis=1)
        decay = jnp.where(neighbour == completion_ids, decay, 0)

    def then(former: tuple[jax.Array, jax.Array], latter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return former[0] * latter[0], latter[1] + latter[0] * former[1]

    return jax.lax.associative_scan(then, (decay, x), axis=1, reverse=reverse)[1]
