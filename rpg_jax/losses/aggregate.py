"""From per-token losses to (sum, weight): the one division happens after both are summed over the update batch.

So the loss does not depend on how the batch is split into micro-batches, packed, padded or spread over devices.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses.hyperparameters import lookup

AGGREGATES = {
    "token_mean": "Σ loss / number of tokens: the paper and DAPO",
    "sequence_mean_token_sum": "mean over completions of the token sum",
    "sequence_mean_token_mean": "mean over completions of the token mean: GRPO",
    "constant": "Σ loss / (completions × constant_length): Dr. GRPO",
}


class Trained(Protocol):
    """Which tokens are trained, and whose they are: `Tokens`, or a batch."""

    @property
    def mask(self) -> jax.Array: ...
    @property
    def completion_ids(self) -> jax.Array | None: ...


def aggregate(
    values: jax.Array, tokens: Trained, kind: str, constant_length: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sum and weight of a per-token quantity; the aggregate is sum / weight.

    Args:
      values: f[B, T].
      tokens: whose mask counts tokens and whose `completion_ids` tell completions apart. A completion without an
        unmasked token does not count.
      kind: a name of `AGGREGATES`.
      constant_length: tokens, for `constant`.

    Raises:
      ValueError: an unknown kind, or `constant` without a length.
    """
    lookup(AGGREGATES, "aggregate", kind)
    if kind == "token_mean":
        return masking.masked_sum(values, tokens.mask), jnp.sum(tokens.mask != 0, dtype=values.dtype)
    completions = masking.completion_count(tokens.mask, tokens.completion_ids).astype(values.dtype)
    if kind == "sequence_mean_token_mean":
        lengths = masking.completion_sum(jnp.ones_like(values), tokens.mask, tokens.completion_ids)
        return masking.masked_sum(values / jnp.maximum(lengths, 1), tokens.mask), completions
    total = masking.masked_sum(values, tokens.mask)
    if kind == "sequence_mean_token_sum":
        return total, completions
    if constant_length is None:
        raise ValueError("aggregate 'constant' needs constant_length, in tokens: usually the completion budget")
    return total, completions * constant_length
