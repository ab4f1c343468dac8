"""The metrics of a step, and the guard that stops a run because of them."""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import losses, masking
from rpg_jax.losses import Metrics
from rpg_jax.training.collect import Collected
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState
from rpg_jax.types import Turns


class Clock:
    """Seconds of the parts of a step. The clock starts when it is made."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Notes the seconds since the last lap (or the start) as part `name`, in place of an earlier lap `name`."""
        now = time.perf_counter()
        self._laps[f"time/{name}"] = now - self._last
        self._last = now

    def metrics(self, *, tokens: float) -> dict[str, float]:
        """time/PART of each part, `seconds` from the start to the last lap, tokens_per_second: `tokens` / `seconds`."""
        total = self._last - self._start
        return {**self._laps, "seconds": total, "tokens_per_second": tokens / total}


@jax.jit
def sum_and_weight(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of `values` where `mask` is nonzero, and the sum of the mask (0 or 1), the number of tokens; scalars."""
    return masking.masked_sum(values, mask), jnp.sum(mask)


@jax.jit
def sampler_gap(logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array) -> Metrics:
    """Returns the metrics sampler_gap and sampler_gap_max, the mean and the maximum of |log π_s − log π| (nats) over
    tokens with mask 1, as (sum, tokens) and (maximum, tokens). All arguments are f32[B, C]."""
    gap, tokens = jnp.abs(logprobs - sampler_logprobs), jnp.sum(mask)
    return {
        "sampler_gap": (masking.masked_sum(gap, mask), tokens),
        "sampler_gap_max": (masking.masked_max(gap, mask), tokens),
    }


@functools.partial(jax.jit, static_argnames="count")
def expert_load(experts: jax.Array, mask: jax.Array, *, count: int) -> jax.Array:
    """Counts the tokens that each layer's router sends to each expert, i32[L, count]. `experts` [B, C, L, k] has the k
    experts of each token in each layer. Tokens with `mask` [B, C] 0 do not count."""
    layers = jnp.arange(experts.shape[2])[:, None]
    tokens = jnp.broadcast_to(mask[..., None, None] != 0, experts.shape)
    return jnp.zeros((experts.shape[2], count), jnp.int32).at[layers, experts].add(tokens.astype(jnp.int32))


def load_metrics(load: np.ndarray) -> Metrics:
    """Metrics expert_load/NAME of the experts' imbalance, (value, 1), from the number of tokens of each expert [L, E].

    max_violation: max_e load_e / mean load - 1 (MaxVio of arXiv:2408.15664), mean over layers; max_violation_worst: of
    the worst layer. cv: the coefficient of variation std(load) / mean load (arXiv:1701.06538), mean over layers. Every
    metric is 0 for an even load, and NaN if a layer has no token.
    """
    mean = load.mean(1, keepdims=True)
    relative = np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0)
    violation = relative.max(1) - 1
    found = {"max_violation": violation.mean(), "max_violation_worst": violation.max(), "cv": relative.std(1).mean()}
    return {f"expert_load/{name}": (jnp.float32(value), jnp.float32(1)) for name, value in found.items()}


def step_metrics(
    totals: Mapping[str, Any],
    collected: Collected,
    state: TrainState,
    reference: Reference,
    clock: Clock,
    parts: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Returns the metrics of a step by name, from the sums of its updates, its groups and the `clock`. `totals` are
    name -> (sum, weight). `parts` has the weights of reward parts. `state` is the state after the step. `sampler_gap`
    and `sampler_gap_max` are absent if the trainer has no log-probs of the weights that sampled the step's tokens."""
    values = losses.divided(totals)
    if not totals["sampler_gap"][1]:
        del values["sampler_gap"], values["sampler_gap_max"]
    values |= sampling_metrics(collected, parts)
    values |= {f"verifier_errors/{kind}": count for kind, count in collected.errors.items()}
    values |= collected.staleness
    values |= {"updates": int(state.updates), "skipped_updates": int(state.skipped)}
    # The effective sample size of u = π_old/π_s as a share of the tokens: mean(u)² / mean(u²).
    values["sampler_ess"] = values["sampler_ratio"] ** 2 / max(values["sampler_ratio_squared"], 1e-9)
    if "value_error" in values:
        values["explained_variance"] = losses.explained_variance(
            mean_error=values["value_error"],
            mean_error_squared=values["value_error_squared"],
            mean_return=values["return"],
            mean_return_squared=values["return_squared"],
        )
    values |= {"reference_update": reference.number, "reference_kl_average": reference.kl_average}
    return values | clock.metrics(tokens=values["completion_tokens"])


def sampling_metrics(collected: Collected, parts: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Returns means over the generated completions, the accounting of groups, and completion lengths in tokens.

    The means are for a prompt drawn at random: dynamic sampling does not bias them (`Collected.weights`). The length of
    a completion counts the tokens that the policy sampled; `conversation_metrics` counts an environment's tokens.
    `equal_rewards` is the share of prompts whose completions all have one reward. `failed` is the share of completions
    without a verdict (`Group.failed`); no mean has these completions. There are no means if no generated group has a
    verdict, as in a step that generates none. If a reward has several `parts` (name -> weight), each part that
    weighs has the metric `reward/PART`: the part's mean times its weight.
    """
    generated, completions = collected.generated, [c for g in collected.generated for c in g.completions]
    judged = {id(g): [c for c, known in zip(g.completions, g.judged, strict=True) if known] for g in generated}
    known = [g for g in generated if judged[id(g)]]
    by_group = {
        "reward": [g.rewards[g.judged].mean() for g in known],
        "accuracy": [g.accuracy[g.judged].mean() for g in known],
        "completion_length": [np.mean([c.sampled.sum() for c in judged[id(g)]]) for g in known],
        "truncated": [np.mean([c.truncated for c in judged[id(g)]]) for g in known],
        "equal_rewards": [np.ptp(g.rewards[g.judged]) == 0 for g in known],
    }
    apart = [g.parts[g.judged].mean(0) for g in known if g.parts is not None]  # f32[N] of each group
    if len(parts) > 1 and len(apart) == len(known):
        for place, (name, weight) in enumerate(parts.items()):
            if weight:  # else the part decides accuracy alone, and a 0 would look like its score
                by_group[f"reward/{name}"] = [weight * means[place] for means in apart]
    values = {name: float(collected.weights @ x) for name, x in by_group.items()} if known else {}
    counted = [c for own in judged.values() for c in own]
    values |= {"failed": 1 - len(counted) / len(completions)} if completions else {}
    values |= conversation_metrics(*([c.turns for c in own if c.turns is not None] for own in (completions, counted)))
    return values | {"completion_tokens": sum(int(c.sampled.sum()) for c in completions)} | collected.accounting()


def conversation_metrics(played: Sequence[Turns], judged: Sequence[Turns]) -> dict[str, float]:
    """Returns metrics of the conversations between the policy and an environment; {} if none was `played`.

    turns: the mean number of the policy's turns. observed_length: the mean number of tokens that the environment wrote.
    Both are means over the `judged` conversations, those with a known reward, and absent without any.
    environment_failed: the share of conversations that ended by a failure. environment_errors/KIND: the number of
    failures of each kind. Both are of all conversations that were `played`.
    """
    if not played:
        return {}
    errors = collections.Counter(turns.error for turns in played if turns.error is not None)
    values: dict[str, float] = {"environment_failed": errors.total() / len(played)}
    values |= {f"environment_errors/{kind}": count for kind, count in sorted(errors.items())}
    if judged:
        values["turns"] = float(np.mean([len(turns.rewards) for turns in judged]))
        values["observed_length"] = float(np.mean([turns.observed.sum() for turns in judged]))
    return values


SAMPLER_GAPS: Mapping[str, tuple[float, float]] = {"float32": (1e-4, 1e-4), "bfloat16": (0.04, 0.08)}
"""By the coarser dtype of sampler and trainer: the gap (nats) that causes a warning, and the gap that stops a run.

SmolLM2-135M has 0.032 in bfloat16, on two CPU cores and on an H100; 0.005 to 0.02 are usual.
"""


@dataclasses.dataclass
class Guard:
    """Says when to stop a run: its rollout is not the policy, or its updates are not finite.

    Attributes:
      max_sampler_gap: the `sampler_gap` of `loop.add_logprobs`, nats per token, above which the run stops.
      usual_sampler_gap: the `sampler_gap`, nats per token, above which the run warns once.
      nonfinite_in_a_row: a counter of the updates that were skipped since the last applied update.
      remedy: the advice in the message about updates that are not finite.
      max_nonfinite_updates: the number of skipped updates in a row that stops the run.
      limit: `rollout.max_tokens`. Step 1 warns if the limit has cut off most completions; None never warns.
      needs_rewards: whether the run learns from rewards alone: with a teacher it also learns from equal rewards.
    """

    max_sampler_gap: float
    usual_sampler_gap: float = math.inf
    nonfinite_in_a_row: int = 0
    remedy: str = "lower optimizer.learning_rate or look at the last lines of samples.jsonl"
    max_nonfinite_updates: int = 10
    limit: int | None = None
    needs_rewards: bool = True

    def warnings(self, step: int, values: Mapping[str, float]) -> Iterator[str]:
        """Yields a warning at the first gap above the usual gap, after each step that skipped an update or had no
        gradient although rewards differ, and after step 1 of what hinders learning: a limit that cut off more than half
        of the completions, or (with `needs_rewards`) equal rewards of all completions of each prompt. `values` are the
        metrics of step number `step`, from 1."""
        gap, usual = values.get("sampler_gap", 0.0), self.usual_sampler_gap
        if gap > usual:
            self.usual_sampler_gap = math.inf
            yield (
                f"warning: step {step}: sampler and trainer disagree by {gap:.2e} nats per token on average, rounding "
                f"makes less than {usual:g}; the run stops above rollout.max_sampler_gap={self.max_sampler_gap:g}"
            )
        if values.get("nonfinite_updates"):
            yield f"warning: step {step}: an update with a non-finite loss or gradient was skipped; {self.remedy}"
        if values.get("grad_norm_max") == 0 and values.get("equal_rewards", 1.0) < 1:
            yield (
                f"warning: step {step}: the gradient was exactly 0, although completions of a prompt differ in reward: "
                "look at loss.name and loss.advantage, where they are your own, or at rewards.overlong_masking"
            )
        if self.limit is not None and step == 1 and (share := values.get("truncated", 0.0)) > 0.5:
            ended = f"completions were cut off at rollout.max_tokens={self.limit}, so unfinished texts are rewarded. "
            ended += f"Set rollout.max_tokens={4 * self.limit}, ask for short answers in the prompt"
            if "turns" in values:
                ended = "conversations met environment.max_turns (finish_reason turns) or a limit of tokens. Raise it"
            yield f"warning: step 1: {share:.0%} of the {ended}, or leave such out by rewards.overlong_masking=True"
        if self.needs_rewards and step == 1 and values.get("equal_rewards", 0.0) == 1:
            yield (
                f"warning: step 1: the completions of each prompt have equal rewards (mean {values['reward']:.3g}). "
                "An advantage that compares them learns nothing. Look at samples.jsonl: give easier problems, let the "
                "reward grade what is almost right, or raise rollout.group_size"
            )

    def fault(self, step: int, values: Mapping[str, float], updates: Sequence[Mapping[str, float]]) -> str | None:
        """Returns the reason to stop the run after a step, and the fix; None if there is no reason. Called once a step.
        `values` are metrics of the step, and `updates` of each of its updates. A NaN gap stops the run."""
        for update in updates:
            self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if update["nonfinite_updates"] else 0
        gap = values.get("sampler_gap", 0.0)
        if not gap <= self.max_sampler_gap:
            return (
                f"step {step}: sampler and trainer disagree by {gap:.2e} nats per token on average, more than "
                f"rollout.max_sampler_gap={self.max_sampler_gap:g}: the off-policy weights would be wrong. If the two "
                "use different precisions on purpose, raise the limit and set loss.sampler_correction=truncate"
            )
        if self.nonfinite_in_a_row >= self.max_nonfinite_updates:
            return (
                f"step {step}: {self.nonfinite_in_a_row} updates in a row had a non-finite loss or gradient and "
                f"were skipped; {self.remedy}"
            )
        return None
