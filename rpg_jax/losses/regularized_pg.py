"""Regularized policy gradients: the losses of "On the Design of KL-Regularized Policy Gradient Algorithms for LLM
Reasoning" (arXiv:2505.17508), for any reference policy.

    J(θ) = E_{π_θ}[R] − β D                objective
    ∇J   = E_{π_old}[G ∇log π_θ]           G = wA − βK, with K of `divergences`
    A_reg = G / w = A − β K/w              regularized advantage

`rpg_tokens` has the paper's losses of tokens, `rpg_completions` the losses of whole completions, and `verl.verl_form`
the losses of the paper's public code. `rpg` is the row of the registry, which chooses one of the three.
"""

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from rpg_jax.losses import clipping, completions
from rpg_jax.losses.clipping import Bounds, weighted
from rpg_jax.losses.completions import GradientWeights
from rpg_jax.losses.declaration import (
    LOSSES,
    ClipDual,
    ClipHigh,
    ClipLow,
    KLCoef,
    Range,
    TokenLoss,
    check,
    declared,
    keywords,
    passes_on_to,
)
from rpg_jax.losses.divergences import DIVERGENCES, Divergence, gradient_weight
from rpg_jax.losses.tokens import Tokens, bounded_exp
from rpg_jax.losses.verl import verl_form

Estimator = Literal["differentiable", "reinforce", "exact"]
Weight = Literal["token", "product", "capped", "none"]


def equation(
    *,
    divergence: str = "urkl",
    estimator: str = "reinforce",
    clip: str = "dual",
    level: str = "token",
    weight: str = "token",
    kl_ratio: str = "present",
    **_: Any,
) -> str:
    """LaTeX of a token's loss with these hyperparameters of `rpg`; others are ignored. C is w without a clip; for
    completions C is their importance weight, and r_x their ratio π_θ/π_ref."""
    x = r"\pi_\theta / \mathrm{sg}(\pi_\theta)" if estimator == "differentiable" else r"\log\pi_\theta"
    loss, d = rf"-\mathrm{{sg}}(C A_\mathrm{{reg}}) {x}", DIVERGENCES[divergence]
    if estimator == "exact":  # D(s) is the divergence at the prefix s, P the prefix's weight
        prefix, ahead = (r"\mathrm{sg}(P)\, ", r" - \beta P F") if level == "to_go" else ("", "")
        return rf"-\mathrm{{sg}}(C A{ahead}) \log\pi_\theta + \beta {prefix}{d.objective}(s)"
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
    """Raises ValueError unless `level` is "token" or `aggregate` in `TOKEN_SUMS`: gradients would depend on lengths."""
    if level != "token" and aggregate not in TOKEN_SUMS:
        raise ValueError(
            f"aggregate={aggregate!r} weights a completion by its length, so level={level!r} would not have the "
            f"gradient of completions: use aggregate={' or '.join(map(repr, TOKEN_SUMS))}"
        )


def rpg_tokens(
    tokens: Tokens,
    *,
    divergence: Annotated[str, DIVERGENCES] = "urkl",
    estimator: Estimator = "reinforce",
    clip: Literal["none", "dual", "dual_through", "truncate", "reward"] = "dual",
    kl_coef: KLCoef = 1e-4,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    clip_dual: ClipDual = 10.0,
) -> TokenLoss:
    """The losses of the paper, f[B, T] (minimise): one token given its prefix is the sample of the objective.

        estimator        clip="none"                   another clip
        differentiable   −wA + βd                      −SG(C A − κ) π_θ/SG(π_θ), see `clipped`
        reinforce        −SG(wA − βK) log π_θ          −SG(C A − κ) log π_θ
        exact            −SG(wA) log π_θ + β D(s)      −SG(C A) log π_θ + β D(s)

    w = π_θ/π_old, A is the advantage, κ = βK, and C is w or a bound of the clip. `clipped` has the formula of each
    clip; with `differentiable` and clip `reward` the KL term is βd. The first two estimators have the same gradient
    with the same clip: ∇L = −(wA − βK) ∇log π_θ where nothing is clipped. `exact` has the mean of this gradient's KL
    term given the prefix s: D(s) is the divergence of the two next-token distributions, summed over the vocabulary
    (`completions.prefix_divergence`). With `exact`, a clip bounds the term of the reward alone.

    Args:
      divergence: D, a name of `DIVERGENCES`, with its d and K in nats. Without `ref_logprobs` the reference is π_old.
      estimator: `differentiable` (Tables 1 and 4), `reinforce` (Table 2, Appendix F), or `exact`, which needs
        `prefix_kl` (arXiv:2504.10637).
      clip: `none`, `dual` (Algorithms 1 and 2: no gradient where C is a bound), `truncate` (eq. 4.1: the gradient never
        vanishes) or `reward` (the reward term alone is clipped). `dual_through` is Algorithm 1 as printed: where
        nothing is clipped the loss is −wA + βK, and its gradient is the gradient of −w A_reg, through A_reg too.
      kl_coef: β.
      clip_low, clip_high, clip_dual: ε₁, ε₂ and c (None: no dual bound).

    Raises ValueError for `dual_through` with another estimator, `exact` without `prefix_kl`, or `group_ids`.

    Source: arXiv:2505.17508, sections 3 and 4; a reference other than π_old is ours.
    """
    if clip == "dual_through" and estimator != "differentiable":
        raise ValueError("clip='dual_through', Algorithm 1 as printed, needs estimator='differentiable'")
    if tokens.group_ids is not None:
        raise ValueError("group_ids need level='sequence': tokens have no baseline of the KL")
    bounds, d, unit = Bounds(clip_low, clip_high, clip_dual), DIVERGENCES[divergence], jnp.zeros_like(tokens.log_w)
    if estimator == "exact":
        of_reward = clipped(tokens, GradientWeights(tokens.w, unit, tokens.advantages), "reinforce", clip, bounds)
        return of_reward.plus(kl_coef * completions.prefix_divergence(tokens, d))
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


def rpg_completions(
    tokens: Tokens,
    *,
    divergence: Annotated[str, DIVERGENCES] = "urkl",
    estimator: Estimator = "reinforce",
    clip: Literal["none", "dual", "truncate", "reward"] = "dual",
    level: Literal["sequence", "to_go"] = "sequence",
    weight: Weight = "token",
    weight_cap: Annotated[float, Range("(0, inf)")] = 2.0,
    kl_ratio: Literal["present", "behaviour"] = "present",
    trace_decay: Annotated[float, Range("[0, 1]")] = 1.0,
    trace_cap: Annotated[float, Range("(0, inf]")] = 1.0,
    kl_coef: KLCoef = 1e-4,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    clip_dual: ClipDual = 10.0,
) -> TokenLoss:
    """The losses of whole completions, f[B, T] (minimise): `clipped` with the gradient weights of `completions`.

    The gradient is −G_t ∇log π_θ where nothing is clipped, with G of `completions.sequence` or `completions.to_go`.
    With `differentiable`, `sequence`, weight `product` and `kl_ratio` "present" the loss is the surrogate −WA + βd of
    the completion. With `exact`, `to_go` sums a token's own KL over the vocabulary at the token's prefix. The KL to
    come weighs the sampled token; clip `reward` leaves it as it is, others treat it as a part of the advantage.

    Args:
      divergence, kl_coef: D, a name of `DIVERGENCES`, and β. Without `ref_logprobs` the reference is π_old.
      estimator: −SG(G) times π_θ/SG(π_θ) for `differentiable`, else times log π_θ; `exact` needs `prefix_kl`.
      clip: `none`, `dual` (no gradient where clipped), `truncate` (weight at the bound), or `reward` (not the KL).
      clip_low, clip_high, clip_dual: ε₁, ε₂ and c (None: no dual bound).
      level: the completion counts by its regularized return (`sequence`) or by the chain rule (`to_go`). With
        `group_ids`, `sequence` adds the KL's leave-one-out baseline to the advantages.
      weight, weight_cap: the importance weight of a completion. `product` is W = Π_t w_t, exact, and has no clip;
        `capped` min(W, cap); `token` w; `none` 1.
      kl_ratio: the policy in the log r of `sequence`: `present`, or the `behaviour` policy for KL in the reward.
      trace_decay, trace_cap: λ and c̄ of `to_go`.

    Raises ValueError for `product` with a clip, `behaviour` or `group_ids` with `to_go`, a trace or a cap that nothing
    reads and that is not the default, `exact` without `prefix_kl`, or `exact` with `sequence`, whose return has the
    log-ratio of the sample. Source: ours, see `completions`.
    """
    d, bounds = DIVERGENCES[divergence], Bounds(clip_low, clip_high, clip_dual)
    options = completions.Options(kl_coef, weight, weight_cap, kl_ratio, trace_decay, trace_cap, estimator == "exact")
    _check_completions(tokens, level, clip, options)
    if level == "to_go":
        of_samples = clipped(tokens, completions.to_go(tokens, d, options), estimator, clip, bounds)
        if not options.exact:
            return of_samples
        return of_samples.plus(kl_coef * completions.prefix_divergence(tokens, d, options))
    if tokens.group_ids is not None:
        tokens = tokens.plus_advantages(completions.grouped_kl_baseline(tokens, d, kl_coef))
    if (estimator, clip, weight, kl_ratio) == ("differentiable", "none", "product", "present"):
        return TokenLoss(completion_surrogate(tokens, d, kl_coef))
    return clipped(tokens, completions.sequence(tokens, d, options), estimator, clip, bounds)


def _check_completions(tokens: Tokens, level: str, clip: str, options: completions.Options) -> None:
    """Raises ValueError for hyperparameters of `rpg_completions` that contradict each other or that nothing reads."""
    if options.weight == "product" and clip != "none":
        raise ValueError(
            f"weight='product' is the exact weight of a completion, which clip={clip!r} would bound: use clip='none', "
            "or another weight"
        )
    if level == "sequence" and (options.trace_decay, options.trace_cap) != (1, 1):
        raise ValueError(f"trace_decay={options.trace_decay} and trace_cap={options.trace_cap} need level='to_go'")
    if options.weight != "capped" and options.cap != 2:
        raise ValueError(f"weight_cap={options.cap} has no effect with weight={options.weight!r}: use weight='capped'")
    if level == "to_go" and (options.kl_ratio != "present" or tokens.group_ids is not None):
        raise ValueError(f"kl_ratio={options.kl_ratio!r} and group_ids need level='sequence', not {level!r}")
    if level == "sequence" and options.exact:
        raise ValueError(
            "estimator='exact' sums the KL over the vocabulary, and level='sequence' has the log-ratio of the sampled "
            "completion in its return: use level='to_go', whose gradient is that of completions too, or 'token'"
        )


@LOSSES.declare(equation, check_aggregate=check_aggregate)
@passes_on_to(verl_form, rpg_completions, rpg_tokens)
def rpg(
    tokens: Tokens,
    *,
    form: Literal["paper", "verl"] = "paper",
    level: Literal["token", "sequence", "to_go"] = "token",
    behaviour_mass: Annotated[float, Range("(0, inf)")] = 1.0,
    **options: Any,
) -> TokenLoss:
    """Calls the loss that `level` and `form` choose, and passes the other hyperparameters to it.

        level               form    loss
        token               paper   `rpg_tokens`
        token               verl    `verl.verl_form`
        sequence or to_go   paper   `rpg_completions`

    `behaviour_mass` is Z = ∫ π_old, a factor of the loss for a behaviour policy that is not normalized.

    Raises ValueError for another pair of level and form, for a value that is not allowed, for a hyperparameter that
    only another loss reads if its value is not the default, and in the cases of the chosen loss.
    """
    chosen = rpg_completions if level != "token" else verl_form if form == "verl" else rpg_tokens
    if form == "verl" and level != "token":
        raise ValueError(f"form='verl' has tokens only: with level={level!r} use form='paper'")
    for name in options.keys() - keywords(chosen):
        if options[name] != keywords(rpg)[name].default:
            readers = {"kl_ratio": "'sequence'", "trace_decay": "'to_go'", "trace_cap": "'to_go'"}
            given = f"{name}={options[name]!r} has no effect with level={level!r}, form={form!r}"
            either = "'sequence' or 'to_go'"
            raise ValueError(f"{given}: use level={readers.get(name, either)}")
    own = {name: value for name, value in {"level": level, **options}.items() if name in keywords(chosen)}
    check("rpg", declared(chosen), own)
    result = chosen(tokens, **own)
    return TokenLoss(behaviour_mass * result.values, result.events)


def clipped(tokens: Tokens, weights: GradientWeights, estimator: str, clip: str, bounds: Bounds) -> TokenLoss:
    """A loss f[B, T] (minimise) of gradient −G ∇log π_θ where nothing is clipped; G = ratio · A − κ, A_reg = G/ratio.

        none       −SG(G) x
        dual       −SG(C A − κ) x       no gradient where C is a bound
        truncate   −SG(C A_reg) x       the gradient never vanishes
        reward     −SG(C A) x + SG(κ) x, no gradient of the first term where C is a bound

    A is the advantage and κ the KL's weight. x is log π_θ (`reinforce`, `exact`) or π_θ/SG(π_θ) (`differentiable`). C
    is the ratio, or a bound: 1 + ε₂, 1 − ε₁ or c. The sign of A_reg, for `reward` of A, decides which bound holds
    (Algorithm 2, lines 19–34, whose value is C A − κ too).
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


def completion_surrogate(tokens: Tokens, divergence: Divergence, kl_coef: KLCoef) -> jax.Array:
    """(−WA + β d(log W, log ρ_x)) / T at each of the T tokens of a completion: the differentiable surrogate; f[B, T].

    W and ρ_x are the products of π_θ/π_old and π_ref/π_old over the completion, A is its mean advantage, β `kl_coef`.
    The gradient flows through W. The sum over the tokens gives the exact gradient, as does `completions.sequence` with
    weight W. A forward divergence has ρ_x here, where `sequence` has ρ_{≤t}.
    """
    total = completions.Completions(tokens).whole
    log_w, log_rho = total(tokens.log_w), total(tokens.log_rho)
    length = jnp.maximum(total(jnp.ones_like(log_w)), 1)
    mean = total(tokens.advantages) / length
    return (-bounded_exp(log_w) * mean + kl_coef * divergence(log_w, log_rho)) / length
