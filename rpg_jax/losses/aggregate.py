"""Per-token losses become (sum, weight). The caller adds both up over the update batch, and then divides once.

So the loss does not depend on how the batch is split into micro-batches, packed, padded or spread over devices.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses.declaration import Declared, Table, lookup


class Trained(Protocol):
    """Tokens [B, T] that an update trains on where `mask` is nonzero. `completion_ids` i32[B, T] is the number of a
    token's completion in its row; None: one completion a row."""

    @property
    def mask(self) -> jax.Array: ...
    @property
    def completion_ids(self) -> jax.Array | None: ...


AGGREGATES = Table(Declared)
Sums = tuple[jax.Array, jax.Array]
# Σ of a per-token quantity f[B, T] of a batch, and its weight: `aggregate` with its kind bound.
Mean = Callable[[jax.Array, Any], Sums]


@AGGREGATES.declare(r"\textstyle\sum_{i,t} \ell_{i,t} / \sum_i T_i")
def token_mean(values: jax.Array, tokens: Trained) -> Sums:
    """(Σ loss, number of trained tokens), scalars: the mean over tokens of `values` f[B, T] (the paper and DAPO)."""
    return masking.masked_sum(values, tokens.mask), jnp.sum(tokens.mask != 0, dtype=values.dtype)


@AGGREGATES.declare(r"\tfrac1N \textstyle\sum_i \sum_t \ell_{i,t}")
def sequence_mean_token_sum(values: jax.Array, tokens: Trained) -> Sums:
    """(Σ loss, number of completions), scalars: the mean over completions of the token sum of `values` f[B, T]."""
    completions = _completions(values, tokens)
    return masking.masked_sum(values, tokens.mask), completions


@AGGREGATES.declare(r"\tfrac1N \textstyle\sum_i \tfrac{1}{T_i} \sum_t \ell_{i,t}")
def sequence_mean_token_mean(values: jax.Array, tokens: Trained) -> Sums:
    """(Σ loss/T_i, number of completions): the mean over completions of the token mean of `values` f[B, T] (GRPO)."""
    completions = _completions(values, tokens)
    lengths = masking.completion_sum(jnp.ones_like(values), tokens.mask, tokens.completion_ids)
    return masking.masked_sum(values / jnp.maximum(lengths, 1), tokens.mask), completions


@AGGREGATES.declare(r"\tfrac{1}{N L} \textstyle\sum_i \sum_t \ell_{i,t}")
def constant(values: jax.Array, tokens: Trained, constant_length: float | None) -> Sums:
    """(Σ loss, number of completions × `constant_length`), scalars, of `values` f[B, T] (Dr. GRPO). The length is in
    tokens; None raises ValueError."""
    if constant_length is None:
        raise ValueError("aggregate 'constant' needs constant_length, in tokens: usually the completion budget")
    total, completions = sequence_mean_token_sum(values, tokens)
    return total, completions * constant_length


def _completions(values: jax.Array, tokens: Trained) -> jax.Array:
    return masking.completion_count(tokens.mask, tokens.completion_ids).astype(values.dtype)


def aggregate(values: jax.Array, tokens: Trained, kind: str, constant_length: float | None = None) -> Sums:
    """The sum and the weight of a per-token quantity, f[] each in the dtype of `values`; the aggregate is sum / weight.

    Args:
      values: f[B, T], read only where `tokens.mask` is nonzero. The gradient flows through the sum.
      tokens: `tokens.mask` says which tokens count, and `tokens.completion_ids` tells completions apart; None: each row
        is one completion. A completion without an unmasked token does not count.
      kind: a name of `AGGREGATES`.
      constant_length: tokens; only `constant` reads the length, usually the completion budget.

    Raises ValueError if `kind` is unknown, or `kind` is `constant` and `constant_length` is None.
    """
    declared = lookup(AGGREGATES, "aggregate", kind)
    length = (constant_length,) if declared.takes("constant_length") else ()
    return declared.function(values, tokens, *length)
