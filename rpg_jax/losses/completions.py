"""RPG for completions: the gradient weights of J = E_{x~π_θ}[R(x)] − β D(π_θ, π_ref) over completions x = (a_1 … a_T).

With a divergence's K = w (a log r + b) − c ρ (`Divergence.coefficients`), `sequence` and `to_go` give G_t in ∇J =
E_{π_old}[Σ_t G_t ∇log π_θ(a_t)]. `regularized_pg.rpg_tokens` takes the prefixes as given: it leaves out the prefixes'
weights and, for reverse divergences, the KL that is still to come.

Sources: KL in the reward with a leave-one-out baseline is RLOO (arXiv:2402.14740). Weight 1 is the gradient of the
log-variance loss ½ Var_old[R − β log r_x] (VarGrad, arXiv:2010.10436; trajectory balance, arXiv:2201.13259) where the
baseline has the present log-ratios. `kl_baseline` has π_old's log-ratios, so weight 1 with it is biased off-policy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from rpg_jax import masking
from rpg_jax.losses.advantages import leave_one_out
from rpg_jax.losses.declaration import KLCoef, lookup
from rpg_jax.losses.divergences import DIVERGENCES, Divergence
from rpg_jax.losses.tokens import LARGEST_LOG_RATIO, PrefixKL, Tokens, bounded_exp


class GradientWeights(NamedTuple):
    """f[B, T] each, of a loss with the gradient −G ∇log π_θ: G = ratio · A − kl_weight, where A is the advantage and
    `kl_weight` has the factor β. `regularized` is A − kl_weight / ratio; its sign decides the clip. A loss stops the
    gradients of all three."""

    ratio: jax.Array
    kl_weight: jax.Array
    regularized: jax.Array


class Options(NamedTuple):
    """Hyperparameters of `regularized_pg.rpg_completions`; `cap` is `weight_cap`; `exact`: `estimator` is "exact"."""

    kl_coef: KLCoef
    weight: str = "token"
    cap: float = 2.0
    kl_ratio: str = "present"
    trace_decay: float = 1.0
    trace_cap: float = 1.0
    exact: bool = False


class Completions:
    """Sums and importance weights of completions, f[B, T]. The weights are constant in θ, and so are the attributes
    `log_w`, `log_rho` and `log_r`, the log-ratios of each of the `tokens`. A sum has a gradient if the terms have."""

    def __init__(self, tokens: Tokens):
        self.tokens = tokens
        self.log_w, self.log_rho, self.log_r = (stop_gradient(x) for x in (tokens.log_w, tokens.log_rho, tokens.log_r))

    def whole(self, x: jax.Array) -> jax.Array:
        """Σ_t x_t over the trained tokens of a completion, f[B, T], at each of its tokens; x is f[B, T]."""
        return masking.completion_sum(x, self.tokens.mask, self.tokens.completion_ids)

    def prefix(self, x: jax.Array) -> jax.Array:
        """Σ_{u ≤ t} x_u over the trained tokens of the completion up to token t, f[B, T]; x is f[B, T]."""
        return masking.completion_scan(x, self.tokens.mask, self.tokens.completion_ids)

    def ratio(self, options: Options) -> jax.Array:
        """The importance weight C of each token, f[B, T], by `options.weight`: 1 (`none`), the token's w = π_θ/π_old
        (`token`), W, the product of w over the token's completion (`product`), or min(W, cap) (`capped`). w and W are
        cut to e^±20: callers divide by C."""
        weight = options.weight
        if weight == "none":
            return jnp.ones_like(self.log_w)
        log_ratio = self.log_w if weight == "token" else self.whole(self.log_w)
        ratio = jnp.exp(jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        return jnp.minimum(ratio, options.cap) if weight == "capped" else ratio

    def prefix_ratio(self, options: Options) -> jax.Array:
        """The importance weight P f[B, T] of each token's prefix by `options.weight`: W_{<t} (`product`), min(W_{<t},
        cap) (`capped`), else 1. W_{<t}, at most e²⁰, is the product of π_θ/π_old over the earlier tokens."""
        if options.weight not in ("product", "capped"):
            return jnp.ones_like(self.log_w)
        ratio = bounded_exp(self.prefix(self.log_w) - self.log_w)
        return jnp.minimum(ratio, options.cap) if options.weight == "capped" else ratio

    def reference_prefix_ratio(self) -> jax.Array:
        """ρ_{<t} f[B, T], the product of π_ref/π_old over the completion's tokens before t; at most e²⁰."""
        return bounded_exp(self.prefix(self.log_rho) - self.log_rho)


def sequence(tokens: Tokens, divergence: Divergence, options: Options) -> GradientWeights:
    """The objective of whole completions: the advantage of a token is the regularized return of its completion.

        G_t = C (A − β (a log r_x + b)) + β c ρ_{≤t}

    A is the advantage, β is `kl_coef`, and a, b, c are the coefficients of the divergence. W is the product of w_t =
    π_θ/π_old over the completion, r_x the product of π_θ/π_ref. ρ_{≤t} is the product of π_ref/π_old up to t.

    `options.weight` chooses C: W (`product`: exact), min(W, cap) (`capped`), w_t (`token`) or 1 (`none`). ρ_{≤t} has
    the expectation of ρ_x, the product over all tokens, and a smaller variance. With `options.kl_ratio` "behaviour",
    π_old takes the place of π_θ in log r_x: KL in the reward. Raises ValueError for a divergence that is defined for
    tokens alone. The result has ratio = C, and is constant in θ.
    """
    x, (a, b, c) = Completions(tokens), divergence.of_completions()
    ratio, kl_coef = x.ratio(options), options.kl_coef
    log_r = x.whole(x.log_r if options.kl_ratio == "present" else -x.log_rho)
    penalty, forward = kl_coef * (a * log_r + b), kl_coef * c * bounded_exp(x.prefix(x.log_rho))
    return GradientWeights(ratio, ratio * penalty - forward, tokens.advantages - penalty + forward / ratio)


def to_go(tokens: Tokens, divergence: Divergence, options: Options) -> GradientWeights:
    """The divergence of completions by the chain rule: a token's weight has its own divergence and all later ones.

    The divergence of completions is the sum of the divergences of tokens given their prefixes. Token t decides which
    tokens follow. So its gradient weight G_t has its own divergence, and the divergence to come, F_t:

        G_t = C A − β (P_t (w_t (a log r_t + b) + F_t) − c ρ_{≤t})
        F_t = λ min(w_t, c̄) (d_{t+1} + F_{t+1}),   d_t = a w_t log r_t

    A is the advantage, β `kl_coef`; w_t = π_θ/π_old, r_t = π_θ/π_ref, and ρ_{≤t} is the product of π_ref/π_old up to t.
    a, b, c are the coefficients of the divergence. λ is `trace_decay`, c̄ `trace_cap`; they discount the divergence to
    come as GAE discounts rewards. `options.weight` chooses C (`Completions.ratio`) and the prefix's weight P_t
    (`Completions.prefix_ratio`); with `none`, the w_t of G_t is 1 too. The mass term b of a forward divergence is an
    expectation over prefixes of π_ref, and has ρ_{<t} in place of P_t.

    The gradient is exact with `product`, λ = 1 and c̄ = inf. With `token`, λ = 1 and c̄ >= 1 the gradient is exact
    on-policy. With `token`, λ = 0 and c = 0, G_t is the gradient weight of single tokens (`rpg_tokens`).

    With `options.exact`, `prefix_divergence` has the divergences of the tokens themselves. Then G_t = C A − β P_t F_t,
    and d_t = a KL(π_θ‖π_ref) at the prefix of token t, summed over the vocabulary. The result is constant in θ. Raises
    ValueError for a divergence that is defined for tokens alone, and for `options.exact` without `tokens.prefix_kl`.
    """
    x, (a, b, c) = Completions(tokens), divergence.of_completions()
    w, prefix, kl_coef = bounded_exp(x.log_w), x.prefix_ratio(options), options.kl_coef
    d = a * (stop_gradient(prefix_kl(tokens).reverse) if options.exact else w * x.log_r)
    decay = options.trace_decay * jnp.minimum(w, options.trace_cap)
    ahead = masking.completion_scan(d, tokens.mask, tokens.completion_ids, decay=decay, reverse=True) - d
    if options.exact:
        kl_weight = kl_coef * prefix * ahead
    else:
        own = jnp.ones_like(w) if options.weight == "none" else w
        reverse = prefix * (own * a * x.log_r + ahead) + (prefix if a else x.reference_prefix_ratio()) * own * b
        kl_weight = kl_coef * (reverse - c * bounded_exp(x.prefix(x.log_rho)))
    ratio = x.ratio(options)
    return GradientWeights(ratio, kl_weight, tokens.advantages - kl_weight / ratio)


def prefix_divergence(tokens: Tokens, divergence: Divergence, options: Options | None = None) -> jax.Array:
    """Each token's divergence of next-token distributions over the vocabulary, with its gradient; f[B, T], nats.

        a P_t KL(π_θ‖π_ref) + c ρ_{<t} KL(π_ref‖π_θ), at the prefix of token t; a, c are the divergence's coefficients

    P_t (`Completions.prefix_ratio`) and ρ_{<t} (`Completions.reference_prefix_ratio`) are constants; without `options`
    both are 1. The distributions are normalized, so a mass term has no gradient. Raises ValueError without
    `tokens.prefix_kl`, and for a divergence without coefficients.
    """
    a, _, c = divergence.of_completions()
    x, (reverse, forward) = Completions(tokens), prefix_kl(tokens)
    if options is None:
        return a * reverse + c * forward
    return a * x.prefix_ratio(options) * reverse + c * x.reference_prefix_ratio() * forward


def prefix_kl(tokens: Tokens) -> PrefixKL:
    """`tokens.prefix_kl`. Raises ValueError if it is None."""
    if tokens.prefix_kl is None:
        raise ValueError(
            "estimator='exact' sums the KL over the vocabulary: give prefix_kl, the field kl of what "
            "losses.token_divergences returns, or use another estimator"
        )
    return tokens.prefix_kl


def kl_baseline(
    log_ratios: jax.Array,
    *,
    counted: jax.Array | None = None,
    divergence: str = "urkl",
    kl_coef: KLCoef = 1e-4,
    level: str = "token",
    **_: Any,
) -> jax.Array:
    """The KL's part of the leave-one-out baseline of the regularized return, where `rpg` gets no `group_ids`.

        β (a mean_{j≠i} log(π_old/π_ref)(x_j) + b − c),   a, b, c the coefficients of the divergence

    This part is the mean of K over the other completions of the group at π_θ = π_old, with E[ρ] = 1 in place of ρ; the
    mean over no other completion is b − c. The mean depends neither on θ nor on x_i. So the baseline changes no
    expectation under the exact weight, and micro-batches may split a group.

    Args:
      log_ratios: f[P, G], Σ_t log(π_old/π_ref) of each of a prompt's G completions, nats. If G is 1, all are one group.
      counted: bool[P, G], the completions that the update trains on; None: all. Other completions are in no mean.
      divergence, kl_coef, level: a name of `DIVERGENCES` (else ValueError), β, and the level of `rpg`. Other
        hyperparameters of `rpg` may be passed, and are not read.

    Returns:
      f[P, G], to be added to the advantages; 0 where a completion is not counted. All are 0 at another level than
      `sequence`: the return of such a level has no KL.
    """
    if level != "sequence":
        return jnp.zeros_like(log_ratios)
    a, b, c = lookup(DIVERGENCES, "divergence", divergence).of_completions()
    shape = (1, -1) if log_ratios.shape[1] == 1 else log_ratios.shape
    rows, own = log_ratios.reshape(shape), None if counted is None else counted.reshape(shape)
    found = kl_coef * (a * (rows - leave_one_out(rows, own)).reshape(log_ratios.shape) + b - c)
    return found if counted is None else jnp.where(counted, found, 0)


def grouped_kl_baseline(tokens: Tokens, divergence: Divergence, kl_coef: KLCoef) -> jax.Array:
    """The KL's part of the leave-one-out baseline (equation at `kl_baseline`), f[B, T], the same at all tokens of a
    completion, constant in θ. Completions with equal `tokens.group_ids` are a group; AssertionError if these are None.
    A completion alone in its group is compared with all completions of `tokens`."""
    x, (a, b, c), ids = Completions(tokens), divergence.of_completions(), tokens.group_ids
    assert ids is not None, "without group_ids the advantages hold the baseline"
    log_ratios, segments = x.whole(-x.log_rho), ids.size + 1
    first = tokens.mask & (x.prefix(jnp.ones_like(log_ratios)) == 1)

    def of_group(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.where(first, values, 0).ravel(), ids.ravel(), segments)[ids]

    count, total = of_group(jnp.ones_like(log_ratios)), of_group(log_ratios)
    alone = count <= 1
    count = jnp.where(alone, jnp.sum(first), count)
    total = jnp.where(alone, masking.masked_sum(log_ratios, first), total)
    return kl_coef * (a * (total - log_ratios) / jnp.maximum(count - 1, 1) + b - c)
