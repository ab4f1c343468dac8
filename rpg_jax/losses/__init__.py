"""Losses as functions of arrays: no model, no config, no device.

loss, metrics = rpg(logprobs, behaviour_logprobs, advantages, mask, ref_logprobs=…, divergence="urkl", kl_coef=0.01)

`policy_loss` calls any loss by its name, and returns sum and weight apart for loops with micro-batches.
"""

from collections.abc import Callable
from typing import Any

import jax

from rpg_jax.losses.advantages import (
    ADVANTAGES,
    LEARNED_ADVANTAGES,
    advantages,
    declare_own_advantage,
    turn_advantages,
)
from rpg_jax.losses.aggregate import AGGREGATES, aggregate
from rpg_jax.losses.calling import (
    cispo,
    dppo,
    gmpo,
    grpo,
    gspo,
    of_arrays,
    opmd,
    policy_loss,
    ppo,
    reinforce_pp,
    rpg,
    rpg_completions,
    sapo,
    token_loss,
    verl_form,
)
from rpg_jax.losses.completions import kl_baseline
from rpg_jax.losses.declaration import LOSSES, Loss, Range, TokenLoss, declare_own_loss, find_loss
from rpg_jax.losses.divergences import DIVERGENCES
from rpg_jax.losses.logprobs import Cut, TokenNumbers, token_divergences, token_logprobs
from rpg_jax.losses.methods import METHODS, Method, get_method
from rpg_jax.losses.metrics import Metrics, divided, merge
from rpg_jax.losses.sampler_correction import SAMPLER_CORRECTIONS, carried_ratio
from rpg_jax.losses.tokens import PrefixKL, Tokens
from rpg_jax.losses.values import explained_variance, gae, value_loss, value_metrics

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "Cut",
    "DIVERGENCES",
    "LEARNED_ADVANTAGES",
    "LOSSES",
    "Loss",
    "METHODS",
    "Mean",
    "Method",
    "Metrics",
    "PrefixKL",
    "Range",
    "SAMPLER_CORRECTIONS",
    "TokenLoss",
    "TokenNumbers",
    "Tokens",
    "advantages",
    "aggregate",
    "carried_ratio",
    "cispo",
    "declare_own_advantage",
    "declare_own_loss",
    "divided",
    "dppo",
    "explained_variance",
    "find_loss",
    "gae",
    "get_method",
    "gmpo",
    "grpo",
    "gspo",
    "kl_baseline",
    "merge",
    "of_arrays",
    "opmd",
    "policy_loss",
    "ppo",
    "reinforce_pp",
    "rpg",
    "rpg_completions",
    "sapo",
    "token_divergences",
    "token_logprobs",
    "token_loss",
    "turn_advantages",
    "value_loss",
    "value_metrics",
    "verl_form",
]

# Σ of a per-token quantity f[B, T] of a batch, and its weight: `aggregate` with its kind bound.
Mean = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
