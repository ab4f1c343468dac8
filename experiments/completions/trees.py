"""Completions of a few actions, all enumerated: a tabular policy has a softmax at every prefix.

A policy is a table f[S, V] of log-probabilities: S prefixes, V actions. N = V^T completions of T actions each.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from experiments.estimators.scenes import at_distance, forward_kl_optimum, kl, reverse_kl_optimum

OPTIMA: dict[str, Callable[..., jax.Array]] = {"reverse": reverse_kl_optimum, "forward": forward_kl_optimum}


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
    """One prompt: the policies π_θ, π_old and π_ref, f64[S, V] each, and rewards f64[N], 0 or 1. A batch is stacked."""

    policy: jax.Array
    behaviour: jax.Array
    reference: jax.Array
    rewards: jax.Array

    def optimum(self, tree: Tree, kl_coef: jax.Array | float, divergence: str) -> jax.Array:
        """log π* of the completions' objective, f[N]."""
        return OPTIMA[divergence](tree.completions(self.reference), self.rewards, kl_coef)


def make_prompts(
    count: int, tree: Tree, *, drift: float, behaviour_kl: float, rewarded: float = 0.15, seed: int = 0
) -> Prompt:
    """Makes `count` random prompts, stacked.

    π_ref is softmax(N(0, 1)) at every prefix. π_old lies in a random direction from π_ref, and π_θ from π_old.

    Args:
      drift: KL(π_θ‖π_old) over completions, nats.
      behaviour_kl: KL(π_old‖π_ref) over completions, nats.
      rewarded: the fraction of completions with reward 1; the others have 0.
    """
    rng, rows = np.random.default_rng(seed), []
    shape, distance = (tree.prefixes, tree.actions), functools.partial(_kl, tree)
    for _ in range(count):
        reference = log_softmax(rng.normal(size=shape), axis=-1)
        behaviour = at_distance(reference, behaviour_kl, rng.normal(size=shape), distance)
        policy = at_distance(behaviour, drift, rng.normal(size=shape), distance)
        order = rng.permutation(tree.actions**tree.length)
        rows.append((policy, behaviour, reference, (order < round(rewarded * order.size)).astype(float)))
    return Prompt(*(jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)))


def _kl(tree: Tree, p: np.ndarray, q: np.ndarray) -> float:
    """KL(p‖q) over completions, by the chain rule."""
    reached, start, total = np.ones(1), 0, 0.0
    for _ in range(tree.length):
        here = slice(start, start + reached.size)
        mass = reached[:, None] * np.exp(p[here])
        total += float(np.sum(mass * (p[here] - q[here])))
        start, reached = here.stop, mass.ravel()
    return total
