"""Losses of 2025 and 2026 that bound the policy's step in another way than PPO: CTPO, DPPO, DRPO, SAPO, GMPO, OPMD.

Each takes `Tokens` and returns a `TokenLoss` f[B, T], to be minimised. Gradients reach log π_θ only, and stop through
every mask. CISPO and GSPO are in `baselines`; the corrections of the sampler's gap are in `sampler_correction`.
"""

import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses.baselines import OVERFLOW
from rpg_jax.losses.clipping import Bounds, Region, ppo_dual_clip, weighted
from rpg_jax.losses.declaration import LOSSES, ClipHigh, ClipLow, KLCoef, Range, TokenLoss
from rpg_jax.losses.tokens import Tokens, bounded_exp

Width = Annotated[float, Range("(0, inf]")]
Temperature = Annotated[float, Range("(0, inf)")]

# ε₁ and ε₂ of GMPO, whose paper clips a token's ratio to [e^−0.4, e^0.4].
GMPO_LOW, GMPO_HIGH = 1 - math.exp(-0.4), math.exp(0.4) - 1

_GEOMETRIC_MEAN = r"-\left(\textstyle\prod_t \bar w_t\right)^{1/T} A, \quad \bar w = "


def _dppo_equation(*, mask_divergence: str = "tv", **_: Any) -> str:
    divergence = {
        "tv": r"\lvert\pi_\theta - \pi_\mathrm{old}\rvert",
        "kl": r"\mathrm{KL}_\mathrm{binary}(\pi_\mathrm{old}\Vert\pi_\theta)",
    }
    return rf"-M w A, \quad M = 0 \text{{ where }} (w-1)A > 0,\ {divergence[mask_divergence]} > \delta"


@LOSSES.declare(_dppo_equation)
def dppo(
    tokens: Tokens,
    *,
    mask_divergence: Literal["tv", "kl"] = "tv",
    mask_threshold: Annotated[float, Range("[0, inf]")] = 0.15,
) -> TokenLoss:
    """−M w A, f[B, T] (minimise): M drops a token's gradient if its probability moved too far (DPPO).

    w = π_θ/π_old carries the gradient, A is the advantage. M = 0 where D > δ and the policy has moved as the advantage
    asks (A > 0 and w > 1, or A < 0 and w < 1); else M = 1. M has no gradient. D compares the events "this token" and
    "another token", so D is a lower bound of the divergence over the vocabulary:

        tv   |π_θ − π_old|
        kl   π_old log(π_old/π_θ) + (1 − π_old) log((1 − π_old)/(1 − π_θ))

    Args:
      mask_divergence: D.
      mask_threshold: δ; in probability for `tv` (0.15 in the public recipe), in nats for `kl` (0.05).

    Source: arXiv:2602.04879 eq. 11 (loss), 12 (M), 13 and 14 (D). The paper's π_old is the rollout engine's own policy
    π_s: `sampler_correction="anchor"`. δ: verl-project/verl pull request 5397, which also caps w at 20 (here: e²⁰).
    """
    p, q = jnp.exp(jax.lax.stop_gradient(tokens.logprobs)), jnp.exp(tokens.behaviour_logprobs)
    divergence = jnp.abs(p - q) if mask_divergence == "tv" else _binary_kl(tokens)
    log_w, beyond = jax.lax.stop_gradient(tokens.log_w), divergence > mask_threshold
    high = beyond & (tokens.advantages > 0) & (log_w > 0)
    low = beyond & (tokens.advantages < 0) & (log_w < 0)
    region = Region(high=high, low=low, dual=jnp.zeros_like(high))
    weight = jnp.where(region.clipped, 0, tokens.w * tokens.advantages)
    return TokenLoss(weighted(weight, tokens, "differentiable"), region.events())


@LOSSES.declare(
    r"\mathrm{clip}_\mathrm{PPO}(W_t, A) \text{ at } e^{-a\sqrt t}, e^{b\sqrt t}, e^{c\sqrt t},\ W_t=\prod_{s\le t} w_s"
)
def ctpo(tokens: Tokens, *, width_low: Width = 0.025, width_high: Width = 0.05, width_dual: Width = 0.05) -> TokenLoss:
    """PPO's clip of the prefix's ratio W_t = Π_{s≤t} w_s, in a window that grows with √t; f[B, T] (minimise).

        max(−W_t A, −clip(W_t, e^(−a√t), e^(b√t)) A),   where A < 0 at most −A e^(c√t)

    a, b and c are `width_low`, `width_high` and `width_dual`; w = π_θ/π_old, A is the advantage, t counts a
    completion's trained tokens from 1. W_t turns a mean over prefixes of π_old into a mean over prefixes of π_θ. Where
    nothing is clipped the gradient is −W_t A ∇log π_θ(a_t): earlier tokens get no gradient through W_t.

    Source: CTPO, arXiv:2605.07331; horizon-llm/CTPO at acc4021, `cum-token-cumprod-la`, with log W_t ≤ 10; here ≤ 20.
    """
    ones = jnp.ones_like(tokens.log_w)
    prefix, place = (masking.completion_scan(x, tokens.mask, tokens.completion_ids) for x in (tokens.log_w, ones))
    log_w = tokens.log_w + jax.lax.stop_gradient(prefix - tokens.log_w)
    root = jnp.sqrt(place)
    bounds = Bounds(-jnp.expm1(-width_low * root), jnp.expm1(width_high * root), jnp.exp(width_dual * root))
    values, region = ppo_dual_clip(bounded_exp(log_w), tokens.advantages, bounds)
    return TokenLoss(values, region.events())


@LOSSES.declare(r"-w A + \tfrac{\lvert A\rvert}{2\delta} \pi_\mathrm{old} (w-1)^2")
def drpo(tokens: Tokens, *, trust_region: Width = 0.15) -> TokenLoss:
    """−w A + |A|/(2δ) π_old (w − 1)², f[B, T] (minimise): DPPO's region in probability, left smoothly (DRPO).

    w = π_θ/π_old, A is the advantage. The gradient −w A (1 − sign(A) (π_θ − π_old)/δ) ∇log π_θ fades to 0 as the
    token's probability moves by δ in the direction of A. Beyond δ the gradient pulls the probability back, where DPPO
    has none. δ is `trust_region`, in probability. The default is DPPO's threshold: the paper's value was not read.

    Source: arXiv:2606.09821; the objective and its gradient weight as two independent reviews of the paper print them.
    """
    moved = jnp.exp(tokens.behaviour_logprobs) * (tokens.w - 1) ** 2 / (2 * trust_region)
    return TokenLoss(-tokens.w * tokens.advantages + abs(tokens.advantages) * moved)


def _binary_kl(tokens: Tokens) -> jax.Array:
    """KL(π_old‖π_θ) of the two events "this token" and "another token"; f[B, T], nats, no gradient."""
    log_p, log_q = jax.lax.stop_gradient(tokens.logprobs), tokens.behaviour_logprobs
    tiny = jnp.finfo(log_p.dtype).tiny  # where rounding leaves no probability for another token
    other_p, other_q = (jnp.maximum(-jnp.expm1(x), tiny) for x in (log_p, log_q))
    return jnp.exp(log_q) * (log_q - log_p) + other_q * (jnp.log(other_q) - jnp.log(other_p))


@LOSSES.declare(
    r"-\tfrac{4}{\tau} \sigma(\tau (w - 1)) A, \quad \tau = \tau_\pm \text{ by the sign of } A",
    aggregate="sequence_mean_token_mean",
)
def sapo(tokens: Tokens, *, tau_positive: Temperature = 1.0, tau_negative: Temperature = 1.05) -> TokenLoss:
    """−(4/τ) σ(τ(w − 1)) A, f[B, T] (minimise): a smooth gate in place of a clip (SAPO, arXiv:2511.20347 eq. 5 and 6).

    w = π_θ/π_old, A is the advantage. The gradient is −4 p (1 − p) w A ∇log π_θ with p = σ(τ(w − 1)). For every τ it is
    the gradient of −wA at w = 1, and fades as w moves away. τ is `tau_positive` where A > 0, else `tau_negative`.
    """
    log_w = jnp.where(tokens.log_w < OVERFLOW, tokens.log_w, OVERFLOW)
    tau = jnp.where(tokens.advantages > 0, tau_positive, tau_negative).astype(log_w.dtype)
    return TokenLoss(-4 / tau * jax.nn.sigmoid(tau * (bounded_exp(log_w) - 1)) * tokens.advantages)


@LOSSES.declare(
    _GEOMETRIC_MEAN + r"\min(w, 1+\varepsilon_2) \text{ or } \max(w, 1-\varepsilon_1) \text{ by the sign of } A",
    aggregate="sequence_mean_token_mean",
)
def gmpo(tokens: Tokens, *, clip_low: ClipLow = GMPO_LOW, clip_high: ClipHigh = GMPO_HIGH) -> TokenLoss:
    """−A · (Π_t w̄_t)^(1/T), f[B, T] (minimise): the geometric mean of T token ratios, each clipped (GMPO).

    w̄ = min(w, 1 + ε₂) where A > 0, max(w, 1 − ε₁) where A < 0, with ε₁ = `clip_low`, ε₂ = `clip_high`, w = π_θ/π_old
    and A the advantage. Beyond its bound a token has no gradient, but the other tokens of its completion have. GSPO
    clips after the mean. Every token of a completion carries the loss of its completion, so `sequence_mean_token_mean`
    is the paper's mean over completions.

    Source: arXiv:2507.20673, as TRL's documentation prints it (commit f2cd577); its code, callsys/GMPO at 205b2bf.
    """
    bounds, loses = Bounds(clip_low, clip_high, None), tokens.advantages < 0
    low, high = (loses & (tokens.w < bounds.lower)), ((tokens.advantages > 0) & (tokens.w > bounds.upper))
    region = Region(high=high, low=low, dual=jnp.zeros_like(high))
    log_lower, log_upper = (jnp.log(jnp.asarray(x, tokens.log_w.dtype)) for x in (bounds.lower, bounds.upper))
    log_bounded = region.select(log_upper, log_lower, 0.0, tokens.log_w)
    log_mean = masking.completion_mean(log_bounded, tokens.mask, tokens.completion_ids)
    return TokenLoss(-bounded_exp(log_mean) * tokens.advantages, region.events())


@LOSSES.declare(
    r"-A \log\pi_\theta + \tfrac{\beta}{2} (\log r_x)^2 \text{ of the completion } x",
    aggregate="sequence_mean_token_sum",
)
def opmd(
    tokens: Tokens, *, kl_coef: KLCoef = 0.1, penalty_level: Literal["completion", "token"] = "completion"
) -> TokenLoss:
    """−A log π_θ + (β/2)(log r)², f[B, T] (minimise): mirror descent with a squared log-ratio (Kimi k1.5).

        completion   r_x = Π_t r_t; token t carries (β/2) log r_x log r_t, and their sum over t is (β/2)(log r_x)²
        token        (β/2)(log r_t)², as `dro` of verl (commit 1dda039)

    β is `kl_coef`, `penalty_level` chooses the line; A is the advantage, r = π_θ/π_ref (π_old without `ref_logprobs`).
    The gradient is −(A − β log r) ∇log π_θ, without an importance weight: the loss is the squared error of β log r
    against A over completions of π_old. With `completion` the optimum has β log r + λw = A, λ = −β E_old[log r]: the
    optimum for a mixture of KL and χ², not for KL alone (arXiv:2602.05933).

    Source: arXiv:2501.12599 section 2.3.2, the gradient of the surrogate, with β = τ and π_ref for the policy at the
    start of the iteration. Kimi K2 (arXiv:2507.20534) states the squared error itself.
    """
    log_r = tokens.log_r
    of_level = log_r
    if penalty_level == "completion":
        of_level = masking.completion_sum(log_r, tokens.mask, tokens.completion_ids)
    return TokenLoss(-tokens.advantages * tokens.logprobs + 0.5 * kl_coef * of_level * log_r)
