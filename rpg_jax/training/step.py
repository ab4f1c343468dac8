"""The two jitted programs of training: the log-prob pass and the update.

Both read a `types.Batch` of rows [B, ...] and split it into micro-batches; sums and weights are accumulated and
divided once, so the result does not depend on the split, the packing or the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax

from rpg_jax import losses
from rpg_jax.losses import Metrics
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.state import TrainState
from rpg_jax.types import Batch

LossFn = Callable[[jax.Array, Batch], tuple[jax.Array, jax.Array, Metrics]]


def policy_logprobs(
    graphdef: Any, params: Any, batch: Batch, *, temperature: float, entropy: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities, in nats, of the completion tokens of `batch` at the sampling temperature.

    Returns:
      logprobs: f32[B, C], differentiable in `params`; entries outside `batch.mask` mean nothing.
      entropy: f32[B, C] of the full next-token distribution, in nats, or None.
    """
    model = nnx.merge(graphdef, params)
    hidden = model(batch.tokens, batch.positions, batch.segment_ids)
    hidden = jnp.take_along_axis(hidden, batch.predictors[..., None], axis=1)
    return losses.token_logprobs(hidden, model.head(), batch.targets, temperature=temperature, entropy=entropy)


def loss_fn(name: str, **hyperparameters: Any) -> LossFn:
    """Binds `losses.policy_loss` to the fields of a batch."""

    def loss(logprobs: jax.Array, batch: Batch):
        return losses.policy_loss(
            name,
            logprobs=logprobs,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            ref_logprobs=batch.ref_logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            completion_ids=batch.completion_ids,
            **hyperparameters,
        )

    return loss


def supervised_loss(logprobs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
    """Mean negative log-likelihood of the target tokens, in nats (minimise)."""
    loss = -jnp.sum(jnp.where(batch.mask > 0, logprobs, 0.0))
    weight = jnp.sum(batch.mask)
    return loss, weight, {"loss": (loss, weight)}


class Programs(NamedTuple):
    """`logprobs(params, batch) -> (f32[B, C], f32[B, C])` and `update(state, batch) -> (state, Metrics)`, jitted."""

    logprobs: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def build(
    graphdef: Any,
    optimizer: Optimizer,
    loss: LossFn,
    *,
    temperature: float,
    microbatch_size: int,
    state_sharding: TrainState,
    batch_sharding: jax.sharding.NamedSharding,
) -> Programs:
    """Compiles nothing yet; returns the programs with their shardings, the state donated to `update`.

    Args:
      graphdef: of the Flax NNX policy.
      optimizer: from `training.optimizer.build`.
      loss: maps f32[B, C] log-probs and the batch to (sum, weight, metrics).
      temperature: of the distribution that log-probs are taken of; the one completions are sampled at.
      microbatch_size: rows per forward and backward pass, all devices together; must divide the rows of a batch.
      state_sharding: a `TrainState` of shardings.
      batch_sharding: of the rows of every batch array.
    """
    replicated = jax.sharding.NamedSharding(batch_sharding.mesh, jax.sharding.PartitionSpec())

    def logprob_pass(params, batch):
        def one(micro):
            return policy_logprobs(graphdef, params, micro, temperature=temperature, entropy=True)

        return _join(jax.lax.map(one, _split(batch, microbatch_size)))

    def update(state, batch):
        def loss_sum(params, micro):
            logprobs, _ = policy_logprobs(graphdef, params, micro, temperature=temperature)
            total, weight, metrics = loss(logprobs, micro)
            return total, (weight, metrics)

        def accumulate(carry, micro):
            grads, metrics = carry
            (total, (weight, more)), more_grads = jax.value_and_grad(loss_sum, has_aux=True)(state.params, micro)
            more = {**more, "loss": (total, weight)}
            return (jax.tree.map(jnp.add, grads, more_grads), losses.merge([metrics, more])), None

        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        micros = _split(batch, microbatch_size)
        first = jax.tree.map(lambda x: x[0], micros)
        shapes = jax.eval_shape(lambda m: loss_sum(state.params, m)[1][1], first)
        shapes |= {"loss": (scalar, scalar)}
        zero_grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        zero_metrics = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (grads, metrics), _ = jax.lax.scan(accumulate, (zero_grads, zero_metrics), micros)

        weight = metrics["loss"][1]
        grads = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-9), grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(metrics["loss"][0])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def keep(new, old):
            return jnp.where(finite, new, old)

        one = jnp.ones(())
        metrics = {
            **metrics,
            "grad_norm": (grad_norm, one),
            "grad_norm_max": (grad_norm, one),
            "nonfinite_updates": (1.0 - finite, one),
        }
        state = TrainState(
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
            updates=state.updates + finite,
            skipped=state.skipped + ~finite,
        )
        return state, metrics

    return Programs(
        logprobs=jax.jit(
            logprob_pass, in_shardings=(state_sharding.params, batch_sharding), out_shardings=batch_sharding
        ),
        update=jax.jit(
            update,
            in_shardings=(state_sharding, batch_sharding),
            out_shardings=(state_sharding, replicated),
            donate_argnums=0,
        ),
    )


def _split(batch: Batch, size: int) -> Batch:
    """[B, ...] to [B / size, size, ...], each micro-batch strided over the rows so that every device keeps its own."""
    rows = batch.tokens.shape[0]
    if rows % size:
        raise ValueError(f"microbatch_size {size} does not divide the {rows} rows of a batch")
    return jax.tree.map(lambda x: x.reshape(size, rows // size, *x.shape[1:]).swapaxes(0, 1), batch)


def _join(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)
