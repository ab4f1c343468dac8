"""`Tokens`, the input of every policy loss: log-probabilities of the sampled tokens, and ratios between policies."""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from rpg_jax import masking

# Ratios enter losses as the exponential of at most so many nats, e²⁰ = 5e8, as in the paper's public code. Beyond, one
# token's weight would be all of an update, and from 88 nats on, where f32 overflows, there would be no update at all.
LARGEST_LOG_RATIO = 20.0


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    """e^x, x f[...], at most e²⁰ (`LARGEST_LOG_RATIO`). For larger x the derivative is the bounded value, not zero."""
    return jnp.exp(log_ratio - stop_gradient(jnp.maximum(log_ratio - LARGEST_LOG_RATIO, 0)))


class PrefixKL(NamedTuple):
    """The KL of the next-token distributions at each token's prefix s, summed over the vocabulary; f[B, T], nats.
    reverse: Σ_a π_θ(a|s) log(π_θ/π_ref)(a|s). forward: Σ_a π_ref(a|s) log(π_ref/π_θ)(a|s)."""

    reverse: jax.Array
    forward: jax.Array


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The input of a loss: B rows of T sampled tokens, made by `checked`. Arrays are f32[B, T] (f64 for f64), in nats.

    `logprobs`, log π_θ, and `prefix_kl` carry a gradient; the other arrays are constants. `behaviour_logprobs` is log
    π_old; `ref_logprobs` is log π_ref (None: π_ref is π_old); `sampler_logprobs` is log π_s, of the rollout engine.
    Only the estimator `exact` and the metrics read `prefix_kl`. `mask` is bool, True at tokens that the update trains
    on. At the other tokens log-probabilities, KLs and advantages are 0, so every ratio is 1. `completion_ids` i32 tells
    a row's completions apart (None: one a row), and `group_ids` i32 (or None) is the prompt of a token's completion.
    """

    logprobs: jax.Array
    behaviour_logprobs: jax.Array
    ref_logprobs: jax.Array | None
    sampler_logprobs: jax.Array | None
    advantages: jax.Array
    mask: jax.Array
    completion_ids: jax.Array | None
    group_ids: jax.Array | None = None
    prefix_kl: PrefixKL | None = None

    def plus_advantages(self, more: jax.Array) -> "Tokens":
        """The same tokens with advantages A + `more`, f[B, T]; `more` is ignored where the mask is False, and its
        gradient is not stopped."""
        return dataclasses.replace(self, advantages=self.advantages + masking.masked_fill(more, self.mask))

    @cached_property
    def log_w(self) -> jax.Array:
        """log w = log π_θ − log π_old, the log of the importance ratio; f[B, T], with a gradient."""
        return self.logprobs - self.behaviour_logprobs

    @cached_property
    def w(self) -> jax.Array:
        """Importance ratio w = π_θ / π_old, at most e²⁰; f[B, T], with a gradient."""
        return bounded_exp(self.log_w)

    @cached_property
    def log_rho(self) -> jax.Array:
        """log ρ = log π_ref − log π_old, the log of the reference ratio; 0 without `ref_logprobs`."""
        if self.ref_logprobs is None:
            return jnp.zeros_like(self.behaviour_logprobs)
        return self.ref_logprobs - self.behaviour_logprobs

    @cached_property
    def log_r(self) -> jax.Array:
        """log r = log π_θ − log π_ref; log w without `ref_logprobs`."""
        return self.log_w if self.ref_logprobs is None else self.logprobs - self.ref_logprobs

    @cached_property
    def log_sampler_ratio(self) -> jax.Array:
        """log π_old − log π_s; 0 without `sampler_logprobs`."""
        if self.sampler_logprobs is None:
            return jnp.zeros_like(self.behaviour_logprobs)
        return self.behaviour_logprobs - self.sampler_logprobs


def checked(
    *,
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    ref_logprobs: jax.Array | None,
    sampler_logprobs: jax.Array | None,
    completion_ids: jax.Array | None,
    group_ids: jax.Array | None = None,
    prefix_kl: PrefixKL | None = None,
) -> Tokens:
    """Makes `Tokens` from raw arrays: checks shapes, writes 0 where `mask` is 0, stops the gradients of constants.

    The arguments are those of `calling.policy_loss`. `advantages` and `group_ids` may be [B], one number a row; every
    other array is [B, T]. Only `logprobs` and `prefix_kl` keep their gradient. Raises ValueError for another shape, and
    for log-probabilities in 16 bits.
    """
    logprobs, mask, advantages = jnp.asarray(logprobs), jnp.asarray(mask), jnp.asarray(advantages)
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs must be [B, T], got shape {logprobs.shape}")
    if advantages.ndim == 1 and advantages.shape[0] == logprobs.shape[0]:
        advantages = jnp.broadcast_to(advantages[:, None], logprobs.shape)
    constants = {
        "behaviour_logprobs": behaviour_logprobs,
        "ref_logprobs": ref_logprobs,
        "sampler_logprobs": sampler_logprobs,
        "advantages": advantages,
    }
    if group_ids is not None and jnp.shape(group_ids) == logprobs.shape[:1]:
        group_ids = jnp.broadcast_to(jnp.asarray(group_ids)[:, None], logprobs.shape)
    ids = {"completion_ids": completion_ids, "group_ids": group_ids}
    kl = {} if prefix_kl is None else {f"prefix_kl.{name}": x for name, x in prefix_kl._asdict().items()}
    for name, array in {"logprobs": logprobs, **constants, "mask": mask, **ids, **kl}.items():
        if array is not None and jnp.shape(array) != logprobs.shape:
            per_row = " or [B]" if name in ("advantages", "group_ids") else ""
            raise ValueError(
                f"{name} must be [B, T]{per_row} like logprobs, whose shape is {logprobs.shape}; got {jnp.shape(array)}"
            )
        if name.endswith("logprobs") and array is not None and jnp.asarray(array).dtype.itemsize < 4:
            raise ValueError(
                f"{name} are {jnp.asarray(array).dtype}, which rounds log-ratios by up to 0.03 nats: compute them in "
                "float32, from logits in float32"
            )
    dtype = jnp.promote_types(logprobs.dtype, jnp.float32)
    mask = mask != 0

    def clean(x):
        return masking.masked_fill(jnp.asarray(x).astype(dtype), mask)

    def constant(x):
        return None if x is None else stop_gradient(clean(x))

    return Tokens(
        logprobs=clean(logprobs),
        **{name: constant(x) for name, x in constants.items()},
        mask=mask,
        completion_ids=None if completion_ids is None else jnp.asarray(completion_ids),
        group_ids=None if group_ids is None else jnp.asarray(group_ids),
        prefix_kl=None if prefix_kl is None else PrefixKL(*map(clean, prefix_kl)),
    )
