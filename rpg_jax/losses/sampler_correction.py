r"""Corrections of a loss whose tokens were drawn from π_s, the rollout engine's numerics, and not from π_old.

    u = π_old/π_s of a token,  u_x = Π_t u_t of its completion,  ū = u_x^(1/T)

A correction multiplies each token's whole loss, KL term included, by a constant weight. A token of weight 0 still
counts in the aggregate's divisor, as in the objectives of the papers named below.

A kind that *carries a ratio* has u, or u_x, as a factor of its weight. Then within its bounds π_old cancels:
w·u = π_θ/π_s whichever policy π_old is, so stale tokens may take the trainer's present policy as π_old. With the other
kinds the gradient has w alone, so π_old must be the policy that sampled (`training.loop.Algorithm`).

Per token given its prefix, `truncate` and `mask` correct within their bounds. An objective of whole completions, rpg
with `level="sequence"` and `weight="product"`, needs `sequence`: a token's own u leaves out the other tokens.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses.declaration import Declared, Table, keywords, lookup
from rpg_jax.losses.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Correction:
    """The tokens that the loss sees, the constant weight of each token's loss, f[B, T] or one number for all, and the
    events of the correction, as in `TokenLoss`."""

    tokens: Tokens
    weight: jax.Array | float
    events: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


Carried = Literal["token", "completion"]


@dataclasses.dataclass(frozen=True)
class Kind(Declared):
    """A declared correction. `carries` is the ratio that is a factor of its weight, as `carried_ratio` says."""

    carries: Carried | None = None


SAMPLER_CORRECTIONS = Table(Kind)


@SAMPLER_CORRECTIONS.declare(r"\min(u, h)", carries="token")
def truncate(tokens: Tokens, *, high: float = 2.0) -> Correction:
    """Weight min(u, `high`), u = π_old/π_s: truncated importance sampling, exact per token for `high` = ∞. Source:
    fengyao.notion.site/off-policy-rl."""
    u = jnp.exp(tokens.log_sampler_ratio)
    return Correction(tokens, jnp.minimum(u, high), {"sampler_ratio_truncated": u > high})


@SAMPLER_CORRECTIONS.declare(r"u \cdot [l \le u \le h]", carries="token")
def mask(tokens: Tokens, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """Weight u = π_old/π_s where low ≤ u ≤ high, else 0: IcePop (arXiv:2510.18855), masked importance sampling."""
    u = jnp.exp(tokens.log_sampler_ratio)
    return _kept(tokens, u, (u >= low) & (u <= high))


@SAMPLER_CORRECTIONS.declare(r"u_x \cdot [l \le u_x \le h]", carries="completion")
def sequence(tokens: Tokens, *, low: float = 0.5, high: float = 2.0) -> Correction:
    """Weight u_x where low ≤ u_x ≤ high, else 0; u_x is the product of u = π_old/π_s over the completion. Exact for
    completions if none is rejected. u_x falls or grows with the length, so the bounds reject long completions first
    (Seq-MIS of verl, commit 1dda039)."""
    u = jnp.exp(masking.completion_sum(tokens.log_sampler_ratio, tokens.mask, tokens.completion_ids))
    return _kept(tokens, u, (u >= low) & (u <= high))


@SAMPLER_CORRECTIONS.declare(r"[l \le \bar u \le h]")
def geometric(tokens: Tokens, *, low: float = 0.999, high: float = 1.001) -> Correction:
    """Weight 1 where low ≤ ū ≤ high, else 0; ū: geometric mean of a completion's π_old/π_s (Geo-RS, verl 1dda039)."""
    u = jnp.exp(masking.completion_mean(tokens.log_sampler_ratio, tokens.mask, tokens.completion_ids))
    return _kept(tokens, jnp.ones_like(u), (u >= low) & (u <= high))


@SAMPLER_CORRECTIONS.declare(r"[A \ge 0 \text{ or } (\textstyle\prod_t \pi_\theta/\pi_s)^{1/T} \ge l]")
def off_policy(tokens: Tokens, *, low: float = math.exp(-0.5)) -> Correction:
    """Weight 0 for tokens with A < 0 of a completion whose mean of log(π_s/π_θ) is above δ = −log `low`; else 1. The
    source, arXiv:2512.02556 (DeepSeek-V3.2), says "off-policy sequence masking" and gives no δ; TRL suggests 0.5 nats a
    token (commit f2cd577). The ratio π_s/π_θ holds the sampler's gap and the drift of the policy."""
    log_ratio = jax.lax.stop_gradient(tokens.log_w) + tokens.log_sampler_ratio
    ratio = jnp.exp(masking.completion_mean(log_ratio, tokens.mask, tokens.completion_ids))
    return _kept(tokens, jnp.ones_like(ratio), (tokens.advantages >= 0) | (ratio >= low))


@SAMPLER_CORRECTIONS.declare(r"1, \text{ with } \pi_s \text{ in place of } \pi_\mathrm{old}")
def anchor(tokens: Tokens) -> Correction:
    """π_s takes the place of π_old in every ratio: w = π_θ/π_s, clips included (arXiv:2602.04879, section 5.2). Without
    `ref_logprobs` the reference is the behaviour policy, so the reference becomes π_s too."""
    assert tokens.sampler_logprobs is not None
    return Correction(dataclasses.replace(tokens, behaviour_logprobs=tokens.sampler_logprobs), 1.0)


def _kept(tokens: Tokens, weight: jax.Array, kept: jax.Array) -> Correction:
    return Correction(tokens, jnp.where(kept, weight, 0), {"sampler_rejected": ~kept})


def carried_ratio(kind: str | None) -> Carried | None:
    """The ratio in the weight of the correction `kind`: "token" for u = π_old/π_s, "completion" for the product of u
    over the completion, None for neither or if `kind` is None. Raises ValueError for an unknown `kind`."""
    return None if kind is None else lookup(SAMPLER_CORRECTIONS, "sampler_correction", kind).carries


def correct(tokens: Tokens, kind: str | None, **bounds: Any) -> Correction:
    """Applies the correction `kind`, a name of `SAMPLER_CORRECTIONS`; None gives the same tokens with weight 1.

    `bounds` are `low` and `high` of the ratio; None is the correction's default. Raises ValueError if `kind` is unknown
    or does not take a bound that is not None, low is not below high, or `tokens.sampler_logprobs` is None. With `kind`
    None only a bound that is not None raises.
    """
    given = {name: value for name, value in bounds.items() if value is not None}
    if kind is None:
        if given:
            raise ValueError(f"sampler_{[*given][0]} bounds a sampler_correction: name one, or leave the bound unset")
        return Correction(tokens, 1.0)
    function = lookup(SAMPLER_CORRECTIONS, "sampler_correction", kind).function
    own = {name: parameter.default for name, parameter in keywords(function).items()}
    for name, value in given.items():
        if name not in own:
            raise ValueError(f"sampler_correction={kind!r} has no sampler_{name}; leave it unset (got {value})")
    own |= given
    if not own.get("low", 0) < own.get("high", math.inf):
        raise ValueError(f"sampler_low must be below sampler_high, got {own['low']} and {own['high']}")
    if tokens.sampler_logprobs is None:
        raise ValueError(f"sampler_correction={kind!r} needs sampler_logprobs; pass them or switch it off with None")
    return function(tokens, **own)
