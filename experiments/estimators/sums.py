"""Exact sums over all completions of a tree: the moments of a loss's gradient, the objectives, and where descent ends.

A completion's gradient is Σ_t G_t ∇log π_θ(a_t). Its mean and variance under π_s are sums over all completions. Nothing
is sampled: bias is exact to rounding, and only the prompts have a seed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.estimators.estimators import Estimator, Scalar
from experiments.estimators.trees import Prompt, Tree, divergence_to
from rpg_jax.losses import PrefixKL
from rpg_jax.losses.divergences import DIVERGENCES
from rpg_jax.losses.tokens import Tokens, checked


def prefix_kl(policy: jax.Array, reference: jax.Array) -> PrefixKL:
    """KL of two log-policies f[..., V] at each prefix, f[...]."""
    both = ((policy, reference), (reference, policy))
    return PrefixKL(*(jnp.sum(jnp.exp(of) * (of - to), axis=-1) for of, to in both))


def tokens_of(tree: Tree, prompt: Prompt, advantages: jax.Array) -> Tokens:
    """All completions of a prompt as a batch [N, T]; advantages f[N]."""
    policy = tree.along(prompt.policy)
    return checked(
        prefix_kl=prefix_kl(*map(tree.at_prefixes, (prompt.policy, prompt.reference))),
        logprobs=policy,
        behaviour_logprobs=tree.along(prompt.behaviour),
        ref_logprobs=tree.along(prompt.reference),
        advantages=advantages,
        mask=jnp.ones_like(policy),
        sampler_logprobs=tree.along(prompt.sampler),
        completion_ids=None,
    )


def expected_advantages(
    estimator: Estimator, tree: Tree, prompt: Prompt, kl_coef: Scalar, rewarded: Scalar
) -> jax.Array:
    """R − E_old[R], and the mean of the KL's leave-one-out baseline where the estimator has one; f[N].

    A leave-one-out baseline does not depend on the completion, and no loss here is clipped. So the mean gradient over
    groups is the gradient with the mean baseline.
    """
    behaviour = tree.completions(prompt.behaviour)
    advantages = (prompt.rewards - jnp.exp(behaviour) @ prompt.rewards) * rewarded
    if estimator.baseline is None:
        return advantages
    a, b, c = DIVERGENCES[estimator.baseline].of_completions()
    policy = tree.completions(prompt.policy) if estimator.present else behaviour
    log_ratio = jnp.exp(behaviour) @ (policy - tree.completions(prompt.reference))
    return advantages + kl_coef * (a * log_ratio + b - c)


class Moments(NamedTuple):
    """Mean f[S, V] and total variance f[] = tr Cov of a loss's gradient in the logits, over completions from π_s."""

    mean: jax.Array
    variance: jax.Array


def moments(estimator: Estimator, tree: Tree, prompt: Prompt, kl_coef: Scalar, rewarded: Scalar = 1.0) -> Moments:
    """E_{π_s}[∇L] and tr Cov_{π_s}[∇L] of a completion. `rewarded` 0 takes A as 0: the KL term alone is left."""
    tokens = tokens_of(tree, prompt, expected_advantages(estimator, tree, prompt, kl_coef, rewarded))

    def visited(logits: jax.Array) -> tuple[jax.Array, PrefixKL]:
        policy = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(policy, tree.along(actions)[..., None], axis=-1)[..., 0]
        return chosen, prefix_kl(policy, tree.at_prefixes(prompt.reference))

    def loss(logprobs: jax.Array, kl: PrefixKL) -> jax.Array:
        return jnp.sum(estimator.losses(dataclasses.replace(tokens, logprobs=logprobs, prefix_kl=kl), kl_coef))

    actions = jnp.broadcast_to(jnp.arange(tree.actions), prompt.policy.shape)
    at_prefixes, to_table = jax.vjp(tree.at_prefixes, prompt.policy)
    numbers, to_logits = jax.vjp(visited, at_prefixes)
    [each] = to_logits(jax.grad(loss, argnums=(0, 1))(*numbers))  # f[N, T, V]: no completion passes a prefix twice
    sampled = jnp.exp(tree.completions(prompt.sampler))
    [mean] = to_table(sampled[:, None, None] * each)
    return Moments(mean, sampled @ jnp.sum(each**2, axis=(1, 2)) - jnp.sum(mean**2))


def objective(
    level: str, divergence: str | None, tree: Tree, prompt: Prompt, kl_coef: Scalar, rewarded: Scalar = 1.0
) -> jax.Array:
    """J by exact sums.

    `completions`: E_{π_θ}[R(x)] − β D over completions.
    `tokens`: the sum over prefixes drawn by π_old of E_{π_θ(a)}[Q_old(a)] − β D over actions; Q_old continues by π_old.
    """
    if level == "completions":
        policy, reference = tree.completions(prompt.policy), tree.completions(prompt.reference)
        value, distance = jnp.exp(policy) @ prompt.rewards, divergence_to(divergence, policy, reference)
    else:
        sampled = jnp.exp(tree.completions(prompt.behaviour))
        value = jnp.sum(jnp.exp(prompt.policy - prompt.behaviour) * tree.through(sampled * prompt.rewards))
        at_prefixes = jax.vmap(lambda p, q: divergence_to(divergence, p, q))(prompt.policy, prompt.reference)
        distance = jnp.sum(tree.through(sampled), axis=1) @ at_prefixes
    return value * rewarded - kl_coef * distance


def exact_gradient(
    level: str, divergence: str | None, tree: Tree, prompt: Prompt, kl_coef: Scalar, rewarded: Scalar = 1.0
) -> jax.Array:
    """−∇J in the logits, f[S, V]."""

    def loss(logits: jax.Array) -> jax.Array:
        now = dataclasses.replace(prompt, policy=jax.nn.log_softmax(logits))
        return -objective(level, divergence, tree, now, kl_coef, rewarded=rewarded)

    return jax.grad(loss)(prompt.policy)


def end_of_descent(
    estimator: Estimator,
    tree: Tree,
    prompt: Prompt,
    kl_coef: Scalar,
    optimizer: optax.GradientTransformation,
    *,
    refresh: int,
    steps: int,
) -> jax.Array:
    """log π_θ f[S, V] where a descent along the mean gradient ends, which begins at π_old.

    π_old becomes π_θ every `refresh` updates; with 0 it stays. π_s is π_old.
    """

    def step(carry: tuple[jax.Array, jax.Array, Any], number: jax.Array) -> tuple[tuple[Any, ...], None]:
        logits, behaviour, state = carry
        policy = jax.nn.log_softmax(logits)
        behaviour = jnp.where(number % refresh == 0, policy, behaviour) if refresh else behaviour
        now = dataclasses.replace(prompt, policy=policy, behaviour=behaviour, sampler=behaviour)
        updates, state = optimizer.update(moments(estimator, tree, now, kl_coef).mean, state)
        return (optax.apply_updates(logits, updates), behaviour, state), None

    start = prompt.behaviour
    (logits, *_), _ = jax.lax.scan(step, (start, start, optimizer.init(start)), jnp.arange(steps))
    return jax.nn.log_softmax(logits)


def batched(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """`function` after its `first` arguments, of (prompts [drifts, prompts, ...], β, `rewarded`), for each prompt."""
    of_prompts = jax.vmap(functools.partial(function, *first), (0, None, None))
    return jax.jit(jax.vmap(of_prompts, (0, None, None)))


def norm(x: jax.Array) -> np.ndarray:
    """The length of each gradient, f[...], of f[..., S, V]."""
    return np.linalg.norm(x, axis=(-2, -1))


def relative_error(mean: jax.Array, exact: jax.Array) -> np.ndarray:
    """|E g − ∇J| / |∇J|, f[...], of mean gradients and exact ones f[..., S, V]."""
    return norm(mean - exact) / norm(exact)
