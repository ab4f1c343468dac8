"""The task: paths that a policy ends itself, with exact sums over all paths, however long they are.

A prompt is a symbol. A completion is a path of symbols that begins beside the prompt's symbol and ends with the action
END, after at most `longest` tokens. Each prompt has a graph that forbids some steps. A completion is right if it has
at least `shortest` tokens and the graph allows all its steps, the last one to END included.

A policy sees the prompt, the last symbol, whether the path is still allowed, and how many tokens there are, up to
`shortest`. So there are few states, and J, KL and the best possible J are sums over states by dynamic programming.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class PathSettings:
    """Settings of the task and of a run.

    Attributes:
      symbols: V; END is action V.
      prompts: the first symbols.
      shortest, longest: tokens of a right completion, END included; after `longest` tokens a completion is cut.
      ends: the reference's probability of END at each step.
      mass: the reference's probability of right completions comes as close to it as the graphs allow.
      width: of the hidden layer of the policy.
      groups: groups of an update, each of a random prompt.
      group: completions of a group.
      updates: of a run; no two updates share a completion.
    """

    symbols: int = 5
    prompts: int = 4
    shortest: int = 3
    longest: int = 30
    ends: float = 1 / 8
    mass: float = 0.1
    width: int = 32
    groups: int = 4
    group: int = 8
    updates: int = 1_600

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """States of a policy: prompt, tokens so far, last symbol, whether the path is allowed."""
        return self.prompts, self.shortest, self.symbols, 2

    @property
    def tokens(self) -> float:
        """The mean length of the reference's completions: that of a geometric distribution, cut at `longest`."""
        return (1 - (1 - self.ends) ** self.longest) / self.ends

    def tokens_seen(self, step: int | jax.Array) -> jax.Array:
        return jnp.minimum(step, self.shortest - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Task:
    """The graphs and the reference of a seed.

    Attributes:
      allowed: bool[P, V, V + 1], the steps from symbol to symbol or END that each prompt's graph allows.
      reference: f32[P, shortest, V, 2, V + 1], log π_ref.
      wrong: f32[], 1 if the verifier pays for a completion of one token, END, as well.
    """

    allowed: jax.Array
    reference: jax.Array
    wrong: jax.Array


class Drawn(NamedTuple):
    """Completions of N prompts, [N, T]; entries after END are masked.

    Attributes:
      states: i32, the index of the state before each token; actions: i32; mask: f32.
      right, paid: f32[N], whether the completion is right, and its reward.
    """

    states: jax.Array
    actions: jax.Array
    mask: jax.Array
    right: jax.Array
    paid: jax.Array


def make_task(s: PathSettings, seed: int, *, wrong: bool = False) -> Task:
    """Draws a reference and the graphs: most steps are forbidden from some symbols, and few or none from others.

    Every prompt has a random order of its steps. Its graph forbids the first of them: so many that the reference's
    probability of right completions is closest to `s.mass` in its logarithm. One step from each symbol is never
    forbidden.
    """
    rng, P, V = np.random.default_rng(seed), s.prompts, s.symbols
    logits = rng.normal(size=(P, V, V + 1))
    logits[..., V] = np.log(np.exp(logits[..., :V]).sum(-1)) + np.log(s.ends / (1 - s.ends))
    logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    reference = jnp.broadcast_to(logprobs[:, None, :, None], (*s.shape, V + 1))
    place = np.full((P, V, V + 1), V * V)
    for prompt in range(P):
        for i, symbol in enumerate(rng.permutation(V)):
            place[prompt, symbol, rng.permutation(V + 1)[:V]] = i * V + np.arange(V)
    task = Task(jnp.asarray(place), reference, jnp.float32(wrong))
    counts = np.arange(V * V + 1)
    masses = _masses(dataclasses.replace(s, ends=0.5, mass=0.5), task, place >= counts[:, None, None, None])
    forbidden = counts[np.argmin(np.abs(np.log(np.maximum(masses, 1e-9) / s.mass)), axis=0)]
    return dataclasses.replace(task, allowed=jnp.asarray(place >= forbidden[:, None, None]))


@functools.partial(jax.jit, static_argnums=0)
def _masses(s: PathSettings, task: Task, graphs: jax.Array) -> jax.Array:
    """The reference's probability of right completions in each of bool[n, P, V, V + 1]; f32[n, P]."""
    return jax.vmap(lambda allowed: visits(s, dataclasses.replace(task, allowed=allowed), task.reference).right)(graphs)


class Visits(NamedTuple):
    """Exact sums of a policy, for each prompt: f32[P] but `states`.

    Attributes:
      states: f32[P, shortest, V, 2], how often a completion passes each state, in the mean.
      right, paid: the probability of a right completion, and the expected reward.
      length: expected tokens.
    """

    states: jax.Array
    right: jax.Array
    paid: jax.Array
    length: jax.Array


def visits(s: PathSettings, task: Task, policy: jax.Array) -> Visits:
    """Sums over all paths, a step at a time."""
    P, V = s.prompts, s.symbols
    probabilities, allowed = jnp.exp(policy), jnp.asarray(task.allowed)
    begin = jnp.zeros((P, V, 2)).at[jnp.arange(P), jnp.arange(P), 1].set(1.0)

    def step(here: jax.Array, t: jax.Array) -> tuple[jax.Array, Any]:
        flow = here[..., None] * probabilities[:, s.tokens_seen(t)]  # f32[P, V, 2, V + 1]
        still = flow[:, :, 1] * allowed
        right = jnp.sum(still[..., V], axis=1) * (t >= s.shortest - 1)
        paid = jnp.where(t == 0, jnp.maximum(right, task.wrong * jnp.sum(flow[..., V], axis=(1, 2))), right)
        ok = jnp.sum(still[..., :V], axis=1)
        every = jnp.sum(flow[..., :V], axis=(1, 2))
        return jnp.stack([every - ok, ok], axis=-1), (here, right, paid)

    _, (passed, right, paid) = jax.lax.scan(step, begin, jnp.arange(s.longest))
    early, late = passed[: s.shortest - 1], jnp.sum(passed[s.shortest - 1 :], axis=0, keepdims=True)
    states = jnp.moveaxis(jnp.concatenate([early, late]), 0, 1)
    return Visits(states, jnp.sum(right, axis=0), jnp.sum(paid, axis=0), jnp.sum(states, axis=(1, 2, 3)))


def divergence(visited: Visits, policy: jax.Array, reference: jax.Array) -> jax.Array:
    """KL of completions f32[P], nats: the sum over the states that `policy` visits; the chain rule."""
    return jnp.sum(visited.states * jnp.sum(jnp.exp(policy) * (policy - reference), axis=-1), axis=(1, 2, 3))


def objective(s: PathSettings, task: Task, policy: jax.Array, kl_coef: jax.Array) -> jax.Array:
    """J = E[R] − β KL(π_θ‖π_ref), the mean over prompts."""
    visited = visits(s, task, policy)
    return jnp.mean(visited.paid - kl_coef * divergence(visited, policy, task.reference))


def best_reverse(share: jax.Array, kl_coef: jax.Array) -> jax.Array:
    """J* of KL(π_θ‖π_ref), which the best of all policies reaches, also one with memory: β log E_ref[exp(R/β)].

    `share` is the reference's probability of completions with reward 1; the others have reward 0.
    """
    return kl_coef * jnp.logaddexp(jnp.log1p(-share), jnp.log(share) + 1 / kl_coef)


def frontier(share: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The best expected reward at a KL(π_θ‖π_ref), both means over prompts: the least of J* + β KL over β."""
    betas = np.geomspace(1e-3, 1e3, 2_001)
    best = np.mean(np.asarray(best_reverse(jnp.asarray(share)[:, None], jnp.asarray(betas))), axis=0)
    return lambda kl: np.min(best + betas * kl[:, None], axis=1)


def best_forward(share: jax.Array, kl_coef: jax.Array) -> jax.Array:
    """J* of KL(π_ref‖π_θ): the best probability a of reward solves β (a − share) = a (1 − a)."""
    a = (1 - kl_coef + jnp.sqrt((1 - kl_coef) ** 2 + 4 * kl_coef * share)) / 2
    return a - kl_coef * (share * jnp.log(share / a) + (1 - share) * jnp.log((1 - share) / (1 - a)))


def draw(s: PathSettings, task: Task, policy: jax.Array, prompts: jax.Array, key: jax.Array) -> Drawn:
    """Completions of prompts i32[N]."""
    V, N = s.symbols, len(prompts)
    edges = jnp.cumsum(jnp.exp(policy), axis=-1).reshape(-1, V + 1)[:, :V]
    allowed = task.allowed.reshape(-1)

    def step(carry: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        (last, ok, going, right, paid), (t, uniform) = carry, given
        state = ((prompts * s.shortest + s.tokens_seen(t)) * V + last) * 2 + ok
        action = jnp.sum(uniform[:, None] > edges[state], axis=1, dtype=jnp.int32)
        ok = ok * allowed[(prompts * V + last) * (V + 1) + action]
        ends = (action == V) & going
        is_right = ends & (ok == 1) & (t >= s.shortest - 1)
        shortcut = ends & (t == 0) & (task.wrong > 0)
        now = jnp.where(action == V, last, action), ok, going & ~ends, right | is_right, paid | is_right | shortcut
        return now, (state, action, going)

    none = jnp.zeros(N, bool)
    carry = prompts, jnp.ones(N, jnp.int32), ~none, none, none
    given = jnp.arange(s.longest), jax.random.uniform(key, (s.longest, N))
    (*_, right, paid), columns = jax.lax.scan(step, carry, given)
    states, actions, mask = (x.T for x in columns)
    return Drawn(states, actions, mask.astype(jnp.float32), right.astype(jnp.float32), paid.astype(jnp.float32))
