"""Regularized policy gradients: the losses of "On the Design of KL-Regularized Policy Gradient Algorithms for LLM
Reasoning" (arXiv:2505.17508), for any reference policy, in the paper's form and in the form of its public code.

    J(θ) = E_{π_θ}[R] − β D                objective
    ∇J   = E_{π_old}[G ∇log π_θ]           G = wA − βK, with K of `divergences`
    A_reg = G / w = A − β K/w              regularized advantage
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rpg_jax.losses import clipping
from rpg_jax.losses.clipping import Bounds, weighted
from rpg_jax.losses.divergences import DIVERGENCES, VERL_DIVERGENCES, gradient_weight
from rpg_jax.losses.hyperparameters import lookup
from rpg_jax.losses.tokens import TokenLoss, Tokens

VERL_KL_CLAMP = 10.0


def rpg(
    tokens: Tokens,
    *,
    divergence: str = "urkl",
    estimator: str = "reinforce",
    clip: str = "dual",
    form: str = "paper",
    kl_coef: float = 1e-4,
    behaviour_mass: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_dual: float | None = 10.0,
) -> TokenLoss:
    """The RPG loss per token.

    Args:
      tokens: log-probabilities, advantages and mask; without `ref_logprobs` the reference is the behaviour policy.
      divergence: D, one of fkl, ufkl, rkl, urkl, js, ujs.
      estimator: `differentiable` (Tables 1 and 4) or `reinforce` (Table 2, Appendix F); the same gradient per token.
      clip: `none`, `dual` (Algorithms 1 and 2), `truncate` (eq. 4.1) or `reward` (the reward term alone is clipped).
      form: `paper`, or `verl` for the public code's functions.
      kl_coef: β >= 0.
      behaviour_mass: Z = ∫ π_old, a factor of the loss where the behaviour policy is not normalized.
      clip_low, clip_high, clip_dual: ε₁, ε₂ and c > 1 (None: no dual bound).

    Returns:
      f[B, T], to be minimised. ∇L = −Z · G ∇log π_θ where nothing is clipped; the gradient reaches `logprobs` only.

    Source: arXiv:2505.17508, sections 3 and 4; a reference other than π_old is our extension.
    """
    table, loss = {"paper": (DIVERGENCES, paper), "verl": (VERL_DIVERGENCES, verl)}[form]
    lookup(table, "divergence", divergence)
    result = loss(tokens, divergence, estimator, clip, kl_coef, Bounds(clip_low, clip_high, clip_dual))
    return TokenLoss(behaviour_mass * result.values, result.events)


def paper(
    tokens: Tokens, divergence: str, estimator: str, clip: str, kl_coef: float | jax.Array, bounds: Bounds
) -> TokenLoss:
    """The losses of the paper, with the gradient stopped through A_reg.

        none       L = −wA + β d            reinforce: −SG(G) log π_θ
        dual       −SG(C A_reg) x           no gradient where C is a bound
        truncate   −SG(C A_reg) x           the gradient never vanishes
        reward     −SG(C A) x + β d         no gradient of the first term where C is a bound; reinforce: SG(βK) log π_θ

    x is log π_θ (`reinforce`) or π_θ/SG(π_θ) (`differentiable`); C is w, or the bound 1 + ε₂, 1 − ε₁ or c that the
    sign of the advantage makes effective: Algorithm 2, lines 19–34.
    """
    advantages, w, d = tokens.advantages, tokens.w, DIVERGENCES[divergence]
    kl_weight = kl_coef * gradient_weight(d, tokens.log_w, tokens.log_rho)
    if clip in ("dual", "truncate"):
        unit = jnp.zeros_like(tokens.log_w)
        regularized = advantages - kl_coef * gradient_weight(d, unit, -tokens.log_r)
        region = clipping.rpg_region(regularized, w, bounds)
        bound = region.select(bounds.upper, bounds.lower, bounds.dual_upper, w)
        # wA − βK rather than w · A_reg: K/w overflows first where the policy has left the reference far behind.
        weight = jnp.where(region.clipped, bound * regularized, w * advantages - kl_weight)
        stopped = region.clipped if clip == "dual" else None
        return TokenLoss(weighted(weight, tokens, estimator, stopped), region.events())

    reward, events = reward_term(tokens, estimator, clip, bounds)
    if estimator == "differentiable":
        return TokenLoss(reward + kl_coef * d(tokens.log_w, tokens.log_rho), events)
    return TokenLoss(reward + weighted(-kl_weight, tokens, estimator), events)


def reward_term(tokens: Tokens, estimator: str, clip: str, bounds: Bounds) -> tuple[jax.Array, dict[str, jax.Array]]:
    """−C·A x, the loss without its KL term: clipped by the sign of A for clip "reward", C = w for "none"."""
    if clip == "none":
        return weighted(tokens.w * tokens.advantages, tokens, estimator), {}
    region = clipping.rpg_region(tokens.advantages, tokens.w, bounds)
    bound = region.select(bounds.upper, bounds.lower, bounds.dual_upper, tokens.w)
    return weighted(bound * tokens.advantages, tokens, estimator, region.clipped), region.events()


def verl(
    tokens: Tokens, divergence: str, estimator: str, clip: str, kl_coef: float | jax.Array, bounds: Bounds
) -> TokenLoss:
    """The losses of the public code, `verl/trainer/ppo/core_algos.py` of complex-reasoning/RPG at 6209206.

        clip       differentiable                              reinforce
        reward     compute_policy_loss + β kl_penalty *        reward term of `paper` + SG(β K) log π_θ
        none       −wA + β kl_penalty                          −SG(wA − βK) log π_θ
        dual       as reinforce, on π_θ/SG(π_θ)                compute_policy_loss_reinforce, "clip_ppo" *
        truncate   as reinforce, on π_θ/SG(π_θ)                compute_policy_loss_reinforce, "clip_hard" *

    Cells marked * reproduce a function of that code; the others are their nearest relatives. In `reward` and `none`,
    kl_penalty and K are those of r = π_θ/π_ref without the factor ρ, clamped to ±10 with no gradient beyond (fkl is
    not); in `dual` and `truncate` the reference is the behaviour policy, whatever `ref_logprobs` is, and K is evaluated
    at clip(w, 1 − ε₁, 1 + ε₂).
    """
    if clip in ("dual", "truncate"):
        return verl_reinforce(tokens, divergence, estimator, clip, kl_coef, bounds)
    penalty, kl_weight = verl_kl(divergence, tokens.log_r)
    if estimator == "reinforce":
        reward, events = reward_term(tokens, estimator, clip, bounds)
        return TokenLoss(reward + weighted(-kl_coef * kl_weight, tokens, estimator), events)
    if clip == "none":
        return TokenLoss(-tokens.w * tokens.advantages + kl_coef * penalty)
    reward, region = clipping.ppo_dual_clip(tokens.w, tokens.advantages, bounds)
    return TokenLoss(reward + kl_coef * penalty, region.events())


def verl_kl(divergence: str, log_r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The public code's `kl_penalty`: the divergence and its gradient weight at w = r, clamped to ±10 (fkl is not)."""
    d = VERL_DIVERGENCES[divergence]
    rho = jnp.zeros_like(log_r)
    if divergence == "fkl":
        return d(log_r, rho), gradient_weight(d, log_r, rho)
    # Every clamped divergence is at its clamp long before log r = 40; stopping there keeps 0 · inf out of the gradient.
    log_r = jnp.where(log_r < 40, log_r, 40.0)
    penalty, weight = d(log_r, rho), gradient_weight(d, log_r, rho)
    return clipping.clamp(penalty, -VERL_KL_CLAMP, VERL_KL_CLAMP), clipping.clamp(weight, -VERL_KL_CLAMP, VERL_KL_CLAMP)


def verl_reinforce(
    tokens: Tokens, divergence: str, estimator: str, clip: str, kl_coef: float | jax.Array, bounds: Bounds
) -> TokenLoss:
    """The public code's `compute_policy_loss_reinforce`, with κ = −βK at clip(w, 1 − ε₁, 1 + ε₂):

        truncate   −SG(clip(w) A + κ) x
        dual       −SG(wA + κ) x,  or without gradient −((1 + ε₂)A − κ) x, −((1 − ε₁)A − κ) x, −(cA + κ) x

    The sign of κ in the upper and lower bound is that of the code; only the value depends on it.
    """
    advantages, w = tokens.advantages, tokens.w
    log_clipped_w = jnp.clip(tokens.log_w, math.log(bounds.lower), math.log(bounds.upper))
    kl_term = -kl_coef * gradient_weight(VERL_DIVERGENCES[divergence], log_clipped_w, jnp.zeros_like(w))
    if clip == "truncate":
        region = clipping.Region(high=w > bounds.upper, low=w < bounds.lower, dual=jnp.zeros_like(tokens.mask))
        weight = jnp.clip(w, bounds.lower, bounds.upper) * advantages + kl_term
        return TokenLoss(weighted(weight, tokens, estimator), region.events())
    region = clipping.verl_region(advantages, w, bounds)
    weight = region.select(
        high=bounds.upper * advantages - kl_term,
        low=bounds.lower * advantages - kl_term,
        dual=bounds.dual_upper * advantages + kl_term,
        otherwise=w * advantages + kl_term,
    )
    return TokenLoss(weighted(weight, tokens, estimator, region.clipped), region.events())
