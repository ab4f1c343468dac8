"""Regularized policy gradients: the losses of "On the Design of KL-Regularized Policy Gradient Algorithms for LLM
Reasoning" (arXiv:2505.17508), for any reference policy.

    J(θ) = E_{π_θ}[R] − β D                objective
    ∇J   = E_{π_old}[G ∇log π_θ]           G = wA − βK, with K of `divergences`
    A_reg = G / w = A − β K/w              regularized advantage

`paper` is the paper's form. `verl.verl` is the form of its public code.
"""

import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from rpg_jax import masking
from rpg_jax.losses import clipping, completions
from rpg_jax.losses.clipping import Bounds, weighted
from rpg_jax.losses.completions import GradientWeights
from rpg_jax.losses.declaration import LOSSES, ClipDual, ClipHigh, ClipLow, KLCoef, Range, TokenLoss
from rpg_jax.losses.divergences import DIVERGENCES, Divergence, gradient_weight
from rpg_jax.losses.tokens import Tokens, bounded_exp
from rpg_jax.losses.verl import verl

Weight = Literal["token", "product", "capped", "none"]


def equation(
    *,
    divergence: str,
    estimator: str,
    clip: str = "dual",
    level: str = "token",
    weight: str = "token",
    kl_ratio: str = "present",
    **_: Any,
) -> str:
    """The loss of a token; without a clip C = w. For completions C is their importance weight, and r_x their ratio."""
    x = {"differentiable": r"\pi_\theta / \mathrm{sg}(\pi_\theta)", "reinforce": r"\log\pi_\theta"}[estimator]
    loss, d = rf"-\mathrm{{sg}}(C A_\mathrm{{reg}}) {x}", DIVERGENCES[divergence]
    if level == "token" and clip in ("none", "reward"):
        kl = rf"\beta ({d.value})" if estimator == "differentiable" else rf"\beta \mathrm{{sg}}({d.weight}) {x}"
        return rf"-\mathrm{{sg}}(C A) {x} + {kl}"
    if level == "token":
        return rf"{loss}, \quad K = {d.weight}"
    c = {"token": "w", "product": "W", "capped": r"\min(W, C_\max)", "none": "1"}[weight]
    if level == "to_go":
        return rf"{loss}, \quad C = {c}, \quad K = {d.weight} + F"
    a, b, forward = d.of_completions()
    ratio = r"\log r_x" if kl_ratio == "present" else r"\log(\pi_\mathrm{old}/\pi_\mathrm{ref})(x)"
    reverse = " + ".join(term for term, factor in ((ratio, a), ("1", b)) if factor) if a or b else ""
    half = r"\tfrac12 " if a == 0.5 else ""
    terms = (rf" - \beta {half}({reverse})" if reverse else "") + (
        rf" + \beta {half}\rho_{{\le t}} / C" if forward else ""
    )
    return rf"{loss}, \quad C = {c}, \quad A_\mathrm{{reg}} = A{terms}"


# The aggregates in which every completion counts with the sum over its tokens, whatever its length.
TOKEN_SUMS = ("sequence_mean_token_sum", "constant")


def check_aggregate(*, aggregate: str, level: str = "token", **_: Any) -> None:
    if level != "token" and aggregate not in TOKEN_SUMS:
        raise ValueError(
            f"aggregate={aggregate!r} weights a completion by its length, so level={level!r} would not have the "
            f"gradient of completions: use aggregate={' or '.join(map(repr, TOKEN_SUMS))}"
        )


@LOSSES.declare(equation, check_aggregate=check_aggregate)
def rpg(
    tokens: Tokens,
    *,
    divergence: Annotated[str, DIVERGENCES] = "urkl",
    estimator: Literal["differentiable", "reinforce"] = "reinforce",
    clip: Literal["none", "dual", "dual_through", "truncate", "reward"] = "dual",
    form: Literal["paper", "verl"] = "paper",
    level: Literal["token", "sequence", "to_go"] = "token",
    weight: Weight = "token",
    weight_cap: Annotated[float, Range("(0, inf)")] = 2.0,
    kl_ratio: Literal["present", "behaviour"] = "present",
    trace_decay: Annotated[float, Range("[0, 1]")] = 1.0,
    trace_cap: Annotated[float, Range("(0, inf]")] = 1.0,
    kl_coef: KLCoef = 1e-4,
    behaviour_mass: Annotated[float, Range("(0, inf)")] = 1.0,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    clip_dual: ClipDual = 10.0,
) -> TokenLoss:
    """The RPG loss per token.

    Args:
      tokens: log-probabilities, advantages and mask; without `ref_logprobs` the reference is the behaviour policy.
      divergence: D.
      estimator: `differentiable` (Tables 1 and 4) or `reinforce` (Table 2, Appendix F); the same gradient per token
        for `form="paper"`.
      clip: `none`, `dual` (Algorithms 1 and 2), `dual_through` (Algorithm 1 as printed, where the gradient also flows
        through A_reg), `truncate` (eq. 4.1) or `reward` (the reward term alone is clipped).
      form: `paper`, or `verl` for the public code's functions.
      level: the objective's sample: a `token` given its prefix, or the completion, by its regularized return
        (`sequence`) or by the chain rule (`to_go`); see `completions`. With `group_ids` of `policy_loss`, `sequence`
        subtracts the KL's leave-one-out baseline.
      weight, weight_cap: the importance weight of completions. `product` is W, exact, and has no clip; `capped`
        min(W, cap); `token` w; `none` 1.
      kl_ratio: the policy in the log r of `sequence`: the `present` one, or `behaviour` for KL in the reward.
      trace_decay, trace_cap: λ and c̄ of `to_go`.
      kl_coef: β.
      behaviour_mass: Z = ∫ π_old, a factor of the loss for a behaviour policy that is not normalized.
      clip_low, clip_high, clip_dual: ε₁, ε₂ and c (None: no dual bound).

    Returns:
      f[B, T], to be minimised. ∇L = −Z · G ∇log π_θ where nothing is clipped; the gradient reaches `logprobs` only.

    Raises:
      ValueError: options that no form, level or estimator has together.

    Source: arXiv:2505.17508, sections 3 and 4; a reference other than π_old and the levels of completions are ours.
    """
    bounds = Bounds(clip_low, clip_high, clip_dual)
    _check_together(tokens, estimator, clip, form, level, weight, kl_ratio)
    if level == "token":
        result = {"paper": paper, "verl": verl}[form](tokens, divergence, estimator, clip, kl_coef, bounds)
    else:
        options = completions.Options(kl_coef, weight, weight_cap, kl_ratio, trace_decay, trace_cap)
        result = of_completions(tokens, divergence, estimator, clip, level, options, bounds)
    return TokenLoss(behaviour_mass * result.values, result.events)


def _check_together(
    tokens: Tokens, estimator: str, clip: str, form: str, level: str, weight: str, kl_ratio: str
) -> None:
    if clip == "dual_through" and (estimator, level, form) != ("differentiable", "token", "paper"):
        raise ValueError(
            "clip='dual_through', Algorithm 1 as printed, needs estimator='differentiable', level='token' and "
            "form='paper'; otherwise use clip='dual'"
        )
    if form == "verl" and level != "token":
        raise ValueError(f"form='verl' has tokens only: with level={level!r} use form='paper'")
    if level == "token" and weight != "token":
        raise ValueError(f"weight={weight!r} is one of completions: use level='sequence' or 'to_go'")
    if weight == "product" and clip != "none":
        raise ValueError(
            f"weight='product' is the exact weight of a completion, which clip={clip!r} would bound: use clip='none', "
            "or another weight"
        )
    if level != "sequence" and (kl_ratio != "present" or tokens.group_ids is not None):
        raise ValueError(f"kl_ratio={kl_ratio!r} and group_ids need level='sequence', not {level!r}")


def paper(tokens: Tokens, divergence: str, estimator: str, clip: str, kl_coef: KLCoef, bounds: Bounds) -> TokenLoss:
    """The losses of the paper: `clipped` weights of tokens, or the differentiable surrogate −wA + βd.

    `dual_through` has the gradient of −w A_reg where nothing is clipped, through A_reg too: −wA + βK.
    """
    d, unit = DIVERGENCES[divergence], jnp.zeros_like(tokens.log_w)
    kl_weight = kl_coef * gradient_weight(d, tokens.log_w, tokens.log_rho)
    regularized = tokens.advantages - kl_coef * gradient_weight(d, unit, -tokens.log_r)
    weights = GradientWeights(tokens.w, kl_weight, regularized)
    if clip == "dual_through":
        value, region = -tokens.w * tokens.advantages + kl_weight, clipping.rpg_region(regularized, tokens.w, bounds)
        stopped = clipped(tokens, weights, estimator, "dual", bounds).values
        return TokenLoss(jnp.where(region.clipped, stop_gradient(stopped), value), region.events())
    if estimator == "differentiable" and clip in ("none", "reward"):
        reward, events = clipping.reward_term(tokens, tokens.w, estimator, clip, bounds)
        return TokenLoss(reward + kl_coef * d(tokens.log_w, tokens.log_rho), events)
    return clipped(tokens, weights, estimator, clip, bounds)


def clipped(tokens: Tokens, weights: GradientWeights, estimator: str, clip: str, bounds: Bounds) -> TokenLoss:
    """A loss with the gradient −G ∇log π_θ, G = ratio · A − κ with κ the KL's weight, under a clip.

        none       −SG(G) x
        dual       −SG(C A − κ) x       no gradient where C is a bound
        truncate   −SG(C A_reg) x       the gradient never vanishes
        reward     −SG(C A) x + SG(κ) x, no gradient of the first term where C is a bound

    x is log π_θ (`reinforce`) or π_θ/SG(π_θ) (`differentiable`). C is the ratio, or the bound 1 + ε₂, 1 − ε₁ or c that
    the sign of the advantage makes effective: Algorithm 2, lines 19–34, which also have the value C A − κ.
    """
    ratio, kl_weight, regularized = weights
    if clip in ("none", "reward"):
        reward, events = clipping.reward_term(tokens, ratio, estimator, clip, bounds)
        return TokenLoss(reward + weighted(-kl_weight, tokens, estimator), events)
    region = clipping.rpg_region(regularized, ratio, bounds)
    bound = region.select(bounds.upper, bounds.lower, bounds.dual_upper, ratio)
    # ratio · A − κ rather than ratio · A_reg: K/w overflows first where the policy has left the reference far behind.
    weight = bound * tokens.advantages - kl_weight
    if clip == "truncate":
        weight = jnp.where(region.clipped, bound * regularized, weight)
        return TokenLoss(weighted(weight, tokens, estimator), region.events())
    return TokenLoss(weighted(weight, tokens, estimator, region.clipped), region.events())


def of_completions(
    tokens: Tokens,
    divergence: str,
    estimator: str,
    clip: str,
    level: str,
    options: completions.Options,
    bounds: Bounds,
) -> TokenLoss:
    """The losses of completions: `clipped` weights of `completions`, or the differentiable surrogate."""
    d = DIVERGENCES[divergence]
    if level == "to_go":
        return clipped(tokens, completions.to_go(tokens, d, options), estimator, clip, bounds)
    if tokens.group_ids is not None:
        tokens = tokens.plus_advantages(completions.grouped_kl_baseline(tokens, d, options.kl_coef))
    if (estimator, clip, options.weight, options.kl_ratio) == ("differentiable", "none", "product", "present"):
        return TokenLoss(completion_surrogate(tokens, d, options.kl_coef))
    return clipped(tokens, completions.sequence(tokens, d, options), estimator, clip, bounds)


def completion_surrogate(tokens: Tokens, divergence: Divergence, kl_coef: KLCoef) -> jax.Array:
    """−WA + β d(log W, log ρ_x) of a completion, the differentiable surrogate, shared out over its T tokens; f[B, T].

    Summed over tokens it is exact as `completions.sequence` with weight W is; a forward divergence here has ρ_x.
    """
    mean = functools.partial(masking.completion_mean, mask=tokens.mask, completion_ids=tokens.completion_ids)
    total = functools.partial(masking.completion_sum, mask=tokens.mask, completion_ids=tokens.completion_ids)
    log_w, log_rho = total(tokens.log_w), total(tokens.log_rho)
    length = jnp.maximum(total(jnp.ones_like(log_w)), 1)
    return (-bounded_exp(log_w) * mean(tokens.advantages) + kl_coef * divergence(log_w, log_rho)) / length


def kl_baseline(
    log_ratios: jax.Array,
    *,
    counted: jax.Array | None = None,
    divergence: str = "urkl",
    kl_coef: KLCoef = 1e-4,
    level: str = "token",
    **_: Any,
) -> jax.Array:
    """What `rpg` with these hyperparameters lacks in its advantages if nobody gives it `group_ids`; f[P, G].

    `completions.kl_baseline` for level `sequence`, and 0 for other levels, which have no return of the KL.

    Args:
      log_ratios: f[P, G], Σ_t log(π_old/π_ref) of each completion.
      counted: bool[P, G], the completions that are trained; None: all.
    """
    if level != "sequence":
        return jnp.zeros_like(log_ratios)
    return completions.kl_baseline(DIVERGENCES[divergence], log_ratios, kl_coef, counted)
