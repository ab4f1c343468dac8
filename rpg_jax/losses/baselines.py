"""The losses that RPG is compared with: PPO, GRPO, REINFORCE++, GSPO and CISPO.

Each takes `Tokens` and returns a `TokenLoss`, to be minimised. They differ in the ratio and the KL term. Methods that
differ in clip range, advantages or aggregate alone (DAPO, Dr. GRPO and RLOO from PPO) are rows of `METHODS`. Gradients
reach `logprobs` only.
"""

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses import clipping, divergences
from rpg_jax.losses.clipping import Bounds
from rpg_jax.losses.declaration import LOSSES, ClipDual, ClipHigh, ClipLow, KLCoef, Range, TokenLoss
from rpg_jax.losses.tokens import Tokens, bounded_exp

# k3 takes log(π_ref/π_θ) up to here, where it is e⁴⁰. From e⁸⁹ on f32 would have inf, and 0 · inf in the gradient.
OVERFLOW = 40.0

_CLIP = r"\mathrm{clip}_\mathrm{PPO}(w, A)"


@LOSSES.declare(_CLIP)
def ppo(tokens: Tokens, *, clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, clip_dual: ClipDual = 10.0) -> TokenLoss:
    """PPO with a dual clip (minimise): max(−wA, −clip(w, 1 − ε₁, 1 + ε₂)A), and where A < 0 at most −cA; f[B, T].

    w = π_θ/π_old carries the gradient, A is the advantage; ε₁ = `clip_low`, ε₂ = `clip_high`, c = `clip_dual`, where
    None is no dual bound. With ε₂ = 0.28 ("clip-higher") the loss is DAPO's (arXiv:2503.14476 eq. 10); with the
    aggregate `constant` it is Dr. GRPO's (arXiv:2503.20783). The events are clip, clip_high, clip_low and clip_dual.
    Source: arXiv:1707.06347 eq. 7, arXiv:1912.09729 eq. 5.
    """
    values, region = clipping.ppo_dual_clip(tokens.w, tokens.advantages, Bounds(clip_low, clip_high, clip_dual))
    return TokenLoss(values, region.events())


def grpo_equation(*, kl_weighting: str = "none", kl_clamp: float | None = None, **_: Any) -> str:
    """LaTeX of GRPO's loss of a token with these hyperparameters of `grpo`; others are ignored."""
    if kl_weighting == "importance":
        return _CLIP + r" + \beta (w \log r - w + \rho)"
    k3 = r"(1/r - 1 + \log r)"
    return _CLIP + r" + \beta " + (k3 if kl_clamp in (None, math.inf) else rf"\min{k3[:-1]}, {kl_clamp:g})")


@LOSSES.declare(grpo_equation, aggregate="sequence_mean_token_mean")
def grpo(
    tokens: Tokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    clip_dual: ClipDual = 10.0,
    kl_coef: KLCoef = 1e-3,
    kl_weighting: Literal["none", "importance"] = "none",
    kl_clamp: Annotated[float | None, Range("(0, inf]")] = None,
) -> TokenLoss:
    """`ppo` + β·k3 against a fixed reference, f[B, T], to be minimised (GRPO, arXiv:2402.03300 eq. 3 and 4).

        k3 = 1/r − 1 + log r,   r = π_θ/π_ref, in nats

    Args:
      clip_low, clip_high, clip_dual: ε₁, ε₂ and c of PPO's clip; None is no dual bound.
      kl_coef: β.
      kl_weighting: `none` is GRPO as published, which averages k3 over tokens of π_old as if they came from π_θ.
        `importance` is the correction, β·w·k3 with the gradient through w: exactly ∇UKL(π_θ‖π_ref)
        (arXiv:2505.17508, section 3).
      kl_clamp: bound of k3. A k3 beyond the bound has no gradient. The public code of arXiv:2505.17508 has 10; None is
        no bound. With and without a bound log(π_ref/π_θ) counts as at most `OVERFLOW`, 40 nats. The metric
        `kl_clamp_fraction` is the fraction of tokens beyond either limit. `importance` has no limit, nor the metric.

    Raises ValueError without `ref_logprobs`, unless β is the number 0.
    """
    _require_reference(tokens, "grpo", kl_coef)
    clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)
    if kl_weighting == "importance":
        penalty = divergences.unnormalized_reverse_kl(tokens.log_w, tokens.log_rho)
        return TokenLoss(clipped.values + kl_coef * penalty, clipped.events)
    bound = math.inf if kl_clamp is None else kl_clamp
    log_y = -tokens.log_r
    penalty = divergences.k3(jnp.where(log_y < OVERFLOW, log_y, OVERFLOW))
    values = clipped.values + kl_coef * clipping.clamp(penalty, -bound, bound)
    return TokenLoss(values, {**clipped.events, "kl_clamp": (penalty > bound) | (log_y >= OVERFLOW)})


@LOSSES.declare(_CLIP + r" + \beta \log r")
def reinforce_pp(
    tokens: Tokens,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    clip_dual: ClipDual = 10.0,
    kl_coef: KLCoef = 1e-4,
) -> TokenLoss:
    """`ppo` + β·k1, k1 = log π_θ − log π_ref in nats; f[B, T], to be minimised.

    The gradient of the k1 term is β ∇log π_θ, whatever the reference. On-policy this gradient is zero in expectation
    (arXiv:2506.09477). `clip_low`, `clip_high` and `clip_dual` are ε₁, ε₂ and c of PPO's clip (None: no dual bound),
    `kl_coef` is β. Raises ValueError without `ref_logprobs`, unless β is the number 0. Source: the REINFORCE++ recipes
    of arXiv:2505.17508. REINFORCE++ itself (arXiv:2501.03262) has k1 in the reward.
    """
    _require_reference(tokens, "reinforce_pp", kl_coef)
    clipped = ppo(tokens, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)
    return TokenLoss(clipped.values + kl_coef * divergences.k1(-tokens.log_r), clipped.events)


@LOSSES.declare(
    r"\mathrm{clip}_\mathrm{PPO}(s, A), \quad s = \exp(\tfrac1T \textstyle\sum_t \log w_t)",
    aggregate="sequence_mean_token_mean",
)
def gspo(tokens: Tokens, *, clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> TokenLoss:
    """PPO's clip of the sequence ratio s = exp(mean over the completion of log w), f[B, T], to be minimised.

    Every token of a completion carries the loss of its completion, max(−sA, −clip(s, 1 − ε₁, 1 + ε₂)A), so
    `sequence_mean_token_mean` is the paper's mean over completions. The gradient flows through s. s averages the logs,
    so ε₁ = `clip_low` and ε₂ = `clip_high` are much smaller than for tokens (GSPO, arXiv:2507.18071 eq. 5 to 7).
    """
    log_s = masking.completion_mean(tokens.log_w, tokens.mask, tokens.completion_ids)
    values, region = clipping.ppo_dual_clip(bounded_exp(log_s), tokens.advantages, Bounds(clip_low, clip_high, None))
    return TokenLoss(values, region.events())


@LOSSES.declare(r"-\mathrm{sg}(\min(w, 1+\varepsilon_2)) A \log\pi_\theta")
def cispo(
    tokens: Tokens, *, clip_low: Annotated[float | None, Range("[0, 1)")] = None, clip_high: ClipHigh = 0.28
) -> TokenLoss:
    """−SG(min(w, 1 + ε₂)) · A · log π_θ, f[B, T], to be minimised: no token loses its gradient (CISPO).

    w = π_θ/π_old, A is the advantage, ε₂ = `clip_high`. With `clip_low` = ε₁ the weight is at least 1 − ε₁ too (None:
    no lower bound). The event `clip` marks a w beyond a bound.

    Source: arXiv:2506.13585 eq. 4 and 5. The paper's equation has a lower bound; the paper's runs have not. The paper
    gives no ε₂. Public defaults are 0.28 (Trinity-RFT 0.3.2) and 0.2 (verl); ScaleRL (arXiv:2510.13786) caps w at 5.
    """
    lower, upper = 0.0 if clip_low is None else 1 - clip_low, 1 + clip_high
    bounded = jnp.minimum(tokens.w, upper)
    if clip_low is not None:
        bounded = jnp.maximum(bounded, lower)
    weight = bounded * tokens.advantages
    return TokenLoss(clipping.weighted(weight, tokens, "reinforce"), {"clip": (tokens.w > upper) | (tokens.w < lower)})


def _require_reference(tokens: Tokens, name: str, kl_coef: float | jax.Array) -> None:
    off = not isinstance(kl_coef, jax.Array) and kl_coef == 0
    if tokens.ref_logprobs is None and not off:
        raise ValueError(f"{name} with kl_coef={kl_coef} needs ref_logprobs of a fixed reference, or kl_coef=0")
