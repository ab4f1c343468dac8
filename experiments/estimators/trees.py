"""Completions of a few actions, all enumerated: a tabular policy has a softmax at every prefix.

A policy is a table f[S, V] of log-probabilities: S prefixes, V actions. N = V^T completions of T actions each.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax


@dataclasses.dataclass(frozen=True)
class Tree:
    """Every completion of `length` actions out of `actions`, in lexicographic order; prefixes by length, then so."""

    actions: int
    length: int

    @property
    def prefixes(self) -> int:
        return sum(self.actions**t for t in range(self.length))

    def along(self, table: jax.Array) -> jax.Array:
        """The entries of a table f[S, V] that each completion passes: f[N, T]."""
        levels = jnp.split(table, np.cumsum([self.actions**t for t in range(self.length - 1)]))
        return jnp.stack([jnp.repeat(x.ravel(), self.actions**self.length // x.size) for x in levels], axis=1)

    def at_prefixes(self, table: jax.Array) -> jax.Array:
        """The rows of a table f[S, V] at the prefixes that each completion passes: f[N, T, V]."""
        if self.length == 1:  # as below, and compiles in a fraction of the time
            return jnp.broadcast_to(table, (self.actions, *table.shape))
        return jnp.stack([self.along(jnp.broadcast_to(x[:, None], table.shape)) for x in table.T], axis=-1)

    def through(self, masses: jax.Array) -> jax.Array:
        """The sum of f[N] over the completions that pass each entry of a table: f[S, V]."""
        levels = [masses.reshape(self.actions ** (t + 1), -1).sum(1) for t in range(self.length)]
        return jnp.concatenate(levels).reshape(-1, self.actions)

    def completions(self, policy: jax.Array) -> jax.Array:
        """log π(x) of every completion, f[N]."""
        return jnp.sum(self.along(policy), axis=1)

    def policy(self, completions: jax.Array) -> jax.Array:
        """The policy f[S, V] of a distribution over completions, log f[N]."""
        return jax.nn.log_softmax(jnp.log(self.through(jnp.exp(completions))))

    def kl(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """KL(p‖q) over completions of two policies f[S, V], nats."""
        return kl(self.completions(p), self.completions(q))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: the policies π_θ, π_old, π_ref and π_s, f64[S, V] each, and rewards f64[N]. A batch is stacked.

    π_s, the sampler, really draws the completions.
    """

    policy: jax.Array
    behaviour: jax.Array
    reference: jax.Array
    sampler: jax.Array
    rewards: jax.Array

    def optimum(self, tree: Tree, kl_coef: jax.Array | float, divergence: str) -> jax.Array:
        """log π* of the completions' objective, f[N]."""
        return OPTIMA[divergence](tree.completions(self.reference), self.rewards, kl_coef)


def stacked(prompts: Sequence[Any]) -> Any:
    """The prompts, or the arrays of each, as one with a further first axis."""
    return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *prompts)


def make_prompts(
    count: int, tree: Tree, *, drift: float, behaviour_kl: float, rewarded: float = 0.15, seed: int = 0
) -> Prompt:
    """Makes `count` random prompts, stacked.

    π_ref is softmax(N(0, 1)) at every prefix. π_old lies in a random direction from π_ref, and π_θ from π_old; π_s is
    π_old.

    Args:
      drift: KL(π_θ‖π_old) over completions, nats.
      behaviour_kl: KL(π_old‖π_ref) over completions, nats.
      rewarded: the fraction of completions with reward 1; the others have 0.
    """
    rng, shape, prompts = np.random.default_rng(seed), (tree.prefixes, tree.actions), []
    for _ in range(count):
        reference = log_softmax(rng.normal(size=shape), axis=-1)
        behaviour = at_distance(tree, reference, behaviour_kl, rng.normal(size=shape))
        policy = at_distance(tree, behaviour, drift, rng.normal(size=shape))
        order = rng.permutation(tree.actions**tree.length)
        rewards = (order < round(rewarded * order.size)).astype(float)
        prompts.append((policy, behaviour, reference, behaviour, rewards))
    return Prompt(*stacked(prompts))


def make_scenes(
    count: int, *, tokens: int, drift: float, reference_kl: float, sampler_kl: float = 0.0, seed: int = 0
) -> Prompt:
    """Makes `count` random prompts of `Tree(tokens, 1)`, stacked, with rewards of +1 and -1.

    π_old = softmax(N(0, 1)); each other policy lies on a random exponential-family line through π_old, in nats at
    KL(π_θ‖π_old) = `drift`, KL(π_ref‖π_old) = `reference_kl`, KL(π_s‖π_old) = `sampler_kl`.
    """
    rng, tree, prompts = np.random.default_rng(seed), Tree(tokens, 1), []

    def away(base: np.ndarray, distance: float) -> np.ndarray:
        """In a line the distance grows up to -log π_base(argmax u): another direction is drawn if this is too near."""
        if distance == 0:
            return base
        direction = rng.normal(size=base.shape)
        while -base.flat[np.argmax(direction)] < 1.2 * distance:
            direction = rng.normal(size=base.shape)
        return at_distance(tree, base, distance, direction)

    for _ in range(count):
        behaviour = log_softmax(rng.normal(size=(1, tokens)), axis=-1)
        policy, reference, sampler = (away(behaviour, distance) for distance in (drift, reference_kl, sampler_kl))
        rewards = np.where(np.arange(tokens) < tokens // 3, 1.0, -1.0)
        prompts.append((policy, behaviour, reference, sampler, rng.permutation(rewards)))
    return Prompt(*stacked(prompts))


def at_distance(tree: Tree, base: np.ndarray, distance: float, direction: np.ndarray) -> np.ndarray:
    """log π_t, f64[S, V]: π_t ∝ π_base exp(t u) for the direction u and the t >= 0 with KL(π_t‖π_base) = `distance`,
    nats. Raises ValueError if no t has it."""
    if distance == 0:
        return base

    def moved(t: float) -> np.ndarray:
        return log_softmax(base + t * direction, axis=-1)

    low, high = 0.0, 1.0
    while _kl(tree, moved(high), base) < distance:
        high *= 2
        if high > 1e6:
            raise ValueError(f"no policy in this direction is {distance:g} nats away: ask for less")
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _kl(tree, moved(middle), base) < distance else (low, middle)
    return moved(high)


_kl = jax.jit(Tree.kl, static_argnums=0)


def reverse_kl_optimum(reference: jax.Array, rewards: jax.Array, kl_coef: float) -> jax.Array:
    """argmax_π E_π[R] − β KL(π‖π_ref): log π ∝ log π_ref + R/β; f[N]."""
    return jax.nn.log_softmax(reference + rewards / kl_coef)


def forward_kl_optimum(reference: jax.Array, rewards: jax.Array, kl_coef: float) -> jax.Array:
    """argmax_π E_π[R] − β KL(π_ref‖π): π = β π_ref / (λ − R), with the λ > max R for which Σ π = 1; log π, f[N]."""
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


OPTIMA: dict[str, Callable[..., jax.Array]] = {"reverse": reverse_kl_optimum, "forward": forward_kl_optimum}


def kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p‖q) of log-probabilities f[N], nats."""
    return jnp.sum(jnp.exp(p) * (p - q))


def divergence_to(divergence: str | None, policy: jax.Array, reference: jax.Array) -> jax.Array:
    """`reverse`: KL(π_θ‖π_ref); `forward`: KL(π_ref‖π_θ), nats; 0 for None."""
    if divergence is None:
        return jnp.zeros(())
    return kl(policy, reference) if divergence == "reverse" else kl(reference, policy)
