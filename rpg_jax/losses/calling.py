"""How a loss is called: by its name with a table of hyperparameters, or as a function of arrays with its own signature.

`policy_loss` returns a sum and a weight, which a loop with micro-batches adds up and divides once. The functions below
it, `rpg` to `opmd`, divide at once.
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from rpg_jax.losses import baselines, comparators, regularized_pg, verl
from rpg_jax.losses.aggregate import AGGREGATES, aggregate
from rpg_jax.losses.declaration import LOSSES, Loss, Range, TokenLoss, find_loss, passes_on_to
from rpg_jax.losses.metrics import Metrics, token_metrics
from rpg_jax.losses.sampler_correction import SAMPLER_CORRECTIONS, correct
from rpg_jax.losses.tokens import PrefixKL, Tokens, checked

_OF_EVERY_LOSS = {
    "aggregate": Annotated[str, AGGREGATES],
    "constant_length": Annotated[float | None, Range("(0, inf)")],
    "sampler_correction": Annotated[str | None, SAMPLER_CORRECTIONS],
    "sampler_low": Annotated[float | None, Range("[0, inf)")],
    "sampler_high": Annotated[float | None, Range("(0, inf]")],
}


def policy_loss(
    name: str | Loss,
    *,
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    ref_logprobs: jax.Array | None = None,
    sampler_logprobs: jax.Array | None = None,
    completion_ids: jax.Array | None = None,
    group_ids: jax.Array | None = None,
    prefix_kl: PrefixKL | None = None,
    **hyperparameters: Any,
) -> tuple[jax.Array, jax.Array, Metrics]:
    """A policy-gradient loss as (sum, weight), to be minimised as sum / weight.

    Args:
      name: a name of `LOSSES`, or a `Loss`.
      logprobs: f[B, T], log π_θ of the sampled tokens, nats. A gradient reaches `logprobs` and `prefix_kl` alone.
      behaviour_logprobs: f[B, T], log π_old, as the trainer recomputes it.
      advantages: f[B, T] or f[B].
      mask: [B, T], nonzero at a token that the update trains on. Elsewhere all but the ids may hold anything, even NaN.
      ref_logprobs: f[B, T], log π_ref; None where the reference is the behaviour policy.
      sampler_logprobs: f[B, T], log π_s as the rollout engine reported it, or None: no correction, no metrics of π_s.
      completion_ids: i32[B, T] in 0 … T, tells a packed row's completions apart (0 is padding); None: one in a row.
      group_ids: i32[B, T] or i32[B] in 0 … B·T, the prompt of each completion. Only rpg with level="sequence" reads the
        ids, for the KL's leave-one-out baseline; other losses here raise ValueError. None: the advantages hold the
        baseline (`kl_baseline`), or the KL has no baseline.
      prefix_kl: the KL to the reference at the tokens' prefixes, the field `kl` of `token_divergences`. Only rpg with
        estimator="exact" trains on the KL; with every loss the metric `kl_exact` is the mean of `prefix_kl.reverse`.
      **hyperparameters: of the loss (the keyword arguments of its function), and for every loss `aggregate`, a name of
        `AGGREGATES` (default: the loss's own); `constant_length` in tokens, for aggregate `constant`;
        `sampler_correction`, a name of `SAMPLER_CORRECTIONS` or None: the correction for tokens that π_s drew, not
        π_old; `sampler_low` and `sampler_high`, the bounds of the correction's ratio (None: its default).

    Returns:
      loss_sum and weight, f32 scalars (f64 for f64 inputs), and metrics: name -> (sum, weight), for `losses.merge` and
      `losses.divided`.

    Raises:
      ValueError: an unknown name or hyperparameter, a value out of its range, hyperparameters that contradict each
        other, shapes that do not match, log-probabilities in 16 bits, or a missing argument that the loss needs:
        `ref_logprobs`, `sampler_logprobs`, `prefix_kl`, `constant_length` or a hyperparameter without a default.
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
        prefix_kl=prefix_kl,
    )
    loss = find_loss(name)
    result = token_loss(loss, tokens, **hyperparameters)
    kind = hyperparameters.get("aggregate", loss.aggregate)
    loss.check_aggregate(**hyperparameters | {"aggregate": kind})
    loss_sum, weight = aggregate(result.values, tokens, kind, hyperparameters.get("constant_length"))
    return loss_sum, weight, token_metrics(tokens, result.events)


def token_loss(name: str | Loss, tokens: Tokens, **hyperparameters: Any) -> TokenLoss:
    """Each token's loss f[B, T], to be minimised, and its events: `policy_loss` before the aggregate. Both mean nothing
    where `tokens.mask` is False. `tokens` come from `tokens.checked`. The other arguments are as in `policy_loss`. But
    `aggregate` and `constant_length` have no effect, and raise only if their own values are not allowed."""
    loss = find_loss(name)
    loss.check(hyperparameters, _OF_EVERY_LOSS)
    if tokens.group_ids is not None and loss.function.__module__ in (baselines.__name__, comparators.__name__):
        raise ValueError(f"the loss {loss.name!r} reads no group_ids: leave them out")
    correction = correct(
        tokens,
        hyperparameters.get("sampler_correction"),
        low=hyperparameters.get("sampler_low"),
        high=hyperparameters.get("sampler_high"),
    )
    own = {name: value for name, value in hyperparameters.items() if name not in _OF_EVERY_LOSS}
    result = loss(correction.tokens, **own)
    return TokenLoss(result.values * correction.weight, {**result.events, **correction.events})


_ARRAYS = """
The arguments:

  logprobs: f[B, T], log π_θ of the sampled tokens, nats. The gradient reaches `logprobs` and `prefix_kl` alone.
  behaviour_logprobs: f[B, T], log π_old of the same tokens.
  advantages: f[B] or f[B, T].
  mask: [B, T], nonzero where a token is trained. Elsewhere all but the ids may hold anything, even NaN.
  ref_logprobs: f[B, T], log π_ref; None where the reference is the behaviour policy.
  completion_ids: i32[B, T], tells the completions of a packed row apart; None is one completion a row.
  group_ids: i32[B] or i32[B, T], the prompt of each completion; only `rpg_completions` takes the ids.
  prefix_kl: the KL to the reference at the tokens' prefixes, of `token_divergences`; only "exact" trains on it.
  aggregate: the mean over tokens, a name of `AGGREGATES`; `constant` needs `constant_length`, in tokens.
  The other arguments are the hyperparameters of the loss, explained above.

Returns the loss, an f32 scalar to be minimised (f64 for f64 inputs), and metrics for `losses.divided`. A loop with
micro-batches calls `policy_loss`, which returns the sum and the weight apart. Raises ValueError for a value out of its
range and for shapes that do not match.
"""


def of_arrays(loss: Loss | Callable[..., TokenLoss]) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Returns a loss of tokens as a function of arrays, which is called in the way of the losses of rlax.

        value, metrics = of_arrays(loss)(logprobs, behaviour_logprobs, advantages, mask, tau=0.5)

    `loss` is a function (tokens, *, hyperparameters) -> `TokenLoss`, of this package or your own (see `declaration`),
    or a `Loss` of such a function. The returned function takes the arguments of `policy_loss`, but none for the
    sampler's correction. `value` is sum / weight, 0 without a trained token, and `metrics` are the metrics of
    `policy_loss`. Raises TypeError and NameError as `Loss`.
    """
    rows = [loss] if isinstance(loss, Loss) else [row for row in LOSSES.values() if row.function is loss]
    declared = rows[0] if rows else Loss(loss)

    def called(
        logprobs: jax.Array,
        behaviour_logprobs: jax.Array,
        advantages: jax.Array,
        mask: jax.Array,
        *,
        ref_logprobs: jax.Array | None = None,
        completion_ids: jax.Array | None = None,
        group_ids: jax.Array | None = None,
        prefix_kl: PrefixKL | None = None,
        aggregate: str = declared.aggregate,
        constant_length: float | None = None,
        **hyperparameters: Any,
    ) -> tuple[jax.Array, Metrics]:
        total, weight, metrics = policy_loss(
            declared,
            logprobs=logprobs,
            behaviour_logprobs=behaviour_logprobs,
            advantages=advantages,
            mask=mask,
            ref_logprobs=ref_logprobs,
            completion_ids=completion_ids,
            group_ids=group_ids,
            prefix_kl=prefix_kl,
            aggregate=aggregate,
            constant_length=constant_length,
            **hyperparameters,
        )
        return total / jnp.maximum(weight, 1e-9), metrics

    passes_on_to(declared.function)(called)
    called.__name__ = called.__qualname__ = declared.name
    called.__doc__ = f"{inspect.getdoc(declared.function) or declared.name}\n{_ARRAYS}"
    return called


rpg = of_arrays(Loss(regularized_pg.rpg_tokens, name="rpg"))
rpg_completions = of_arrays(
    Loss(
        regularized_pg.rpg_completions,
        aggregate="sequence_mean_token_sum",
        check_aggregate=lambda **given: regularized_pg.check_aggregate(**{"level": "sequence"} | given),
    )
)
verl_form = of_arrays(verl.verl_form)
ppo = of_arrays(baselines.ppo)
grpo = of_arrays(baselines.grpo)
reinforce_pp = of_arrays(baselines.reinforce_pp)
gspo = of_arrays(baselines.gspo)
cispo = of_arrays(baselines.cispo)
dppo = of_arrays(comparators.dppo)
sapo = of_arrays(comparators.sapo)
gmpo = of_arrays(comparators.gmpo)
opmd = of_arrays(comparators.opmd)
