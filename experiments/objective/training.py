"""The training of a run: samples and a loss of `rpg_jax.losses`, or the exact gradient of J; and its exact judge."""

import dataclasses
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.estimators.estimators import Estimator, Scalar
from experiments.estimators.sums import prefix_kl
from experiments.objective import paths
from experiments.objective.paths import Drawn, PathSettings, Task
from rpg_jax.losses import advantages
from rpg_jax.losses.tokens import checked

Outcome = dict[str, jax.Array]


class Network(nnx.Module):
    """A hidden layer over one-hot states, added to the reference's logits; the last layer begins with zeros."""

    def __init__(self, s: PathSettings, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(sum(s.shape), s.width, rngs=rngs)
        self.last = nnx.Linear(s.width, s.symbols + 1, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, reference: jax.Array) -> jax.Array:
        """log π_θ of every state, shaped as the log π_ref `reference`."""
        sizes = reference.shape[:-1]
        parts = [jax.nn.one_hot(index, n) for index, n in zip(np.indices(sizes), sizes, strict=True)]
        hidden = jnp.tanh(self.hidden(jnp.concatenate(parts, axis=-1)))
        return jax.nn.log_softmax(reference + self.last(hidden))


class Lane(NamedTuple):
    """One run; a program makes several at once, stacked.

    Attributes:
      task: the graphs and the reference.
      seed: of the weights and the samples.
      kl_coef: β.
      rate: the peak of Adam's learning rate.
      token_mean: an update's loss is the mean over all its tokens; otherwise the sum over a completion's tokens, the
        mean over completions.
      reference_batches: batches after which π_ref becomes π_old; 0 keeps the first one.
    """

    task: Task
    seed: Scalar
    kl_coef: Scalar
    rate: Scalar
    token_mean: Scalar
    reference_batches: Scalar


def train(estimator: Estimator | None, s: PathSettings, updates_a_batch: int, lane: Lane) -> jax.Array:
    """log π_θ at the end of a run that starts at π_ref: Adam, cosine decay to 0, no clip.

    π_old becomes π_θ after `updates_a_batch` updates. Without an estimator each update has the exact gradient of J.
    """
    task = lane.task
    graphdef, start = nnx.split(Network(s, nnx.Rngs(jax.random.key(lane.seed))))
    optimizer, size = optax.adam(optax.cosine_decay_schedule(1.0, s.updates)), s.groups * s.group
    groups = jnp.repeat(jnp.arange(s.groups), s.group) if estimator and estimator.baseline else None

    def policy(params: Any) -> jax.Array:
        return nnx.merge(graphdef, params)(task.reference)

    def loss(params: Any, reference: jax.Array, drawn: Drawn, columns: Any) -> jax.Array:
        now = policy(params)
        if estimator is None:
            return -paths.objective(s, dataclasses.replace(task, reference=reference), now, jnp.asarray(lane.kl_coef))
        tokens = checked(
            logprobs=chosen(now, drawn),
            mask=drawn.mask,
            sampler_logprobs=None,
            completion_ids=None,
            group_ids=groups,
            prefix_kl=jax.tree.map(lambda x: jnp.take(x.reshape(-1), drawn.states), prefix_kl(now, reference)),
            **columns,
        )
        total = jnp.where(lane.token_mean, jnp.sum(drawn.mask), size)
        return jnp.sum(estimator.losses(tokens, lane.kl_coef)) / total

    def batch(carry: tuple[Any, Any, jax.Array], given: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (params, state, reference), (index, key) = carry, given
        which, how = jax.random.split(key)
        prompts = jnp.repeat(jax.random.randint(which, (updates_a_batch * s.groups,), 0, s.prompts), s.group)
        behaviour = policy(params)
        every = lane.reference_batches
        reference = jnp.where((every > 0) & (index % jnp.maximum(every, 1) == 0), behaviour, reference)
        drawn = paths.draw(s, task, behaviour, prompts, how)
        columns = {
            "behaviour_logprobs": chosen(behaviour, drawn),
            "ref_logprobs": chosen(reference, drawn),
            "advantages": advantages("leave_one_out", drawn.paid.reshape(-1, s.group)).ravel(),
        }

        def update(carry: tuple[Any, Any], part: Any) -> tuple[tuple[Any, Any], None]:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, reference, *part), state)
            return (jax.tree.map(lambda x, u: x + lane.rate * u, params, updates), state), None

        parts = jax.tree.map(lambda x: x.reshape(updates_a_batch, size, *x.shape[1:]), (drawn, columns))
        (params, state), _ = jax.lax.scan(update, (params, state), parts)
        return (params, state, reference), None

    batches = s.updates // updates_a_batch
    given = jnp.arange(batches), jax.random.split(jax.random.key(lane.seed), batches)
    return policy(jax.lax.scan(batch, (start, optimizer.init(start), task.reference), given)[0][0])


def chosen(policy: jax.Array, drawn: Drawn) -> jax.Array:
    """The log-probability of each token under a policy, f32[N, T]."""
    return jnp.take(policy.reshape(-1), drawn.states * policy.shape[-1] + drawn.actions)


def judge(s: PathSettings, task: Task, policy: jax.Array, kl_coef: jax.Array) -> Outcome:
    """Exact means over prompts: `reward` (what is paid), `right`, `length` in tokens, `kl` = KL(π_θ‖π_ref) and
    `kl_from_ref` = KL(π_ref‖π_θ) in nats a completion, `regret` and `regret_forward` = J* − J with either divergence.
    """
    visited, at_start = paths.visits(s, task, policy), paths.visits(s, task, task.reference)
    reward, kl = jnp.mean(visited.paid), jnp.mean(paths.divergence(visited, policy, task.reference))
    kl_from_ref = jnp.mean(paths.divergence(at_start, task.reference, policy))
    best, best_forward = (jnp.mean(of(at_start.paid, kl_coef)) for of in (paths.best_reverse, paths.best_forward))
    return {
        "reward": reward,
        "right": jnp.mean(visited.right),
        "length": jnp.mean(visited.length),
        "kl": kl,
        "kl_from_ref": kl_from_ref,
        "regret": best - reward + kl_coef * kl,
        "regret_forward": best_forward - reward + kl_coef * kl_from_ref,
    }
