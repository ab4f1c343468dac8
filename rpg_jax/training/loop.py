"""The algorithm: regularized policy gradients, iterative reference (arXiv:2505.17508, Algorithm 2 and section 4)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import losses
from rpg_jax.data import Group, RolloutBatch
from rpg_jax.losses import Metrics
from rpg_jax.training.collect import Collector
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.measures import Clock, expert_load, load_metrics, sampler_gap, step_metrics, sum_and_weight
from rpg_jax.training.objective import Advantages
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState
from rpg_jax.training.step import Anchor, Programs, Rehearsed
from rpg_jax.types import Rows


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The parts of a step.

    Attributes:
      collector: rollouts, scores and dynamic sampling; remembers the groups that it carries over.
      pack: `data.pack` with the run's arguments bound; takes groups and a number of `minibatches`.
      advantages: computes the advantages of a batch, see `advantages_fn`; None with a critic.
      programs: the jitted log-prob pass and update.
      reference: the KL anchor; remembers when it moved.
      updates_per_step, epochs: mini-batches of a batch, and passes over it; updates_per_step · epochs updates a step.
      on_policy: a step has one update, on completions of the weights before the update. Then π_old is the policy in
        training. The update itself computes log π_old, the entropy and the sampler's gap, without a pass before it.
      decoupled: π_old is the policy at the beginning of the step, π_prox, for stale completions too. So w = π_θ/π_prox
        is clipped, and π_prox/π_s is left to the loss's sampler correction, which must carry it
        (`losses.carried_ratio`; decoupled PPO: AReaL, arXiv:2505.24298). Otherwise π_old is the policy that sampled.
      exact: the loss sums the KL over the vocabulary. Then an update reads the reference's hidden states and computes
        log π_ref too, without a pass before it.
      rehearsal: the kept completions of an update by its number, from 0; None without rehearsal.
      token_rewards: returns the reward of each token of groups; only a critic needs these rewards.
      reward_parts: the weight of each part of the reward, in the order of `Group.parts`.
      experts: the number of experts of a layer; 0 in a dense model.
      after_updates: called with (the step's number, the batch with all log-probs, the new state); None: no call.
      is_recorded: whether `after_updates` is called in a step, by the step's number.
      fault: (number, metrics, metrics of each update) -> the reason to stop the run after this step, or None; see
        `measures.Guard`. It is called before the rollout gets the weights.
    """

    collector: Collector
    pack: Callable[..., RolloutBatch]
    advantages: Advantages | None
    programs: Programs
    reference: Reference
    updates_per_step: int
    epochs: int = 1
    on_policy: bool = False
    decoupled: bool = False
    exact: bool = False
    rehearsal: Callable[[int], Rehearsed] | None = None
    token_rewards: Callable[[Sequence[Group]], list[list[np.ndarray]]] | None = None
    after_updates: Callable[[int, RolloutBatch, TrainState], None] | None = None
    is_recorded: Callable[[int], bool] = lambda step: True
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    experts: int = 0
    fault: Callable[[int, Mapping[str, float], Sequence[Mapping[str, float]]], str | None] = lambda *_: None

    def logprobs(self, params: Any, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns log-probs at the sampling temperature and entropies of the completion tokens of a micro-batch, in
        nats f32[B, C], and the k experts of each token in each of L layers, [B, C, L, k] (None in a dense model)."""
        beat()
        return self.programs.logprobs(params, rows)


@dataclasses.dataclass(frozen=True)
class Step:
    """The record of a finished step, which logs, trackers and a user's `on_step` receive.

    Attributes:
      number: of the step, from 1. The record before a run's first step has number 0, or that of its parent's step.
      state: the weights and the optimizer's slots after the step. The next step donates the arrays.
      metrics: the metrics of the step by name, and the scores of an evaluation if an evaluation followed the step.
      updates: the metrics of each optimizer update of the step.
      groups: the groups of completions that the step generated.
      fault: the reason to stop the run after this step; the rollout did not get its weights. None: the run goes on.
    """

    number: int
    state: TrainState
    metrics: Mapping[str, float]
    updates: Sequence[Mapping[str, float]] = ()
    groups: Sequence[Group] = ()
    fault: str | None = None


def take_step(a: Algorithm, state: TrainState, number: int) -> Step:
    """Takes step `number` (the first is 1): samples, scores, computes log-probs and advantages, updates, moves the
    reference, and hands the new weights to the rollout unless `a.fault` stops the run. The arrays of `state` are
    donated: the returned record has the state after the step. Raises the errors of collector and reference."""
    clock = Clock()
    collected = a.collector.take(number - 1, state.params, int(state.updates))
    clock.lap("rollout")

    batch = a.pack(collected.trained, minibatches=a.updates_per_step)
    records = a.after_updates is not None and a.is_recorded(number)
    measured: Metrics = {}
    if not a.on_policy or records:
        batch, measured = add_logprobs(a, batch, state, reference=records or not a.exact)
    elif not a.exact and a.reference.differs(a.updates_per_step):
        batch = batch.add(ref_logprobs=_reference_pass(a, batch, state))
    batch = add_advantages(a, batch, state)
    trained, measured = (for_the_update(a, batch), {}) if a.on_policy else (batch, measured)
    if not a.collector.lags:
        a.collector.carried = with_behaviour_logprobs(a, collected.carried, state)
    clock.lap("logprobs")

    state, totals, updates = update(a, trained, state, number)
    clock.lap("update")
    if a.after_updates is not None and records:
        a.after_updates(number, batch, state)
        clock.lap("rollout_files")

    totals |= measured
    fault = a.fault(number, losses.divided(totals), updates)
    if fault is None:
        a.collector.publish(state.params, int(state.updates))
        clock.lap("sync")
    metrics = step_metrics(totals, collected, state, a.reference, clock, a.reward_parts)
    return Step(number, state, metrics, updates, collected.generated, fault)


def for_the_update(a: Algorithm, batch: RolloutBatch) -> RolloutBatch:
    """Returns the batch for an update that computes log π_old itself: `behaviour_logprobs` are None, and `ref_logprobs`
    are None too unless the reference may differ from the policy that samples."""
    other = a.reference.differs(a.updates_per_step)
    own = [
        dataclasses.replace(b, behaviour_logprobs=None, ref_logprobs=b.ref_logprobs if other else None)
        for b in batch.batches
    ]
    return dataclasses.replace(batch, batches=own)


def add_logprobs(
    a: Algorithm, batch: RolloutBatch, state: TrainState, *, reference: bool = True
) -> tuple[RolloutBatch, Metrics]:
    """Returns the batch with the column `behaviour_logprobs` (and `ref_logprobs` if `reference`), and metrics.
    log π_old is the trainer's pass under the present weights, or, unless `a.decoupled`, the stored number of a token
    that earlier weights sampled.

    The metrics are sums and weights: `entropy`, the routers' metrics, and `sampler_gap` and `sampler_gap_max`, the mean
    and the maximum of |log π_s − log π| over the tokens for which the trainer has computed log π under the weights that
    sampled them. The distance to other weights is no fault of the sampler.
    """
    present, measured = _present_pass(a, batch, state)
    drawn, compared = present, tuple(b.mask for b in batch.batches)
    if any(g.behaviour_logprobs for g in batch.groups):  # earlier weights sampled these tokens
        stored = batch.scatter([g.stored_logprobs for g in batch.groups])
        drawn = tuple(jnp.where(jnp.isnan(s), x, s) for s, x in zip(stored, present, strict=True))
        if a.collector.lags:  # what is stored are the rollout's own numbers
            compared = tuple(m * jnp.isnan(s) for m, s in zip(compared, stored, strict=True))
    behaviour = present if a.decoupled else drawn
    columns = {"behaviour_logprobs": behaviour}
    if reference:
        columns["ref_logprobs"] = behaviour if a.reference.is_behaviour else _reference_pass(a, batch, state, present)
    gaps = [
        sampler_gap(logprobs, b.sampler_logprobs, chosen)
        for b, logprobs, chosen in zip(batch.batches, drawn, compared, strict=True)
    ]
    return batch.add(**columns), measured | losses.merge(gaps)


def _reference_pass(
    a: Algorithm, batch: RolloutBatch, state: TrainState, present: tuple[jax.Array, ...] | None = None
) -> tuple[jax.Array, ...]:
    """log π_ref of each micro-batch, f32[B, C]. `present` are the log-probs of the present policy; None: unknown.

    A reference that is not the present policy chooses its own experts: the recorded experts are the policy's.
    """
    if a.reference.scores is not None:
        return tuple(batch.scatter(a.reference.scores(batch.groups)))
    coincides = a.reference.coincides()
    if coincides and present is not None:
        return present
    params = state.params if coincides else a.reference.params()
    of = a if a.reference.programs is None else dataclasses.replace(a, programs=a.reference.programs)
    return tuple(of.logprobs(params, b.rows if coincides else b.rows.unrouted)[0] for b in batch.batches)


def _present_pass(a: Algorithm, batch: RolloutBatch, state: TrainState) -> tuple[tuple[jax.Array, ...], Metrics]:
    """Log-probs f32[B, C] of each micro-batch under the present weights, and the pass's metrics as (sum, weight)."""
    present, sums, load = [], [], []
    for b in batch.batches:
        logprobs, entropy, experts = a.logprobs(state.params, b.rows)
        present.append(logprobs)
        sums.append({"entropy": sum_and_weight(entropy, b.mask)})
        if experts is not None:
            load.append(expert_load(experts, b.mask, count=a.experts))
    of_experts = load_metrics(np.sum(jax.device_get(load), 0)) if load else {}
    return tuple(present), losses.merge(sums) | of_experts


def add_advantages(a: Algorithm, batch: RolloutBatch, state: TrainState) -> RolloutBatch:
    """Returns the batch with the columns of `a.advantages`, from the rewards of a group or batch. With a critic, the
    batch gets `rewards` of tokens, and `advantages`, `values` and `returns` from the critic's values of the tokens."""
    if a.advantages is not None:
        columns = a.advantages(batch)
        return batch.add(**{name: batch.scatter(values) for name, values in columns.items()})
    assert a.programs.baseline is not None and a.token_rewards is not None, "without advantages there is a critic"
    batch = batch.add(rewards=batch.scatter(a.token_rewards(batch.groups)))
    advantages, returns, values = zip(*(a.programs.baseline(state.weights, b) for b in batch.batches), strict=True)
    return batch.add(advantages=advantages, returns=returns, values=values)


def with_behaviour_logprobs(a: Algorithm, groups: Sequence[Group], state: TrainState) -> list[Group]:
    """Returns the groups for a later step, with their log π_old. The weights in `state` have sampled the groups."""
    if not groups:
        return []
    batch = a.pack(groups)
    known = batch.gather([a.logprobs(state.params, b.rows)[0] for b in batch.batches])
    return [dataclasses.replace(g, behaviour_logprobs=x) for g, x in zip(groups, known, strict=True)]


def anchor_of(a: Algorithm, state: TrainState) -> Anchor:
    """Returns the reference whose distributions a step's updates read. If it is the present policy, its weights are
    copied, because updates donate the policy's arrays."""
    coincides, programs = a.reference.coincides(), a.reference.programs or a.programs
    if coincides:
        return programs.anchor(jax.tree.map(jnp.copy, state.params), replays=True)
    return programs.anchor(a.reference.params())


def update(a: Algorithm, batch: RolloutBatch, state: TrainState, step: int) -> tuple[TrainState, Metrics, list]:
    """Makes one update a mini-batch, in `a.epochs` passes over `batch`, and tells the reference of each update. Returns
    the state, the metrics as sums and weights over all updates, and the mean metrics of each update. Waits for the
    devices. `step` is the number of the step, from 1. The arrays of `state` are donated."""
    minibatches, running, summed = batch.minibatches * a.epochs, [], []
    anchor = anchor_of(a, state) if a.exact else None
    a.reference.before_updates(state.params, step, len(minibatches))
    before = (step - 1) * a.updates_per_step * a.epochs
    for number, micro_batches in enumerate(minibatches, start=before):
        rehearsed = {} if a.rehearsal is None else {"rehearsed": a.rehearsal(number)}
        state, metrics = a.programs.update(state, micro_batches, anchor, **rehearsed)
        a.reference.after_update(state.params)
        running.append(metrics)
    for metrics in running:
        summed.append(jax.device_get(metrics))  # waits for the update
        beat()
    updates = [losses.divided(metrics) for metrics in summed]
    a.reference.after_step([values["kl"] for values in updates if not values["nonfinite_updates"]])
    return state, losses.merge(summed), updates
