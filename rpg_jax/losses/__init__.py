"""Losses as functions of arrays: no model, no config, no device.

loss_sum, weight, metrics = policy_loss("rpg", logprobs=…, behaviour_logprobs=…, advantages=…, mask=…)
loss = loss_sum / weight            after both are summed over micro-batches and devices
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax

from rpg_jax.losses.advantages import ADVANTAGES, LEARNED_ADVANTAGES, advantages, turn_advantages
from rpg_jax.losses.aggregate import AGGREGATES, aggregate
from rpg_jax.losses.declaration import LOSSES, Range, TokenLoss, check, lookup
from rpg_jax.losses.divergences import DIVERGENCES
from rpg_jax.losses.logprobs import Cut, token_logprobs
from rpg_jax.losses.methods import METHODS, Method, get_method
from rpg_jax.losses.metrics import Metrics, divided, merge, token_metrics
from rpg_jax.losses.regularized_pg import kl_baseline
from rpg_jax.losses.sampler_correction import SAMPLER_CORRECTIONS, carried_ratio, correct
from rpg_jax.losses.tokens import Tokens, checked
from rpg_jax.losses.values import explained_variance, gae, value_loss, value_metrics

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "Cut",
    "DIVERGENCES",
    "LEARNED_ADVANTAGES",
    "LOSSES",
    "METHODS",
    "Mean",
    "Method",
    "Metrics",
    "SAMPLER_CORRECTIONS",
    "advantages",
    "aggregate",
    "carried_ratio",
    "divided",
    "explained_variance",
    "gae",
    "get_method",
    "kl_baseline",
    "merge",
    "policy_loss",
    "token_logprobs",
    "token_loss",
    "turn_advantages",
    "value_loss",
    "value_metrics",
]

# Σ of a per-token quantity f[B, T] of a batch, and its weight: `aggregate` with its kind bound.
Mean = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]

_OF_EVERY_LOSS = {
    "aggregate": Annotated[str, AGGREGATES],
    "constant_length": Annotated[float | None, Range("(0, inf)")],
    "sampler_correction": Annotated[str | None, SAMPLER_CORRECTIONS],
    "sampler_low": Annotated[float | None, Range("[0, inf)")],
    "sampler_high": Annotated[float | None, Range("(0, inf]")],
}


def policy_loss(
    name: str,
    *,
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    ref_logprobs: jax.Array | None = None,
    sampler_logprobs: jax.Array | None = None,
    completion_ids: jax.Array | None = None,
    group_ids: jax.Array | None = None,
    **hyperparameters: Any,
) -> tuple[jax.Array, jax.Array, Metrics]:
    """A policy-gradient loss as (sum, weight), to be minimised as sum / weight.

    Args:
      name: a name of `LOSSES`.
      logprobs: f[B, T], log π_θ of the sampled tokens, nats; the only argument that a gradient reaches.
      behaviour_logprobs: f[B, T], log π_old, as the trainer recomputes it.
      advantages: f[B, T] or f[B].
      mask: [B, T], nonzero where a token is trained. Elsewhere every input may hold anything, NaN included.
      ref_logprobs: f[B, T], log π_ref; None where the reference is the behaviour policy.
      sampler_logprobs: f[B, T], log π_s as the rollout engine reported it.
      completion_ids: i32[B, T] in 0 … T, tells the completions of a packed row apart (0 is padding); None is one
        completion a row.
      group_ids: i32[B, T] or i32[B] in 0 … B·T, the prompt of each completion; only rpg with level="sequence" reads it,
        for the leave-one-out baseline of the KL. None: the advantages hold it (`kl_baseline`), or there is none.
      **hyperparameters: of the loss (the keyword arguments of its function in `regularized_pg`, `baselines` or
        `comparators`), and `aggregate`, a name of `AGGREGATES`; `constant_length` in tokens, for aggregate `constant`;
        `sampler_correction`, a name of `SAMPLER_CORRECTIONS` or None: what makes up for tokens that π_s drew and not
        π_old, within the ratios `sampler_low` and `sampler_high` (None: the kind's own).

    Returns:
      loss_sum and weight, f32 scalars (f64 for f64 inputs); metrics, name -> pair, see `metrics.token_metrics`.

    Raises:
      ValueError: an unknown name or hyperparameter, a value out of its range, shapes that do not match, or a missing
        reference or sampler log-probability.
    """
    tokens = checked(
        logprobs=logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=advantages,
        mask=mask,
        ref_logprobs=ref_logprobs,
        sampler_logprobs=sampler_logprobs,
        completion_ids=completion_ids,
        group_ids=group_ids,
    )
    result = token_loss(name, tokens, **hyperparameters)
    kind = hyperparameters.get("aggregate", LOSSES[name].aggregate)
    LOSSES[name].check_aggregate(**hyperparameters | {"aggregate": kind})
    loss_sum, weight = aggregate(result.values, tokens, kind, hyperparameters.get("constant_length"))
    return loss_sum, weight, token_metrics(tokens, result.events)


def token_loss(name: str, tokens: Tokens, **hyperparameters: Any) -> TokenLoss:
    """Each token's loss and events: `policy_loss` before the aggregate.

    `tokens` come from `tokens.checked`; the other arguments and the errors are those of `policy_loss`.
    """
    loss = lookup(LOSSES, "loss", name)
    check(name, {**loss.hyperparameters, **_OF_EVERY_LOSS}, hyperparameters)
    correction = correct(
        tokens,
        hyperparameters.get("sampler_correction"),
        low=hyperparameters.get("sampler_low"),
        high=hyperparameters.get("sampler_high"),
    )
    own = {name: value for name, value in hyperparameters.items() if name not in _OF_EVERY_LOSS}
    result = loss.function(correction.tokens, **own)
    return TokenLoss(result.values * correction.weight, {**result.events, **correction.events})
