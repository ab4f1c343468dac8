"""Measures bias, variance and destination of every estimator over random scenes, by exact sums."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.completions.estimators import Estimator, exact_gradient, moments
from experiments.completions.exact import end_of_descent
from experiments.completions.trees import OPTIMA, Prompt, Tree, kl
from experiments.estimators.estimators import CLIPS, COMPARATORS, KL_TERMS, SAMPLERS
from experiments.estimators.scenes import make_scenes
from experiments.kept import OnRow


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a laboratory run.

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


# JSON-able: {experiment: {estimator: {quantity: [value per drift or sampler distance]}}}
Results = dict[str, dict[str, dict[str, Any]]]


def run(s: Settings, on_row: OnRow) -> Results:
    """Runs all experiments in float64; calls `on_row(experiment, row)` before each row."""
    results: Results = {}
    with jax.enable_x64(True):
        at_sampler_kls = [_scenes(s, drift=s.sampler_drift, sampler_kl=distance) for distance in s.sampler_kls]
        experiments: dict[str, tuple[Sequence[Estimator], Callable[[Estimator], dict[str, Any]]]] = {
            "kl_terms": (KL_TERMS, lambda estimator: kl_term(estimator, s)),
            "clips": (CLIPS, lambda estimator: whole_loss(estimator, s, drifting(s))),
            "comparators": (COMPARATORS, lambda estimator: whole_loss(estimator, s, drifting(s))),
            "sampler": (SAMPLERS, lambda estimator: whole_loss(estimator, s, at_sampler_kls)),
            "fixed_points": (KL_TERMS, lambda estimator: fixed_point(estimator, s)),
        }
        for name, (estimators, measure) in experiments.items():
            results[name] = {}
            for estimator in estimators:
                on_row(name, estimator.name)
                results[name][estimator.name] = measure(estimator)
    return results


def errors(
    estimator: Estimator,
    s: Settings,
    scenes: Iterable[Prompt],
    objectives: Mapping[str, str | None],
    *,
    rewarded: float = 1.0,
) -> dict[str, list[float]]:
    """Compares a loss with −∇J of the objectives {end of the quantities' names: divergence}, at each of `scenes`.

    error = |E g + ∇J| / |∇J|, the relative error of the mean; cosine, of both; noise = sqrt(tr Cov g) / |E g|, of a
    token. Each is the median over scenes. With `rewarded` 0 A is 0: the KL term alone is left.
    """

    @_batched
    def measure(scene: Prompt) -> dict[str, jax.Array]:
        norm, got = jnp.linalg.norm, moments(estimator, s.tree, scene, s.kl_coef, rewarded=rewarded)
        row = {"noise": jnp.sqrt(got.variance) / norm(got.mean)}
        for name, divergence in objectives.items():
            exact = exact_gradient("completions", divergence, s.tree, scene, s.kl_coef, rewarded=rewarded)
            row[f"error{name}"] = norm(got.mean - exact) / norm(exact)
            row[f"cosine{name}"] = jnp.sum(got.mean * exact) / (norm(got.mean) * norm(exact))
        return row

    rows = [measure(at_distance) for at_distance in scenes]
    return {name: [float(np.median(row[name])) for row in rows] for name in rows[0]}


def kl_term(estimator: Estimator, s: Settings) -> dict[str, list[float]]:
    """`errors` of the KL term alone against both divergences: KL(π_θ‖π_ref) (reverse), KL(π_ref‖π_θ) (forward)."""
    both = {"_reverse": "reverse", "_forward": "forward"}
    return errors(estimator, s, drifting(s), both, rewarded=0.0)


def whole_loss(estimator: Estimator, s: Settings, scenes: Iterable[Prompt]) -> dict[str, list[float]]:
    """`errors` of the whole loss, clips included, against the objective that it is meant to descend."""
    return errors(estimator, s, scenes, {"": estimator.meant})


def fixed_point(estimator: Estimator, s: Settings) -> dict[str, float]:
    """KL in nats from the end of the mean gradient's descent to the optimum of either objective; the worst over scenes.

    `refreshed`: the behaviour policy becomes π_θ every `refresh` updates. `offline`: it never does.
    """
    beta = s.fixed_point_kl_coef

    @_batched
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


def drifting(s: Settings) -> Iterator[Prompt]:
    """The scenes at each of `drifts`: the same prompts and directions, further out."""
    for drift in s.drifts:
        yield _scenes(s, drift=drift)


def _scenes(s: Settings, **distances: float) -> Prompt:
    return make_scenes(s.scenes, tokens=s.tokens, reference_kl=s.reference_kl, seed=s.seed, **distances)


def _batched(function: Callable[[Prompt], Any]) -> Callable[[Prompt], Any]:
    return jax.jit(jax.vmap(function))
