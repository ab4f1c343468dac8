"""Completions of several tokens: which gradient every estimator has, and where it ends."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import kept
from experiments.estimators import sums
from experiments.estimators.estimators import ENDS, ESTIMATORS, VOCABULARY, Estimator, Scalar
from experiments.estimators.trees import OPTIMA, Prompt, Tree, make_prompts, stacked

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

    def make_prompts(self, count: int, drift: float = 0.0) -> Prompt:
        distances = {"drift": drift, "behaviour_kl": self.behaviour_kl}
        return make_prompts(count, self.tree, rewarded=self.rewarded, seed=self.seed, **distances)


Outcome = dict[str, jax.Array]
# JSON-able: {experiment: {estimator: {…: numbers}}}
Results = dict[str, dict[str, dict[str, Any]]]


def run_exact(s: CompletionSettings) -> Results:
    """Gradient errors and end points."""
    return {"errors": gradient_errors(s, ESTIMATORS), "ends": ends(s, ENDS)}


def run_vocabulary(s: CompletionSettings) -> Results:
    """Gradient errors and noise of a KL that is summed over the vocabulary, beside its samples."""
    return {"errors": gradient_errors(s, VOCABULARY)}


def drifting(s: CompletionSettings) -> Prompt:
    """The prompts at each drift, [drifts, prompts, ...]: the same prompts and directions, further out."""
    return stacked([s.make_prompts(s.prompts, drift) for drift in s.drifts])


def gradient_errors(s: CompletionSettings, estimators: Sequence[Estimator]) -> dict[str, dict[str, Any]]:
    """|E g − ∇J| / |∇J| of every estimator for every objective: the median and the largest of each drift's prompts.

    `kl_term` has no reward: J = −β D. `whole` is the whole loss. `noise` is sqrt(tr Cov g) / |E g| of the KL term.
    """
    tree, prompts, parts = s.tree, drifting(s), {"kl_term": 0.0, "whole": 1.0}
    gradients = {
        f"{level}_{divergence}": sums.batched(sums.exact_gradient, level, divergence, tree)
        for level, divergence in OBJECTIVES
    }
    exact = {
        part: {name: gradient(prompts, s.kl_coef, rewarded) for name, gradient in gradients.items()}
        for part, rewarded in parts.items()
    }
    results: dict[str, dict[str, Any]] = {}
    for estimator in kept.rows("completions", estimators):
        row, measured = results.setdefault(estimator.key, {}), sums.batched(sums.moments, estimator, tree)
        for part, rewarded in parts.items():
            got = measured(prompts, s.kl_coef, rewarded)
            errors = {name: sums.relative_error(got.mean, gradient) for name, gradient in exact[part].items()}
            row[part] = {name: np.median(x, axis=1).tolist() for name, x in errors.items()}
            row[f"{part}_largest"] = {name: np.max(x, axis=1).tolist() for name, x in errors.items()}
            if part == "kl_term":
                row["noise"] = np.median(np.sqrt(got.variance) / sums.norm(got.mean), axis=1).tolist()
    return results


def outcome(tree: Tree, prompt: Prompt, policy: jax.Array, kl_coef: Scalar) -> Outcome:
    """Regret J* − J for either divergence, expected reward, and KL(π_θ‖π_ref), of completions."""
    now = dataclasses.replace(prompt, policy=policy)
    result = {
        "reward": jnp.exp(tree.completions(policy)) @ prompt.rewards,
        "kl": tree.kl(policy, prompt.reference),
    }
    for divergence in OPTIMA:
        best = dataclasses.replace(prompt, policy=tree.policy(prompt.optimum(tree, kl_coef, divergence)))
        here, there = (sums.objective("completions", divergence, tree, x, kl_coef) for x in (now, best))
        result[f"regret_{divergence}"] = there - here
    return result


def ends(s: CompletionSettings, estimators: Sequence[Estimator]) -> dict[str, dict[str, Any]]:
    """Where descent along the mean gradient by Adam, with cosine decay to 0, ends, [β, prompt] each.

    `refreshed` has every β of `end_kl_coefs`. `offline`, with π_old as it was, has `kl_coef` alone.
    """
    tree, prompts = s.tree, s.make_prompts(s.end_prompts)
    kinds = (("refreshed", 1, s.end_steps, s.end_kl_coefs), ("offline", 0, s.offline_steps, (s.kl_coef,)))
    results: dict[str, dict[str, Any]] = {}
    for estimator in kept.rows("ends of completions", estimators):
        results[estimator.key] = {}
        for name, refresh, steps, kl_coefs in kinds:
            adam = optax.adam(optax.cosine_decay_schedule(s.learning_rate, steps))
            descend = functools.partial(_ended, estimator, tree, adam, refresh, steps)
            found = jax.jit(jax.vmap(jax.vmap(descend, (0, None)), (None, 0)))(prompts, jnp.asarray(kl_coefs))
            results[estimator.key][name] = {quantity: x.tolist() for quantity, x in found.items()}
    return results


def _ended(
    estimator: Estimator, tree: Tree, adam: Any, refresh: int, steps: int, prompt: Prompt, kl_coef: jax.Array
) -> Outcome:
    end = sums.end_of_descent(estimator, tree, prompt, kl_coef, adam, refresh=refresh, steps=steps)
    return outcome(tree, prompt, end, kl_coef)
