"""Judges a run on paths by exact sums where all completions can be enumerated, else by independent samples."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.completions.exact import outcome
from experiments.completions.trees import Prompt
from experiments.objective.paths import PathSettings, Verifier, draw, logprobs_of, policies, rows_of

ENUMERABLE = 20_000  # completions
SAMPLES = 4_096  # completions of a prompt, beyond that
Outcome = dict[str, jax.Array]


def judge(
    s: PathSettings, graphdef: Any, reference: Any, params: Any, verifier: Verifier, kl_coef: jax.Array, key: jax.Array
) -> Outcome:
    """Means over prompts, nats a completion: `reward`, `right` (what is paid, what is right), `mass` (of rewarded
    completions under the reference), `kl` = KL(π_θ‖π_ref), `kl_from_ref` = KL(π_ref‖π_θ), `regret` and
    `regret_forward` = J* − J with either divergence, `best_reward` and `best_kl` of the policy that reaches J*.

    Samples give `reward_error`, `kl_error` and `regret_error`, standard errors, and no `regret_forward`.
    """
    if s.symbols**s.length <= ENUMERABLE:
        return _exact(s, graphdef, reference, params, verifier, kl_coef)
    return _sampled(s, graphdef, reference, params, verifier, kl_coef, key)


def _exact(
    s: PathSettings, graphdef: Any, reference: Any, params: Any, verifier: Verifier, kl_coef: jax.Array
) -> Outcome:
    completions = jnp.asarray(list(itertools.product(range(s.symbols), repeat=s.length)), jnp.int32)

    def of_one(given: tuple[jax.Array, jax.Array, jax.Array]) -> Outcome:
        prompt, policy, ref = given
        prompts = jnp.tile(prompt, (len(completions), 1))
        rewards = verifier.rewards(prompts, completions)
        found = outcome(s.tree, Prompt(policy, policy, ref, rewards), policy, kl_coef)
        here, there = (jnp.exp(s.tree.completions(x)) for x in (policy, ref))
        return {
            "reward": found["reward"],
            "right": here @ verifier.right(prompts, completions),
            "mass": there @ rewards,
            **optimum(there @ rewards, kl_coef),
            "kl": found["kl"],
            "kl_from_ref": s.tree.kl(ref, policy),
            "regret": found["regret_reverse"],
            "regret_forward": found["regret_forward"],
        }

    tables = (policies(graphdef, x, s) for x in (params, reference))
    return jax.tree.map(jnp.mean, jax.lax.map(of_one, (jnp.asarray(s.prompts), *tables)))


def _sampled(
    s: PathSettings,
    graphdef: Any,
    reference: Any,
    params: Any,
    verifier: Verifier,
    kl_coef: jax.Array,
    key: jax.Array,
) -> Outcome:
    prompts = jnp.asarray(np.repeat(s.prompts, SAMPLES, axis=0))
    ours, theirs = jax.random.split(key)

    def sample(sampler: Any, other: Any, key: jax.Array) -> tuple[jax.Array, ...]:
        completions, logprobs = draw(graphdef, sampler, prompts, s.length, key)
        log_ratio = jnp.sum(logprobs - logprobs_of(graphdef, other, rows_of(prompts, completions)), axis=1)
        each = verifier.rewards(prompts, completions), verifier.right(prompts, completions), log_ratio
        return tuple(x.reshape(-1, SAMPLES) for x in each)

    reward, right, kl = sample(params, reference, ours)
    mass, _, kl_from_ref = sample(reference, params, theirs)
    regularized = reward - kl_coef * kl
    share = jnp.mean(mass, axis=1)  # f32[P]; rewards are 0 or 1
    best, growth = optimum(share, kl_coef), jnp.expm1(1 / kl_coef)
    slope = kl_coef * growth / (1 + share * growth)  # of J* in the share, for its standard error
    return {
        "reward": jnp.mean(reward),
        "right": jnp.mean(right),
        "mass": jnp.mean(share),
        **jax.tree.map(jnp.mean, best),
        "kl": jnp.mean(kl),
        "kl_from_ref": jnp.mean(kl_from_ref),
        "regret": jnp.mean(best["best_reward"] - kl_coef * best["best_kl"]) - jnp.mean(regularized),
        "reward_error": _error(reward),
        "kl_error": _error(kl),
        "regret_error": jnp.hypot(_error(regularized), _error(mass * slope[:, None])),
    }


def optimum(share: jax.Array, kl_coef: jax.Array) -> Outcome:
    """Of π* ∝ π_ref exp(R/β), where completions of probability `share` under π_ref have reward 1 and others 0.

    J* = β log(1 + share (exp(1/β) − 1)) = E[R] − β KL(π*‖π_ref).
    """
    growth = jnp.expm1(1 / kl_coef)
    reward = share * (growth + 1) / (1 + share * growth)
    return {"best_reward": reward, "best_kl": reward / kl_coef - jnp.log1p(share * growth)}


def _error(x: jax.Array) -> jax.Array:
    """The standard error of the mean over prompts of f32[P, n], n independent samples of each."""
    return jnp.sqrt(jnp.mean(jnp.var(x, axis=1, ddof=1)) / x.size)
