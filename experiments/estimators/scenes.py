"""Policies over a handful of tokens, at chosen distances from each other: expectations are finite sums."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scene:
    """One prompt with V possible tokens, f64[V] each; a batch has a leading axis.

    π_θ has logits; `behaviour` is log π_old, `reference` is log π_ref, and `sampler` is log π_s, which really samples
    the tokens. `rewards` is R(x), +1 or -1.
    """

    logits: jax.Array
    behaviour: jax.Array
    reference: jax.Array
    sampler: jax.Array
    rewards: jax.Array


def make_scenes(
    count: int, *, tokens: int, drift: float, reference_kl: float, sampler_kl: float = 0.0, seed: int = 0
) -> Scene:
    """Makes `count` random prompts, stacked: f64[count, V] each, with V = `tokens`.

    π_old = softmax(N(0, 1)); each other policy lies on a random exponential-family line through π_old, in nats at
    KL(π_θ‖π_old) = `drift`, KL(π_ref‖π_old) = `reference_kl`, KL(π_s‖π_old) = `sampler_kl`.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        behaviour = log_softmax(rng.normal(size=tokens))
        policy, reference, sampler = (_away(behaviour, kl, rng) for kl in (drift, reference_kl, sampler_kl))
        rewards = np.where(np.arange(tokens) < tokens // 3, 1.0, -1.0)
        rows.append((policy, behaviour, reference, sampler, rng.permutation(rewards)))
    return Scene(*(jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)))


def _away(base: np.ndarray, distance: float, rng: np.random.Generator) -> np.ndarray:
    """`at_distance` in a random direction: in a line the distance grows up to -log π_base(argmax u), so that another
    direction is drawn if this is too near."""
    if distance == 0:
        return base
    direction = rng.normal(size=base.shape)
    while -base[np.argmax(direction)] < 1.2 * distance:
        direction = rng.normal(size=base.shape)
    return at_distance(base, distance, direction, _kl)


def at_distance(
    base: np.ndarray, distance: float, direction: np.ndarray, kl: Callable[[np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """log π_t, shaped as `base`: π_t ∝ π_base exp(t u) for the direction u and the t >= 0 with `kl`(π_t, π_base) =
    `distance`, nats. Raises ValueError if no t has it."""
    if distance == 0:
        return base

    def moved(t: float) -> np.ndarray:
        return log_softmax(base + t * direction, axis=-1)

    low, high = 0.0, 1.0
    while kl(moved(high), base) < distance:
        high *= 2
        if high > 1e6:
            raise ValueError(f"no policy in this direction is {distance:g} nats away: ask for less")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(moved(middle), base) < distance else (low, middle)
    return moved(high)


def reverse_kl_optimum(reference: jax.Array, rewards: jax.Array, kl_coef: float) -> jax.Array:
    """argmax_π E_π[R] − β KL(π‖π_ref): log π ∝ log π_ref + R/β; f[V]."""
    return jax.nn.log_softmax(reference + rewards / kl_coef)


def forward_kl_optimum(reference: jax.Array, rewards: jax.Array, kl_coef: float) -> jax.Array:
    """argmax_π E_π[R] − β KL(π_ref‖π): π = β π_ref / (λ − R), with the λ > max R for which Σ π = 1; log π, f[V]."""
    scaled = kl_coef * jnp.exp(reference)
    # Σ β π_ref / (λ − R) falls with λ: it is above 1 at max R + β π_ref of that token and at most 1 at max R + β.
    low = jnp.max(rewards) + jnp.min(scaled) * 1e-6
    high = jnp.max(rewards) + kl_coef

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        above = jnp.sum(scaled / (middle - rewards)) > 1
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    _, multiplier = jax.lax.fori_loop(0, 200, halve, (low, high))
    return jax.nn.log_softmax(jnp.log(scaled) - jnp.log(multiplier - rewards))


def kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p‖q) of log-probabilities f[V], nats."""
    return jnp.sum(jnp.exp(p) * (p - q))


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(np.exp(p) * (p - q)))


def divergence_to(divergence: str | None, policy: jax.Array, reference: jax.Array) -> jax.Array:
    """`reverse`: KL(π_θ‖π_ref); `forward`: KL(π_ref‖π_θ), nats; 0 for None."""
    if divergence is None:
        return jnp.zeros(())
    return kl(policy, reference) if divergence == "reverse" else kl(reference, policy)
