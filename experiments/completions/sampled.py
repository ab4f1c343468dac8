"""Runs with sampled gradients on completions of several tokens, judged by exact sums."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.completions.estimators import SAMPLED, Estimator
from experiments.completions.exact import OnRow, Results, SampledSettings, outcome
from experiments.completions.trees import Prompt
from rpg_jax.losses import advantages
from rpg_jax.losses.tokens import checked


def run_sampled(s: SampledSettings, *, on_row: OnRow = lambda experiment, row: None) -> Results:
    """Runs with sampled gradients, in float64; calls `on_row` before each row."""
    with jax.enable_x64(True):
        return {"sampled": sampled(s, SAMPLED, on_row)}


def sampled_run(
    estimator: Estimator, s: SampledSettings, prompts: Prompt, key: jax.Array, updates_a_batch: int
) -> jax.Array:
    """log π_θ f[P, S, V] after Adam with sampled gradients from π_ref, with leave-one-out advantages and baselines."""
    tree, optimizer = s.tree, optax.adam(s.learning_rate)
    count = prompts.rewards.shape[0]
    groups = jnp.repeat(jnp.arange(count), s.group) if estimator.baseline else None
    entries = tree.along(jnp.arange(tree.prefixes * tree.actions).reshape(-1, tree.actions))

    def chosen(tables: jax.Array, drawn: jax.Array) -> jax.Array:
        """The entries of tables f[P, S, V] that completions i[P, G] pass: f[P · G, T]."""
        return jax.vmap(lambda table, x: table.ravel()[entries[x]])(tables, drawn).reshape(-1, tree.length)

    def loss(logits: jax.Array, behaviour: jax.Array, drawn: jax.Array) -> jax.Array:
        rewards = jnp.take_along_axis(prompts.rewards, drawn, axis=1)
        logprobs = chosen(jax.nn.log_softmax(logits), drawn)
        tokens = checked(
            logprobs=logprobs,
            behaviour_logprobs=chosen(behaviour, drawn),
            ref_logprobs=chosen(prompts.reference, drawn),
            advantages=advantages("leave_one_out", rewards).ravel(),
            mask=jnp.ones_like(logprobs),
            sampler_logprobs=None,
            completion_ids=None,
            group_ids=groups,
        )
        return jnp.sum(estimator.losses(tokens, s.kl_coef)) / logprobs.shape[0]

    def batch(carry: tuple[jax.Array, Any], key: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        behaviour = jax.nn.log_softmax(carry[0])
        cumulated = jnp.cumsum(jnp.exp(jax.vmap(tree.completions)(behaviour)), axis=1)
        uniform = jax.random.uniform(key, (count, updates_a_batch * s.group)) * cumulated[:, -1:]
        drawn = jax.vmap(lambda sums, u: jnp.searchsorted(sums, u, side="right"))(cumulated, uniform)
        draws = drawn.reshape(count, updates_a_batch, s.group).swapaxes(0, 1)

        def update(carry: tuple[jax.Array, Any], drawn: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            logits, state = carry
            updates, state = optimizer.update(jax.grad(loss)(logits, behaviour, drawn), state)
            return (optax.apply_updates(logits, updates), state), None

        return jax.lax.scan(update, carry, draws)

    keys = jax.random.split(key, s.updates // updates_a_batch)
    start = prompts.reference
    (logits, _), _ = jax.lax.scan(batch, (start, optimizer.init(start)), keys)
    return jax.nn.log_softmax(logits)


def sampled(s: SampledSettings, estimators: Sequence[Estimator], on_row: OnRow) -> dict[str, dict[str, Any]]:
    """Outcomes of runs with sampled gradients, [updates a batch, seed · prompt] each.

    The prompts of all seeds share no parameter, so that one run is the runs of all seeds.
    """
    prompts = s.make_prompts(s.seeds * s.prompts, behaviour_kl=0.0)
    judge = jax.jit(jax.vmap(lambda prompt, policy: outcome(s.tree, prompt, policy, s.kl_coef)))
    run = jax.jit(sampled_run, static_argnums=(0, 1, 4))
    results: dict[str, dict[str, Any]] = {}
    for estimator in estimators:
        on_row("sampled completions", estimator.key)
        rows = []
        for updates in s.updates_a_batch:
            policies = run(estimator, s, prompts, jax.random.key(s.seed), updates)
            rows.append(judge(prompts, policies))
        results[estimator.key] = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    return results
