"""The RL loop: sample, score, advantages, log-probs, updates, reference, weight sync."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import losses
from rpg_jax.data import PromptStream
from rpg_jax.losses import Metrics
from rpg_jax.rollout import Rollout
from rpg_jax.training import metrics as metrics_lib
from rpg_jax.training.experience import DynamicSampling, Group, Sampler, collect
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState
from rpg_jax.training.step import Programs
from rpg_jax.types import Batch

AdvantageFn = Callable[[np.ndarray, np.ndarray], jax.Array]
Batcher = Callable[[Sequence[Group], np.ndarray], list[Batch]]


@dataclasses.dataclass
class Trainer:
    """One RL run in progress.

    Attributes:
      state: weights, optimizer slots and counts.
      programs: the jitted log-prob pass and update.
      stream: of problems.
      sample: completions and scores for problems.
      advantages: f32[P, G] of rewards f32[P, G] and completion lengths i32[P, G].
      batcher: micro-batches, all of one shape, for groups and their advantages.
      rollout: the sampler whose weights follow the policy.
      reference: the KL anchor.
      dynamic: dynamic sampling, or None.
      prompts_per_step: groups trained on per step.
      updates_per_step: mini-batches of a rollout batch, all from one behaviour policy.
      epochs: passes over a rollout batch.
      batch_sharding: of rows.
      max_sampler_gap: mean |log π_s − log π_old| in nats above which the run stops.
      max_nonfinite_updates: skipped updates in a row that stop the run.
      step: steps done.
    """

    state: TrainState
    programs: Programs
    stream: PromptStream
    sample: Sampler
    advantages: AdvantageFn
    batcher: Batcher
    rollout: Rollout
    reference: Reference
    dynamic: DynamicSampling | None
    prompts_per_step: int
    updates_per_step: int
    epochs: int
    batch_sharding: jax.sharding.NamedSharding
    max_sampler_gap: float
    max_nonfinite_updates: int
    step: int = 0
    nonfinite_in_a_row: int = 0

    def run_step(self) -> tuple[dict[str, float], list[Group]]:
        """One rollout batch and its updates. Returns the step's metrics and the groups that were generated."""
        clock = _Clock()
        groups, generated = collect(
            self.stream,
            self.sample,
            prompts_per_step=self.prompts_per_step,
            step=self.step,
            dynamic=self.dynamic,
        )
        clock.lap("rollout")

        minibatches = self._minibatches(groups)
        minibatches, entropy = self._with_logprobs(minibatches)
        clock.lap("logprobs")

        totals = self._update(minibatches)
        clock.lap("update")

        self.sync_rollout()
        clock.lap("sync")

        self.step += 1
        values = metrics_lib.mean({**totals, "entropy": entropy})
        values |= sampling_metrics(groups, generated)
        values |= {"updates": int(self.state.updates), "skipped_updates": int(self.state.skipped)}
        values["kl"], values["sampler_ess"] = values["kl_k3"], _effective_share(values)
        values |= {"reference_update": self.reference.number, "reference_kl_average": self.reference.kl_average}
        values |= clock.metrics(tokens=values["completion_tokens"])
        self._check(values)
        return values, generated

    def _minibatches(self, groups: list[Group]) -> list[list[Batch]]:
        """Every U-th group makes a mini-batch, so that a shortage of groups is spread over all of them."""
        rewards = np.stack([g.rewards for g in groups])
        lengths = np.array([[len(c.tokens) for c in g.completions] for g in groups], np.int32)
        advantages = np.asarray(self.advantages(rewards, lengths))
        chosen = [slice(u, None, self.updates_per_step) for u in range(self.updates_per_step)]
        return [jax.device_put(self.batcher(groups[rows], advantages[rows]), self.batch_sharding) for rows in chosen]

    def _with_logprobs(self, minibatches: list[list[Batch]]) -> tuple[list[list[Batch]], tuple[jax.Array, jax.Array]]:
        """Behaviour log-probs by the trainer itself, the reference's where it is another policy, and Σ entropy."""
        behaviour, entropies = [], []
        for batch in (b for micro_batches in minibatches for b in micro_batches):
            logprobs, entropy = self.programs.logprobs(self.state.params, batch)
            behaviour.append(logprobs)
            entropies.append((jnp.sum(jnp.where(batch.mask > 0, entropy, 0)), jnp.sum(batch.mask)))
        ref = behaviour
        if not self.reference.coincides(int(self.state.updates)):
            params = self.reference.params()
            ref = [self.programs.logprobs(params, b)[0] for micro_batches in minibatches for b in micro_batches]
        pairs = iter(zip(behaviour, ref, strict=True))

        def complete(batch: Batch) -> Batch:
            old, anchor = next(pairs)
            return dataclasses.replace(batch, behaviour_logprobs=old, ref_logprobs=anchor)

        completed = [[complete(b) for b in micro_batches] for micro_batches in minibatches]
        return completed, losses.merge([{"entropy": pair} for pair in entropies])["entropy"]

    def _update(self, minibatches: list[list[Batch]]) -> Metrics:
        """`epochs` passes of one update per mini-batch; returns the summed metrics."""
        per_update = []
        for _ in range(self.epochs):
            for micro_batches in minibatches:
                self.state, update_metrics = self.programs.update(self.state, micro_batches)
                per_update.append(update_metrics)
                self.reference.after_update(self.state.params, int(self.state.updates))
        values = [metrics_lib.mean(m) for m in per_update]
        for value in values:
            self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if value["nonfinite_updates"] else 0
        finite_kls = [v["kl_k3"] for v in values if not v["nonfinite_updates"]]
        self.reference.after_step(self.state.params, int(self.state.updates), finite_kls)
        return losses.merge(per_update)

    def sync_rollout(self) -> None:
        """Hands the weights to the sampler and verifies that it holds the same bits.

        Raises:
          RolloutError: the checksums differ, so completions would come from another policy than the one trained.
        """
        self.rollout.sync_weights(self.state.params, int(self.state.updates))
        self.rollout.verify_weights(self.state.params)

    def _check(self, values: dict[str, float]) -> None:
        gap = values["sampler_gap"]
        if not gap <= self.max_sampler_gap:
            raise RuntimeError(
                f"step {self.step}: sampler and trainer disagree by {gap:.2e} nats per token on average, more than "
                f"rollout.max_sampler_gap={self.max_sampler_gap:g}: the off-policy weights would be wrong. If the two "
                "use different precisions on purpose, raise the limit and set loss.truncated_importance_sampling=2"
            )
        if self.nonfinite_in_a_row >= self.max_nonfinite_updates:
            raise RuntimeError(
                f"step {self.step}: {self.nonfinite_in_a_row} updates in a row had a non-finite loss or gradient and "
                "were skipped; lower optimizer.learning_rate or look at the last lines of samples.jsonl"
            )

    def record(self) -> dict[str, Any]:
        """Everything besides `state` that a resume needs, JSON-able."""
        return {
            "step": self.step,
            "stream": self.stream.state(),
            "reference": self.reference.commit(),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def restore(self, state: TrainState, record: dict[str, Any]) -> None:
        """Goes back to a state and the record that was taken with it."""
        self.state, self.step = state, int(record["step"])
        self.stream.restore(record["stream"])
        self.reference.restore(record["reference"])
        self.nonfinite_in_a_row = int(record["nonfinite_in_a_row"])


def sampling_metrics(groups: Sequence[Group], generated: Sequence[Group]) -> dict[str, float]:
    """What was generated, and what of it is trained on; lengths in tokens."""
    completions = [c for g in generated for c in g.completions]
    return {
        "reward": float(np.mean([g.rewards.mean() for g in generated])),
        "accuracy": float(np.mean([g.accuracy.mean() for g in generated])),
        "completion_length": float(np.mean([len(c.tokens) for c in completions])),
        "completion_tokens": sum(len(c.tokens) for c in completions),
        "truncated": float(np.mean([c.finish_reason == "length" for c in completions])),
        "groups_generated": len(generated),
        "groups_trained": len(groups),
        "groups_informative": sum(g.informative for g in generated),
    }


def _effective_share(values: dict[str, float]) -> float:
    """Effective sample size of u = π_old/π_s as a share of the tokens, mean(u)² / mean(u²)."""
    return values["sampler_ratio"] ** 2 / max(values["sampler_ratio_squared"], 1e-9)


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[f"time/{name}"] = now - self._last
        self._last = now

    def metrics(self, *, tokens: float) -> dict[str, float]:
        total = self._last - self._start
        return {**self._laps, "seconds": total, "tokens_per_second": tokens / total}
