"""The metrics of a loss: ratios, clip fractions, KL estimates, the ratio between trainer and sampler.

Every metric is a pair of f32 scalars (f64 for f64 inputs): (sum, weight) over unmasked tokens. `merge` adds the pairs
of micro-batches and devices, then `divided` divides once. Under keys that end in `_max` the pair is (value, 1), and
`merge` takes the maximum. Under keys that end in `_share` the pair is two sums of squares, and `divided` takes the root
of their quotient: a quotient of norms. No metric has a gradient.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from rpg_jax import masking
from rpg_jax.losses.divergences import k1, k2, k3, unnormalized_reverse_kl
from rpg_jax.losses.tokens import LARGEST_LOG_RATIO, Tokens

Metrics = dict[str, tuple[jax.Array, jax.Array]]

# Metrics show log-ratios up to here, so that exp and its square stay finite in f32.
_SHOWN = 40.0


def token_metrics(tokens: Tokens, events: dict[str, jax.Array]) -> Metrics:
    """The metrics of tokens and of their loss's `events` (name -> bool[B, T]), as name -> (sum, weight), f32 scalars.

    importance_ratio: mean w = π_θ/π_old. log_ratio_max: (max |log π_θ − log π_old|, 1). ratio_bounded_fraction: the
      fraction of tokens whose ratio the losses bound at e²⁰ (`tokens.bounded_exp`).
    kl: w·k3 = w log r − w + ρ, whose mean under π_old is KL(π_θ‖π_ref) in nats per token at the prefixes that π_old
      wrote: unbiased and never negative, except where w or ρ is bounded at e²⁰. Without `ref_logprobs` π_ref is π_old.
    kl_exact: KL(π_θ‖π_ref) of the next-token distributions in nats, summed over the vocabulary; where `prefix_kl` is
      given. `kl_exact` and `kl` have the same expectation; the sampled tokens add no noise to `kl_exact`.
    kl_k1, kl_k2, kl_k3: k1, k2 and k3 averaged over tokens of π_old without the weight w; biased if π_θ is not π_old.
    behaviour_forward_kl_k1, behaviour_forward_kl_k3: −log w and w − 1 − log w, k1 and k3 at y = π_θ/π_old. The mean of
      each under π_old is the forward KL of the update, KL(π_old‖π_θ), in nats per token; the second is never negative.
    sampler_ratio, sampler_ratio_squared: u = π_old/π_s and u², where `sampler_logprobs` are given. mean(u)² / mean(u²)
      is the effective sample size, as a fraction of the tokens.
    <event>_fraction: fraction of tokens with an event of the loss: clip, clip_high, clip_low, clip_dual, ….

    A log-ratio beyond ±40 nats counts as ±40, except in `log_ratio_max`.
    """
    tokens = dataclasses.replace(tokens, logprobs=jax.lax.stop_gradient(tokens.logprobs))
    tokens_counted = jnp.sum(tokens.mask, dtype=tokens.logprobs.dtype)

    def mean(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return masking.masked_sum(x.astype(tokens.logprobs.dtype), tokens.mask), tokens_counted

    log_w, log_rho, log_y, log_u = (
        jnp.clip(x, -_SHOWN, _SHOWN) for x in (tokens.log_w, tokens.log_rho, -tokens.log_r, tokens.log_sampler_ratio)
    )
    pairs = {
        "importance_ratio": mean(jnp.exp(log_w)),
        "log_ratio_max": (masking.masked_max(jnp.abs(tokens.log_w), tokens.mask), jnp.ones((), tokens.logprobs.dtype)),
        "ratio_bounded_fraction": mean(tokens.log_w > LARGEST_LOG_RATIO),
        "kl": mean(unnormalized_reverse_kl(log_w, log_rho)),
        "kl_k1": mean(k1(log_y)),
        "kl_k2": mean(k2(log_y)),
        "kl_k3": mean(k3(log_y)),
        "behaviour_forward_kl_k1": mean(k1(log_w)),
        "behaviour_forward_kl_k3": mean(k3(log_w)),
        **{f"{name}_fraction": mean(event) for name, event in events.items()},
    }
    if tokens.prefix_kl is not None:
        pairs["kl_exact"] = mean(jax.lax.stop_gradient(tokens.prefix_kl.reverse))
    if tokens.sampler_logprobs is not None:
        pairs |= {
            "sampler_ratio": mean(jnp.exp(log_u)),
            "sampler_ratio_squared": mean(jnp.exp(2 * log_u)),
        }
    return pairs


def merge(parts: Sequence[Metrics]) -> Metrics:
    """Joins the metrics of one or more micro-batches: adds sums and weights, and takes the maximum under `_max` keys.
    Every part must have the same keys."""
    merged = {}
    for name in parts[0]:
        values, weights = zip(*(part[name] for part in parts), strict=True)
        if name.endswith("_max"):
            merged[name] = (jnp.max(jnp.stack(values)), weights[0])
        else:
            merged[name] = (sum(values[1:], values[0]), sum(weights[1:], weights[0]))
    return merged


def divided(metrics: Mapping[str, tuple[jax.Array, jax.Array]]) -> dict[str, float]:
    """The quotient sum / weight of each metric, as floats on the host; 0 if both are 0. Waits for the devices. Under
    a key `…_max` the result is the value, undivided; under a key `…_share` the root of the quotient. Call `divided`
    once, after `merge` has summed over micro-batches: a mean of quotients depends on the split."""
    values = {}
    for name, (total, weight) in jax.device_get(dict(metrics)).items():
        quotient = float(total) if name.endswith("_max") else float(total) / (float(weight) or 1e-9)
        values[name] = math.sqrt(quotient) if name.endswith("_share") else quotient
    return values
