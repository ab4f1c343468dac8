"""The losses of the paper's public code, `verl/trainer/ppo/core_algos.py` of complex-reasoning/RPG at 6209206. See
docs/errata.md for the differences from the paper."""

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from rpg_jax.losses import clipping
from rpg_jax.losses.clipping import Bounds, Region, weighted
from rpg_jax.losses.declaration import ClipDual, ClipHigh, ClipLow, KLCoef, TokenLoss, lookup
from rpg_jax.losses.divergences import DIVERGENCES, forward_kl, gradient_weight, reverse_kl
from rpg_jax.losses.tokens import Tokens

KL_CLAMP = 10.0


def difference_kl(log_w: jax.Array, log_rho: jax.Array) -> jax.Array:
    """½ (w log(w/ρ) − ρ log(ρ/w)): `js` of the public code. The code's comment has a plus (docs/errata.md, row 11)."""
    return 0.5 * (reverse_kl(log_w, log_rho) - forward_kl(log_w, log_rho))


VERL_DIVERGENCES = {name: DIVERGENCES[name].function for name in ("fkl", "ufkl", "rkl", "urkl", "ujs")}
VERL_DIVERGENCES["js"] = difference_kl


def verl_form(
    tokens: Tokens,
    *,
    divergence: Annotated[str, DIVERGENCES] = "urkl",
    estimator: Literal["differentiable", "reinforce"] = "reinforce",
    clip: Literal["none", "dual", "truncate", "reward"] = "dual",
    kl_coef: KLCoef = 1e-4,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    clip_dual: ClipDual = 10.0,
) -> TokenLoss:
    """The losses of the paper's public code, f[B, T], to be minimised. The arguments mean the same as in `rpg_tokens`.

        clip       differentiable                              reinforce
        reward     compute_policy_loss + β kl_penalty *        −SG(C A) log π_θ + SG(β K) log π_θ
        none       −wA + β kl_penalty                          −SG(wA − βK) log π_θ
        dual       as reinforce, on π_θ/SG(π_θ)                compute_policy_loss_reinforce, "clip_ppo" *
        truncate   as reinforce, on π_θ/SG(π_θ)                compute_policy_loss_reinforce, "clip_hard" *

    A cell marked * reproduces a function of the public code, `verl/trainer/ppo/core_algos.py`. The other cells are the
    nearest relatives. w = π_θ/π_old, A the advantage, C is w or its bound. In `reward` and `none`, kl_penalty and K
    depend on r = π_θ/π_ref without the factor ρ, clamped to ±10 with no gradient beyond (fkl is not clamped). In `dual`
    and `truncate` the reference is the behaviour policy, whatever `ref_logprobs` is, and K is evaluated at clip(w, 1 −
    ε₁, 1 + ε₂). Raises ValueError for a divergence that the public code does not have, or `group_ids`.
    """
    if tokens.group_ids is not None:
        raise ValueError("group_ids need level='sequence': the public code has no baseline of the KL")
    bounds = Bounds(clip_low, clip_high, clip_dual)
    lookup(VERL_DIVERGENCES, "divergence", divergence)
    if clip in ("dual", "truncate"):
        return policy_loss_reinforce(tokens, divergence, estimator, clip, kl_coef, bounds)
    penalty, kl_weight = kl_penalty(divergence, tokens.log_r)
    if estimator == "reinforce":
        reward, events = clipping.reward_term(tokens, tokens.w, estimator, clip, bounds)
        return TokenLoss(reward + weighted(-kl_coef * kl_weight, tokens, estimator), events)
    if clip == "none":
        return TokenLoss(-tokens.w * tokens.advantages + kl_coef * penalty)
    reward, region = clipping.ppo_dual_clip(tokens.w, tokens.advantages, bounds)
    return TokenLoss(reward + kl_coef * penalty, region.events())


def kl_penalty(divergence: str, log_r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A divergence of `VERL_DIVERGENCES` and its gradient weight K at w = r, ρ = 1, f[B, T] each, in nats. `log_r` is
    log π_θ/π_ref f[B, T]. Both results, but for fkl, are clamped to ±10, with no gradient beyond."""
    d = VERL_DIVERGENCES[divergence]
    rho = jnp.zeros_like(log_r)
    if divergence == "fkl":
        return d(log_r, rho), gradient_weight(d, log_r, rho)
    # Every clamped divergence is at its clamp long before log r = 40; stopping there keeps 0 · inf out of the gradient.
    log_r = jnp.where(log_r < 40, log_r, 40.0)
    penalty, weight = d(log_r, rho), gradient_weight(d, log_r, rho)
    return clipping.clamp(penalty, -KL_CLAMP, KL_CLAMP), clipping.clamp(weight, -KL_CLAMP, KL_CLAMP)


def policy_loss_reinforce(
    tokens: Tokens, divergence: str, estimator: str, clip: str, kl_coef: KLCoef, bounds: Bounds
) -> TokenLoss:
    """The public code's `compute_policy_loss_reinforce` (minimise), with κ = −βK at clip(w, 1 − ε₁, 1 + ε₂):

        truncate   −SG(clip(w) A + κ) x
        dual       −SG(wA + κ) x,  or without gradient −((1 + ε₂)A − κ) x, −((1 − ε₁)A − κ) x, −(cA + κ) x

    x is log π_θ, or π_θ/SG(π_θ) for `differentiable`; w = π_θ/π_old, A is the advantage, K the divergence's gradient
    weight. At the upper and the lower bound κ has the sign that the code gives it; only the value depends on that sign.
    """
    advantages, w = tokens.advantages, tokens.w
    log_clipped_w = jnp.clip(tokens.log_w, math.log(bounds.lower), math.log(bounds.upper))
    kl_term = -kl_coef * gradient_weight(VERL_DIVERGENCES[divergence], log_clipped_w, jnp.zeros_like(w))
    if clip == "truncate":
        region = Region(high=w > bounds.upper, low=w < bounds.lower, dual=jnp.zeros_like(tokens.mask))
        weight = jnp.clip(w, bounds.lower, bounds.upper) * advantages + kl_term
        return TokenLoss(weighted(weight, tokens, estimator), region.events())
    region = verl_region(advantages, w, bounds)
    weight = region.select(
        high=bounds.upper * advantages - kl_term,
        low=bounds.lower * advantages - kl_term,
        dual=bounds.dual_upper * advantages + kl_term,
        otherwise=w * advantages + kl_term,
    )
    return TokenLoss(weighted(weight, tokens, estimator, region.clipped), region.events())


def verl_region(advantages: jax.Array, w: jax.Array, bounds: Bounds) -> Region:
    """The public code's regions, bool[B, T]. The sign of A (not of A_reg) decides, and A = 0 counts as negative. A
    ratio at the upper or the dual bound is clipped, a ratio at the lower bound is not."""
    gain = advantages > 0
    high, dual = ~(w < bounds.upper), ~(w < bounds.dual_upper)
    return Region(high=gain & high, low=~gain & (w < bounds.lower), dual=~gain & dual)
