"""The jitted programs of training: the log-prob pass and the update.

An update reads any number of micro-batches of one shape, so nothing is compiled twice. Sums and weights are accumulated
and divided once, so the result does not depend on the split, the packing or the number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.nnx as nnx
import flax.struct
import jax
import jax.numpy as jnp
import optax

from rpg_jax import losses
from rpg_jax.losses import Metrics
from rpg_jax.models import Base, policy_params
from rpg_jax.models.logical import constrain
from rpg_jax.training.critic import Critic, CriticState
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.measures import sampler_gap, sum_and_weight
from rpg_jax.training.objective import Objective, supervised_loss
from rpg_jax.training.optimizer import Optimizer, apply_update
from rpg_jax.training.policy_logprobs import completion_hidden, head_arguments, policy_logprobs
from rpg_jax.training.state import TrainState, in_device_memory, shardings_of
from rpg_jax.types import Batch, Rows


@flax.struct.dataclass
class Sums:
    """Sums over the micro-batches of an update. The update divides once, after the last micro-batch.

    Attributes:
      grads: the gradient of Σ loss, in shape and layout of `TrainState.weights`; f32 for several micro-batches.
      metrics: name -> (sum, weight); the weight of "loss" is also the weight of `grads`.
    """

    grads: Any
    metrics: Any


class Frozen(NamedTuple):
    """The arrays that a program reads and no update changes.

    Attributes:
      base: the frozen weights beside adapters; None without adapters.
      ref_head: the head of the `Anchor` of an update; None without an anchor.
    """

    base: Base | None
    ref_head: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted program whose first argument, the `frozen` arrays, is bound. JAX compiles at the first call."""

    jitted: jax.stages.Wrapped
    frozen: Frozen

    def __call__(self, *inputs: Any) -> Any:
        return self.jitted(self.frozen, *inputs)

    def lower(self, *inputs: Any) -> jax.stages.Lowered:
        """Returns the program lowered for `inputs`, arrays or `ShapeDtypeStruct`s; runs nothing."""
        return self.jitted.lower(self.frozen, *inputs)


class Anchor(NamedTuple):
    """A reference whose distributions over the vocabulary an update reads.

    Attributes:
      hidden: rows -> its hidden states [B, C, E], see `Batch.ref_hidden`.
      head: [V, E], its output embedding.
    """

    hidden: Callable[[Rows], jax.Array]
    head: jax.Array


class Rehearsed(NamedTuple):
    """Micro-batches of kept completions: −log π_θ of each token joins an update's mean loss with weight `share`."""

    batches: Sequence[Batch]
    share: float


class Programs(NamedTuple):
    """The jitted programs of training, one compilation each.

    Attributes:
      logprobs: (params, rows) -> (log-probs f32[B, C], entropy f32[B, C], experts [B, C, L, k] or None), as of
        `policy_logprobs`.
      hidden: (params, rows) -> `completion_hidden` [B, C, E].
      head: params -> the output embedding [V, E].
      fused: (state, batch) -> (state, metrics): an update from one micro-batch; `state` is donated.
      start: (weights, batch) -> Sums of the first micro-batch.
      add: (weights, sums, batch) -> Sums with one more micro-batch; `sums` is donated.
      rehearse: (weights, sums, batch, share) -> (Sums, metrics): adds a micro-batch of `Rehearsed`; `sums` is donated.
      apply: (state, sums) -> (state, metrics): an update from several micro-batches; `state` is donated.
      baseline: (weights, batch) -> advantages, returns and values f32[B, C] from its rewards; None without a critic.
    """

    logprobs: Program
    hidden: Program
    head: Program
    fused: Program
    start: Program
    add: Program
    rehearse: Program
    apply: Program
    baseline: Program | None = None

    def anchor(self, params: Any, *, replays: bool = False) -> Anchor:
        """The model with these weights as the reference of updates. `replays`: with the experts that rows record."""
        hidden = self.hidden if replays else lambda params, rows: self.hidden(params, rows.unrouted)
        return Anchor(functools.partial(hidden, params), self.head(params))

    def beside(self, anchor: Anchor) -> Programs:
        """The same programs. `fused`, `start` and `add` read the head of `anchor`, and `ref_hidden` of their batch."""
        updates = {name: getattr(self, name) for name in ("fused", "start", "add")}
        bound = {n: dataclasses.replace(p, frozen=p.frozen._replace(ref_head=anchor.head)) for n, p in updates.items()}
        return self._replace(**bound)

    def update(
        self,
        state: TrainState,
        micro_batches: Sequence[Batch],
        anchor: Anchor | None = None,
        rehearsed: Rehearsed | None = None,
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update from all rows of `micro_batches`; `state` is donated. Each micro-batch after the first
        is a heartbeat.

        The micro-batches have one shape. The hidden states of an `anchor` are computed for one micro-batch after
        another; without it the batches hold what the loss reads. Returns the state and metrics, name -> (sum, weight),
        perhaps before they are computed. With `rehearsed` completions `rehearsal_nll` is their mean negative
        log-likelihood, in nats per token.
        """

        own = self if anchor is None else self.beside(anchor)

        def known(batch: Batch) -> Batch:
            return batch if anchor is None else dataclasses.replace(batch, ref_hidden=anchor.hidden(batch.rows))

        first, *others = micro_batches
        if not others and rehearsed is None:
            return own.fused(state, known(first))
        sums = own.start(state.weights, known(first))
        for batch in others:
            beat()
            sums = own.add(state.weights, sums, known(batch))
        beat()
        if rehearsed is None:
            return self.apply(state, sums)
        measured = []
        for batch in rehearsed.batches:
            sums, metrics = self.rehearse(state.weights, sums, batch, rehearsed.share)
            measured.append(metrics)
        state, metrics = self.apply(state, sums)
        return state, metrics | losses.merge(measured)


def make_programs(
    graphdef: Any,
    optimizer: Optimizer,
    objective: Objective,
    *,
    temperature: float,
    state: TrainState,
    batch_sharding: jax.sharding.NamedSharding,
    base: Base | None = None,
) -> Programs:
    """Returns the programs with explicit shardings; compiles nothing yet.

    Equal arguments return the same jitted functions, so runs of one process trace and compile them once. Under other
    rules (`parallel.activate`) the programs are traced anew.

    Args:
      graphdef: of the Flax NNX policy.
      optimizer, objective: of the policy; the critic has its own optimizer in `objective.critic`.
      temperature: the sampling temperature, at which log-probs are taken.
      state: a `TrainState` of `ShapeDtypeStruct`s with shardings, or of arrays.
      batch_sharding: of the rows of every batch array.
      base: the frozen weights, if the state's params are adapters; arrays or `ShapeDtypeStruct`s, with shardings.
    """
    functions = _Functions(graphdef, optimizer, objective, temperature)
    leaves, treedef = jax.tree.flatten(shardings_of(state))
    jitted = _jitted(functions, tuple(leaves), treedef, batch_sharding)._asdict()
    return Programs(**{name: program and Program(program, Frozen(base)) for name, program in jitted.items()})


@functools.lru_cache(maxsize=64)
def _jitted(
    functions: _Functions,
    state_leaves: tuple[jax.sharding.Sharding, ...],
    state_tree: Any,
    batch_sharding: jax.sharding.NamedSharding,
) -> Programs:
    """The jitted `functions`. All arguments are hashable: `state_tree` and `state_leaves` are the state's shardings."""
    state_sharding = state_tree.unflatten(state_leaves)
    replicated = jax.sharding.NamedSharding(batch_sharding.mesh, jax.sharding.PartitionSpec())
    sums_sharding = Sums(grads=state_sharding.weights, metrics=replicated)
    params, weights, stepped = state_sharding.params, state_sharding.weights, (state_sharding, replicated)

    def jitted(program, inputs, outputs, *, donated=()):
        return jax.jit(program, in_shardings=(None, *inputs), out_shardings=outputs, donate_argnums=donated)

    baseline = jitted(functions.baseline, (weights, batch_sharding), batch_sharding)
    return Programs(
        logprobs=jitted(functions.logprobs, (params, batch_sharding), batch_sharding),
        hidden=jitted(functions.hidden, (params, batch_sharding), batch_sharding),
        head=jitted(functions.head, (params,), None),
        fused=jitted(functions.fused, (state_sharding, batch_sharding), stepped, donated=1),
        start=jitted(functions.start, (weights, batch_sharding), sums_sharding),
        add=jitted(functions.add, (weights, sums_sharding, batch_sharding), sums_sharding, donated=2),
        rehearse=jitted(
            functions.rehearse, (weights, sums_sharding, batch_sharding, None), (sums_sharding, None), donated=2
        ),
        apply=jitted(functions.apply, (state_sharding, sums_sharding), stepped, donated=1),
        baseline=baseline if functions.objective.critic else None,
    )


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The functions of the programs; each function takes `Frozen` arrays as its first argument."""

    graphdef: Any
    optimizer: Optimizer
    objective: Objective
    temperature: float

    def logprobs(self, frozen, params, rows):
        params = policy_params(frozen.base, params)
        return policy_logprobs(self.graphdef, params, rows, temperature=self.temperature)

    def hidden(self, frozen, params, rows):
        model = nnx.merge(self.graphdef, policy_params(frozen.base, params))
        with model.full_precision():
            return completion_hidden(model, rows)

    def head(self, frozen, params):
        return constrain(nnx.merge(self.graphdef, policy_params(frozen.base, params)).head(), "vocab", "embed")

    def baseline(self, frozen, weights, batch):
        del frozen  # a critic needs all weights
        params, critic_params = weights
        critic = self.objective.critic
        with nnx.merge(self.graphdef, params).full_precision():
            values = critic.values(critic_params, batch.rows)
        return *critic.advantages(values, batch), values

    def start(self, frozen, weights, batch):
        first = self.gradients(frozen, weights, batch)
        return Sums(optax.tree.cast(first.grads, jnp.float32), first.metrics)

    def add(self, frozen, weights, sums, batch):
        more = self.gradients(frozen, weights, batch)
        return Sums(jax.tree.map(jnp.add, sums.grads, more.grads), losses.merge([sums.metrics, more.metrics]))

    def rehearse(self, frozen, weights, sums, batch, share):
        kept = dataclasses.replace(self, objective=Objective(supervised_loss)).gradients(frozen, weights, batch)
        (total, weight), (nll, _) = sums.metrics["loss"], kept.metrics["loss"]
        weight = jnp.where(weight > 0, weight, 1)  # rehearsal goes on where a mini-batch has no token to train
        scale = share * weight  # `apply` divides by the weight
        grads = jax.tree.map(lambda own, more: own + scale * more, sums.grads, kept.grads)
        joined = {**sums.metrics, "loss": (total + scale * nll, weight)}
        return Sums(grads, joined), {"rehearsal_nll": kept.metrics["loss"]}

    def apply(self, frozen, state, sums):
        del frozen
        return apply_gradients(self.optimizer, state, sums, self.objective.critic)

    def fused(self, frozen, state, batch):
        return self.apply(frozen, state, self.gradients(frozen, state.weights, batch))

    def gradients(self, frozen: Frozen, weights: Any, batch: Batch) -> Sums:
        """Returns gradient and metrics of Σ objective over a micro-batch."""
        with nnx.merge(self.graphdef, policy_params(frozen.base, weights[0])).full_precision():
            loss = functools.partial(self._loss, frozen, batch)
            (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(weights)
        return Sums(grads, metrics)

    def _loss(self, frozen, batch, weights):
        objective, (params, critic_params) = self.objective, weights
        model = nnx.merge(self.graphdef, policy_params(frozen.base, params))
        hidden = completion_hidden(model, batch.rows)
        own, measured = batch, {}
        inputs, how = head_arguments(model, hidden, batch.rows)
        how |= {"temperature": self.temperature, "entropy": objective.on_policy or objective.entropy_coef > 0}
        if frozen.ref_head is None:
            logprobs, entropy = losses.token_logprobs(*inputs, **how)
        else:
            found = losses.token_divergences(*inputs, batch.known("ref_hidden"), frozen.ref_head, **how)
            logprobs, entropy = found.logprobs, found.entropy
            own = dataclasses.replace(batch, ref_hidden=None, ref_logprobs=found.ref_logprobs, prefix_kl=found.kl)
        if objective.on_policy:
            present = jax.lax.stop_gradient(logprobs)
            ref_logprobs = present if own.ref_logprobs is None else own.ref_logprobs
            own = dataclasses.replace(own, behaviour_logprobs=present, ref_logprobs=ref_logprobs)
            measured = {
                "entropy": sum_and_weight(jax.lax.stop_gradient(entropy), batch.mask),
                **sampler_gap(present, batch.sampler_logprobs, batch.mask),
            }
        total, weight, metrics = objective.loss(logprobs, own)
        if objective.entropy_coef:
            total -= objective.entropy_coef * objective.mean(entropy, batch)[0]
        metrics = {**metrics, **measured, "loss": (total, weight)}
        if (critic := objective.critic) is not None:
            values = critic.values(critic_params, batch.rows)
            value_total, value_metrics = critic.loss(values, batch, objective.mean)
            total, metrics = total + value_total, metrics | value_metrics
        return total, metrics


def apply_gradients(
    optimizer: Optimizer, state: TrainState, sums: Sums, critic: Critic | None = None
) -> tuple[TrainState, Metrics]:
    """Makes the update with gradient Σ grads / Σ weight; policy and critic are each clipped by their own global norm.
    Where the loss or a norm is not finite, weights and slots stay as they are, and `skipped` counts the update, not
    `updates`. Returns the state, and the metrics of `sums` with `grad_norm` before the clip, `nonfinite_updates` (0 or
    1) and others as (sum, weight)."""
    total, weight = sums.metrics["loss"]
    weight = jnp.maximum(weight, 1e-9)
    norms = [optax.tree.norm(optax.tree.cast(grads, jnp.float32)) / weight for grads in sums.grads if grads is not None]
    finite = jnp.isfinite(total) & jnp.all(jnp.isfinite(jnp.stack(norms)))

    def stepped(optimizer, grads, norm, opt_state, params):
        clip = jnp.minimum(1.0, optimizer.max_grad_norm / jnp.maximum(norm, 1e-30))
        opt_state = in_device_memory(opt_state)
        return apply_update(optimizer.update, grads, opt_state, params, scale=clip / weight, where=finite)

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
