"""The jitted programs of training: the log-prob pass and the update.

An update reads micro-batches of one shape, however many: sums and weights are accumulated and divided once, so the
result does not depend on the split, the packing or the number of devices, and nothing is compiled twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.nnx as nnx
import flax.struct
import jax
import jax.numpy as jnp
import optax

from rpg_jax import losses
from rpg_jax.losses import Metrics
from rpg_jax.models.logical import constrain, wide_axes
from rpg_jax.training import layerwise
from rpg_jax.training.critic import Critic, CriticState
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.state import TrainState, in_device_memory
from rpg_jax.types import Batch

_CHUNK = 256  # completion tokens whose logits a device holds at once, and more of a small vocabulary:
_LOGITS = 1 << 22  # entries, 16 MB in f32

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
    with model.full_precision():
        return _logprobs(model, completion_hidden(model, batch), batch, temperature, entropy)


def completion_hidden(model: Any, batch: Batch) -> jax.Array:
    """Hidden states [B, C, D] that predict the completion tokens."""
    hidden = model(batch.tokens, batch.positions, batch.segment_ids)
    return jnp.take_along_axis(hidden, batch.predictors[..., None], axis=1)


def _logprobs(model: Any, hidden: jax.Array, batch: Batch, temperature: float, entropy: bool):
    head, rows = model.head(), batch.targets.shape[0]
    if cut := _cut(*batch.targets.shape):
        hidden = constrain(hidden, "batch", None, "act_embed")
        rows //= math.prod(cut.mesh.shape[axis] for axis in cut.rows)
    chunk = max(1, max(_CHUNK, _LOGITS // head.shape[0]) // rows)
    options: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "cut": cut, "chunk_size": chunk}
    return losses.token_logprobs(hidden, head, batch.targets, **options)


def _cut(rows: int, positions: int) -> losses.Cut | None:
    """Where rows, completion positions and the head lie under the mesh and rules in force; None on one device."""
    mesh = jax.sharding.get_abstract_mesh()

    def axes(name: str, size: int) -> tuple[str, ...]:
        wide = wide_axes(name)
        return () if size % math.prod(mesh.shape[axis] for axis in wide) else wide

    cut = losses.Cut(mesh, axes("batch", rows), axes("length", positions), axes("vocab", 0), axes("embed", 0))
    if not set(cut.width) <= set(cut.rows):
        cut = cut._replace(width=())
    return cut if any(cut[1:]) else None


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


@flax.struct.dataclass
class Sums:
    """What micro-batches add up to before the one division.

    Attributes:
      grads: of Σ loss, shaped and laid out like `TrainState.weights`; f32 where they are of several micro-batches.
      metrics: pairs (sum, weight); "loss" is among them, and its weight is the weight of `grads`.
    """

    grads: Any
    metrics: Any


class Programs(NamedTuple):
    """The jitted programs of training, one compilation each: every micro-batch has the same shape.

    Attributes:
      logprobs: (params, batch) -> (log-probs f32[B, C], entropy f32[B, C]).
      fused: (state, batch) -> (state, metrics): an update from one micro-batch.
      start: (weights, batch) -> Sums of the first micro-batch.
      add: (weights, sums, batch) -> Sums with one more; `sums` is donated.
      apply: (state, sums) -> (state, metrics): an update from several; `state` is donated.
      baseline: (weights, batch) -> advantages, returns and values f32[B, C] of a batch whose advantages are rewards;
        None without a critic.
    """

    logprobs: Callable[[Any, Batch], tuple[jax.Array, jax.Array]]
    fused: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    start: Callable[[Any, Batch], Sums]
    add: Callable[[Any, Sums, Batch], Sums]
    apply: Callable[[TrainState, Sums], tuple[TrainState, Metrics]]
    baseline: Callable[[Any, Batch], tuple[jax.Array, jax.Array, jax.Array]] | None = None

    def update(
        self, state: TrainState, micro_batches: Sequence[Batch], beat: Callable[[], None] = lambda: None
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update from all rows of `micro_batches`; `state` is donated, `beat` called between launches."""
        if len(micro_batches) == 1:
            return self.fused(state, micro_batches[0])
        sums = self.start(state.weights, micro_batches[0])
        for batch in micro_batches[1:]:
            beat()
            sums = self.add(state.weights, sums, batch)
        beat()
        return self.apply(state, sums)


def build(
    graphdef: Any,
    optimizer: Optimizer,
    loss: LossFn,
    *,
    temperature: float,
    state_sharding: TrainState,
    batch_sharding: jax.sharding.NamedSharding,
    mean: losses.Mean | None = None,
    entropy_coef: float = 0.0,
    critic: Critic | None = None,
) -> Programs:
    """Compiles nothing yet; returns the programs with explicit shardings.

    Args:
      graphdef: of the Flax NNX policy.
      optimizer: from `training.optimizer.build`.
      loss: maps f32[B, C] log-probs and the batch to (sum, weight, metrics).
      temperature: of the distribution that log-probs are taken of; the one completions are sampled at.
      state_sharding: a `TrainState` of shardings.
      batch_sharding: of the rows of every batch array.
      mean: aggregates what is added to the loss (entropy, value loss) as the loss aggregates its tokens.
      entropy_coef: weight of the entropy bonus; at 0 no entropy is computed.
      critic: the learned baseline, whose loss is added.

    Raises:
      ValueError: an entropy bonus or a critic without `mean`.
    """
    if mean is None and (entropy_coef or critic):
        raise ValueError(f"{entropy_coef=} and {critic=} are added to the loss: give mean, how they are aggregated")
    replicated = jax.sharding.NamedSharding(batch_sharding.mesh, jax.sharding.PartitionSpec())
    sums_sharding = Sums(grads=state_sharding.weights, metrics=replicated)

    def logprobs(params, batch):
        return policy_logprobs(graphdef, params, batch, temperature=temperature, entropy=True)

    def gradients(weights, batch):
        def loss_sum(weights):
            params, critic_params = weights
            model = nnx.merge(graphdef, params)
            hidden = completion_hidden(model, batch)
            logprobs, entropy = _logprobs(model, hidden, batch, temperature, entropy_coef > 0)
            total, weight, metrics = loss(logprobs, batch)
            if entropy_coef:
                total -= entropy_coef * mean(entropy, batch)[0]
            metrics = {**metrics, "loss": (total, weight)}
            if critic is not None:
                value_total, value_metrics = critic.loss(critic.values(critic_params, hidden, batch), batch, mean)
                total, metrics = total + value_total, metrics | value_metrics
            return total, metrics

        with nnx.merge(graphdef, weights[0]).full_precision():
            (_, metrics), grads = jax.value_and_grad(loss_sum, has_aux=True)(weights)
        return Sums(grads, metrics)

    def baseline(weights, batch):
        params, critic_params = weights
        model, hidden = nnx.merge(graphdef, params), None
        with model.full_precision():
            if critic.trunk != "separate":
                hidden = completion_hidden(model, batch)
            values = critic.values(critic_params, hidden, batch)
        return *critic.advantages(values, batch), values

    def start(weights, batch):
        first = gradients(weights, batch)
        return Sums(jax.tree.map(lambda g: g.astype(jnp.float32), first.grads), first.metrics)

    def add(weights, sums, batch):
        more = gradients(weights, batch)
        return Sums(jax.tree.map(jnp.add, sums.grads, more.grads), losses.merge([sums.metrics, more.metrics]))

    def apply(state, sums):
        return apply_gradients(optimizer, state, sums, critic)

    def fused(state, batch):
        return apply(state, gradients(state.weights, batch))

    params_batch = (state_sharding.params, batch_sharding)
    weights_batch = (state_sharding.weights, batch_sharding)
    state_metrics = (state_sharding, replicated)
    return Programs(
        logprobs=jax.jit(logprobs, in_shardings=params_batch, out_shardings=batch_sharding),
        fused=jax.jit(
            fused, in_shardings=(state_sharding, batch_sharding), out_shardings=state_metrics, donate_argnums=0
        ),
        start=jax.jit(start, in_shardings=weights_batch, out_shardings=sums_sharding),
        add=jax.jit(
            add,
            in_shardings=(state_sharding.weights, sums_sharding, batch_sharding),
            out_shardings=sums_sharding,
            donate_argnums=1,
        ),
        apply=jax.jit(
            apply, in_shardings=(state_sharding, sums_sharding), out_shardings=state_metrics, donate_argnums=0
        ),
        baseline=jax.jit(baseline, in_shardings=weights_batch, out_shardings=batch_sharding) if critic else None,
    )


def apply_gradients(
    optimizer: Optimizer, state: TrainState, sums: Sums, critic: Critic | None = None
) -> tuple[TrainState, Metrics]:
    """The update with gradient Σ grads / Σ weight, policy and critic each clipped by their own global norm; left out
    and counted where any of them is not finite."""
    total, weight = sums.metrics["loss"]
    weight = jnp.maximum(weight, 1e-9)
    norms = [_norm(grads) / weight for grads in sums.grads if grads is not None]
    finite = jnp.isfinite(total) & jnp.all(jnp.isfinite(jnp.stack(norms)))

    def stepped(optimizer, grads, norm, opt_state, params):
        clip = jnp.minimum(1.0, optimizer.max_grad_norm / jnp.maximum(norm, 1e-30))
        opt_state = in_device_memory(opt_state)
        return layerwise.apply(optimizer.update, grads, opt_state, params, scale=clip / weight, where=finite)

    one = jnp.ones(())
    metrics = {
        **sums.metrics,
        "grad_norm": (norms[0], one),
        "grad_norm_max": (norms[0], one),
        "nonfinite_updates": (1.0 - finite, one),
    }
    own = state.critic
    if critic is not None and own is not None:
        own = CriticState(*stepped(critic.optimizer, sums.grads[1], norms[1], own.opt_state, own.params))
        metrics["critic_grad_norm"] = (norms[1], one)
    params, opt_state = stepped(optimizer, sums.grads[0], norms[0], state.opt_state, state.params)
    return TrainState(params, opt_state, state.updates + finite, state.skipped + ~finite, own), metrics


def _norm(grads: Any) -> jax.Array:
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
