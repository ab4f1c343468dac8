"""Completions of one token: bias, variance and destination of every estimator over random scenes."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
import optax

from experiments import kept
from experiments.estimators.completions import Results
from experiments.estimators.estimators import CLIPS, COMPARATORS, KL_TERMS, SAMPLERS, Estimator
from experiments.estimators.sums import batched, end_of_descent, exact_gradient, moments, norm, relative_error
from experiments.estimators.trees import OPTIMA, Prompt, Tree, kl, make_scenes, stacked


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the experiments.

    Results are medians over `scenes` random prompts with V = `tokens`. Distances are KL divergences from the behaviour
    policy in nats: `reference_kl` of π_ref, `drifts` of π_θ, `sampler_kls` of π_s, `sampler_drift` of π_θ while that of
    π_s varies. A fixed point is reached in `steps` updates with β = `fixed_point_kl_coef`, `refresh` of them from one
    behaviour policy; its result is the worst of `fixed_point_scenes`. Elsewhere β is `kl_coef`.
    """

    tokens: int = 16
    scenes: int = 256
    kl_coef: float = 0.1
    reference_kl: float = 0.1
    drifts: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
    sampler_kls: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    sampler_drift: float = 1e-2
    fixed_point_kl_coef: float = 0.5
    refresh: int = 16
    steps: int = 40_000
    fixed_point_scenes: int = 32
    seed: int = 0

    @property
    def tree(self) -> Tree:
        return Tree(self.tokens, 1)


def run(s: Settings) -> Results:
    """Runs all experiments: {experiment: {estimator: {quantity: [value per drift or sampler distance]}}}."""
    drifts = drifting(s)
    samplers = stacked([_scenes(s, drift=s.sampler_drift, sampler_kl=distance) for distance in s.sampler_kls])
    whole = {"clips": (CLIPS, drifts), "comparators": (COMPARATORS, drifts), "sampler": (SAMPLERS, samplers)}
    results: Results = {"kl_terms": {e.name: kl_term(e, s, drifts) for e in kept.rows("kl_terms", KL_TERMS)}}
    for name, (estimators, prompts) in whole.items():
        # Against the objective that the loss is meant to descend, clips included.
        results[name] = {e.name: errors(e, s, prompts, {"": e.meant}, 1.0) for e in kept.rows(name, estimators)}
    return results | {"fixed_points": {e.name: fixed_point(e, s) for e in kept.rows("fixed_points", KL_TERMS)}}


def errors(
    estimator: Estimator, s: Settings, prompts: Prompt, objectives: Mapping[str, str | None], rewarded: float
) -> dict[str, list[float]]:
    """Compares a loss with −∇J of the objectives {end of the quantities' names: divergence}, at each drift.

    error = |E g + ∇J| / |∇J|, the relative error of the mean; cosine, of both; noise = sqrt(tr Cov g) / |E g|, of a
    token. Each is the median over the prompts. With `rewarded` 0 A is 0: the KL term alone is left.
    """
    got = batched(moments, estimator, s.tree)(prompts, s.kl_coef, rewarded)
    found = {"noise": np.sqrt(got.variance) / norm(got.mean)}
    for name, divergence in objectives.items():
        exact = batched(exact_gradient, "completions", divergence, s.tree)(prompts, s.kl_coef, rewarded)
        found[f"error{name}"] = relative_error(got.mean, exact)
        found[f"cosine{name}"] = np.sum(got.mean * exact, axis=(-2, -1)) / (norm(got.mean) * norm(exact))
    return {name: np.median(x, axis=1).tolist() for name, x in found.items()}


def kl_term(estimator: Estimator, s: Settings, prompts: Prompt) -> dict[str, list[float]]:
    """`errors` of the KL term alone against both divergences: KL(π_θ‖π_ref) (reverse), KL(π_ref‖π_θ) (forward)."""
    return errors(estimator, s, prompts, {"_reverse": "reverse", "_forward": "forward"}, 0.0)


def fixed_point(estimator: Estimator, s: Settings) -> dict[str, float]:
    """KL in nats from the end of the mean gradient's descent to the optimum of either objective; the worst over scenes.

    `refreshed`: the behaviour policy becomes π_θ every `refresh` updates. `offline`: it never does.
    """
    beta = s.fixed_point_kl_coef

    @jax.jit
    @jax.vmap
    def measure(scene: Prompt) -> dict[str, jax.Array]:
        row = {}
        for name, refresh in (("refreshed", s.refresh), ("offline", 0)):
            end = end_of_descent(estimator, s.tree, scene, beta, optax.sgd(0.2), refresh=refresh, steps=s.steps)
            for divergence in OPTIMA:
                optimum = scene.optimum(s.tree, beta, divergence)
                row[f"{name}_to_{divergence}"] = kl(s.tree.completions(end), optimum)
        return row

    start = _scenes(dataclasses.replace(s, scenes=s.fixed_point_scenes), drift=0.0)
    return {name: float(np.max(values)) for name, values in measure(start).items()}


def drifting(s: Settings) -> Prompt:
    """The scenes at each of `drifts`, [drifts, scenes, ...]: the same prompts and directions, further out."""
    return stacked([_scenes(s, drift=drift) for drift in s.drifts])


def _scenes(s: Settings, **distances: float) -> Prompt:
    return make_scenes(s.scenes, tokens=s.tokens, reference_kl=s.reference_kl, seed=s.seed, **distances)
