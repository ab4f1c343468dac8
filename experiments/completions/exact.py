"""Measures on completions of several tokens which gradient every estimator has, and where it ends."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.completions.estimators import (
    ENDS,
    ESTIMATORS,
    VOCABULARY,
    Estimator,
    Scalar,
    exact_gradient,
    moments,
    objective,
)
from experiments.completions.trees import OPTIMA, Prompt, Tree, make_prompts
from experiments.kept import OnRow

OBJECTIVES = tuple((level, divergence) for level in ("completions", "tokens") for divergence in OPTIMA)


@dataclasses.dataclass(frozen=True)
class CompletionSettings:
    """Settings of the exact sums; distances are KL divergences, in nats a completion.

    Attributes:
      actions: V.
      length: T.
      rewarded: the fraction of completions with reward 1; the others have 0.
      kl_coef: β.
      learning_rate: of Adam; in descents along the mean gradient the first one of a cosine decay.
      seed: of the prompts.
      behaviour_kl: distance of π_old from π_ref.
      prompts: random prompts; gradient errors are medians over them.
      drifts: distances of π_θ from π_old.
      end_prompts: random prompts of a descent; its results are means over them.
      end_kl_coefs: β of the descents along the mean gradient.
      end_steps: updates of such a descent, where π_old follows π_θ.
      offline_steps: the same where π_old stays.
    """

    actions: int = 3
    length: int = 6
    rewarded: float = 0.15
    kl_coef: float = 0.1
    learning_rate: float = 0.05
    seed: int = 0
    behaviour_kl: float = 1.0
    prompts: int = 32
    drifts: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    end_prompts: int = 3
    end_kl_coefs: tuple[float, ...] = (0.05, 0.1, 0.5)
    end_steps: int = 4_000
    offline_steps: int = 16_000

    @property
    def tree(self) -> Tree:
        return Tree(self.actions, self.length)

    def make_prompts(self, count: int, drift: float = 0.0, *, behaviour_kl: float) -> Prompt:
        distances = {"drift": drift, "behaviour_kl": behaviour_kl}
        return make_prompts(count, self.tree, rewarded=self.rewarded, seed=self.seed, **distances)


# JSON-able: {experiment: {estimator: {…: numbers}}}
Results = dict[str, dict[str, dict[str, Any]]]


def run_exact(s: CompletionSettings, on_row: OnRow) -> Results:
    """Gradient errors and end points by exact sums, in float64; calls `on_row` before each row."""
    with jax.enable_x64(True):
        return {"errors": gradient_errors(s, ESTIMATORS, on_row), "ends": ends(s, ENDS, on_row)}


def run_vocabulary(s: CompletionSettings, on_row: OnRow) -> Results:
    """Gradient errors and noise of a KL that is summed over the vocabulary, beside its samples, in float64."""
    with jax.enable_x64(True):
        return {"errors": gradient_errors(s, VOCABULARY, on_row)}


def drifting(s: CompletionSettings) -> Prompt:
    """The prompts at each drift, [drifts, prompts, ...]: the same prompts and directions, further out."""
    at_each = [s.make_prompts(s.prompts, drift, behaviour_kl=s.behaviour_kl) for drift in s.drifts]
    return jax.tree.map(lambda *x: jnp.stack(x), *at_each)


def gradient_errors(s: CompletionSettings, estimators: Sequence[Estimator], on_row: OnRow) -> dict[str, dict[str, Any]]:
    """|E g − ∇J| / |∇J| of every estimator for every objective: the median and the largest of each drift's prompts.

    `kl_term` has no reward: J = −β D. `whole` is the whole loss. `noise` is sqrt(tr Cov g) / |E g| of the KL term.
    """
    tree, prompts, parts = s.tree, drifting(s), {"kl_term": 0.0, "whole": 1.0}

    @jax.jit
    def exact(prompts: Prompt, rewarded: jax.Array) -> dict[str, jax.Array]:
        def of_one(prompt: Prompt) -> dict[str, jax.Array]:
            return {
                f"{level}_{divergence}": exact_gradient(level, divergence, tree, prompt, s.kl_coef, rewarded=rewarded)
                for level, divergence in OBJECTIVES
            }

        return jax.vmap(jax.vmap(of_one))(prompts)

    gradients = {part: exact(prompts, rewarded) for part, rewarded in parts.items()}
    results: dict[str, dict[str, Any]] = {}
    for estimator in estimators:
        on_row("completions", estimator.key)
        row = results[estimator.key] = {}
        mean = jax.jit(jax.vmap(jax.vmap(_moments(estimator, tree, s.kl_coef), (0, None)), (0, None)))
        for part, rewarded in parts.items():
            got = mean(prompts, rewarded)
            errors = {name: _norm(got.mean - g) / _norm(g) for name, g in gradients[part].items()}
            row[part] = {name: np.median(x, axis=1).tolist() for name, x in errors.items()}
            row[f"{part}_largest"] = {name: np.max(x, axis=1).tolist() for name, x in errors.items()}
            if part == "kl_term":
                row["noise"] = np.median(np.sqrt(got.variance) / _norm(got.mean), axis=1).tolist()
    return results


def _moments(estimator: Estimator, tree: Tree, kl_coef: float) -> Callable[[Prompt, jax.Array], Any]:
    return lambda prompt, rewarded: moments(estimator, tree, prompt, kl_coef, rewarded=rewarded)


def _norm(x: jax.Array) -> np.ndarray:
    return np.linalg.norm(np.asarray(x).reshape(*x.shape[:2], -1), axis=-1)


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


def outcome(tree: Tree, prompt: Prompt, policy: jax.Array, kl_coef: jax.Array | float) -> dict[str, jax.Array]:
    """Regret J* − J for either divergence, expected reward, and KL(π_θ‖π_ref), of completions."""
    now = dataclasses.replace(prompt, policy=policy)
    result = {
        "reward": jnp.exp(tree.completions(policy)) @ prompt.rewards,
        "kl": tree.kl(policy, prompt.reference),
    }
    for divergence in OPTIMA:
        best = dataclasses.replace(prompt, policy=tree.policy(prompt.optimum(tree, kl_coef, divergence)))
        here, there = (objective("completions", divergence, tree, x, kl_coef) for x in (now, best))
        result[f"regret_{divergence}"] = there - here
    return result


def ends(s: CompletionSettings, estimators: Sequence[Estimator], on_row: OnRow) -> dict[str, dict[str, Any]]:
    """Where descent along the mean gradient by Adam, with cosine decay to 0, ends, [β, prompt] each.

    `refreshed` has every β of `end_kl_coefs`. `offline`, with π_old as it was, has `kl_coef` alone.
    """
    tree, prompts = s.tree, s.make_prompts(s.end_prompts, behaviour_kl=s.behaviour_kl)
    kinds = (("refreshed", 1, s.end_steps, s.end_kl_coefs), ("offline", 0, s.offline_steps, (s.kl_coef,)))
    results: dict[str, dict[str, Any]] = {}
    for estimator in estimators:
        on_row("ends of completions", estimator.key)
        results[estimator.key] = {}
        for name, refresh, steps, kl_coefs in kinds:
            adam = optax.adam(optax.cosine_decay_schedule(s.learning_rate, steps))
            descend = functools.partial(end_of_descent, estimator, tree, optimizer=adam, refresh=refresh, steps=steps)
            found = jax.jit(jax.vmap(jax.vmap(functools.partial(_ended, tree, descend), (0, None)), (None, 0)))
            outcomes = found(prompts, jnp.asarray(kl_coefs))
            results[estimator.key][name] = {quantity: x.tolist() for quantity, x in outcomes.items()}
    return results


def _ended(
    tree: Tree, descend: Callable[[Prompt, jax.Array], jax.Array], prompt: Prompt, kl_coef: jax.Array
) -> dict[str, jax.Array]:
    return outcome(tree, prompt, descend(prompt, kl_coef), kl_coef)
