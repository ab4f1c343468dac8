"""Where the routers of a mixture of experts send tokens: how evenly, and whether sampler and trainer agree.

In bfloat16, sampler and trainer round a router's logits differently. Where two experts are almost equally probable they
choose different experts, and the token's log-probability changes by far more than rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.data import Group, RolloutBatch
from rpg_jax.losses import Metrics
from rpg_jax.parallel import hosts
from rpg_jax.rollout.engine import ReplayResult

_LONGEST = 1024  # tokens of a completion that a replay reads: it decodes one after the other

Replay = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], list[ReplayResult]]
"""(prompts, completions), one prompt for each completion -> the results of `rollout.replay`."""


@functools.partial(jax.jit, static_argnames="count")
def expert_load(experts: jax.Array, mask: jax.Array, *, count: int) -> jax.Array:
    """Counts the tokens that each layer's router sends to each expert, i32[L, count].

    `experts` [B, C, L, k] has the k experts of each token in each layer. Tokens with `mask` [B, C] 0 do not count.
    """
    layers = jnp.arange(experts.shape[2])[:, None]
    tokens = jnp.broadcast_to(mask[..., None, None] != 0, experts.shape)
    return jnp.zeros((experts.shape[2], count), jnp.int32).at[layers, experts].add(tokens.astype(jnp.int32))


def load_metrics(load: np.ndarray) -> dict[str, float]:
    """Metrics of the imbalance of the experts, from the number of tokens of each expert [L, E].

    max_violation: max_e load_e / mean load - 1 (MaxVio of arXiv:2408.15664), mean over layers; max_violation_worst: of
    the worst layer. cv: the coefficient of variation std(load) / mean load (arXiv:1701.06538), mean over layers. Every
    metric is 0 for an even load, and NaN if a layer has no token.
    """
    mean = load.mean(1, keepdims=True)
    relative = np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0)
    violation = relative.max(1) - 1
    return {
        "expert_load/max_violation": float(violation.mean()),
        "expert_load/max_violation_worst": float(violation.max()),
        "expert_load/cv": float(relative.std(1).mean()),
    }


def agreement(sampler: np.ndarray, trainer: np.ndarray, gaps: np.ndarray) -> dict[str, float]:
    """How often sampler and trainer choose different experts for a token, and how far the log-probs then differ.

    pairs_differing: the share of (token, layer) pairs whose sets of experts differ. tokens_differing: the share of
    tokens whose sets differ in at least one layer. gap_differing: mean |log π_s - log π_old| of the tokens that differ,
    in nats; gap_same: the mean of the other tokens. A mean over no tokens is absent.

    Args:
      sampler, trainer: experts of n tokens, [n, L, k]; the order of the k experts has no meaning.
      gaps: f32[n], |log π_s - log π_old| of each token, in nats.
    """
    differing = (np.sort(sampler, -1) != np.sort(trainer, -1)).any(-1)
    tokens = differing.any(-1)
    values = {"routing/pairs_differing": differing.mean(), "routing/tokens_differing": tokens.mean()}
    for name, chosen in (("differing", tokens), ("same", ~tokens)):
        if chosen.any():
            values[f"routing/gap_{name}"] = gaps[chosen].mean()
    return {name: float(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Routing:
    """Measures the routers of a policy with `experts` experts a layer.

    The log-prob pass of every step gives the load of the experts.

    Attributes:
      experts: the number of experts of a layer.
      every: a replay runs in step 1 and in every `every`-th step; 0 runs no replay.
      completions: a replay reads at most this many completions, all of the first micro-batch.
      replay: decodes completions again, and returns the experts that the sampler chooses; None runs no replay.
    """

    experts: int
    every: int = 0
    completions: int = 0
    replay: Replay | None = None

    def replayed(self, step: int, batch: RolloutBatch[Group]) -> list[tuple[int, int, ReplayResult]]:
        """Replays some completions if a replay is due; returns (group index, completion index, result) of each.

        Collective. Call it while the sampler still has the weights that sampled the batch, and while no other program
        needs the memory of a rollout. Groups carried over are left out, because older weights sampled them. A replay of
        a conversation stops at the first observation.
        """
        if self.replay is None or not self.every or (step != 1 and step % self.every):
            return []
        chosen = [
            (p, g, batch.groups[p].prompt, tokens)
            for p, places in enumerate(batch.packing.places)
            for g, place in enumerate(places)
            if place.micro_batch == 0 and batch.groups[p].behaviour_logprobs is None
            if len(tokens := _first_turn(batch.groups[p], g)) > 1
        ][: self.completions]
        if not chosen:
            return []
        groups, members, prompts, tokens = zip(*chosen, strict=True)
        return list(zip(groups, members, self.replay(prompts, tokens), strict=True))

    def metrics(
        self,
        batch: RolloutBatch[Group],
        replayed: Sequence[tuple[int, int, ReplayResult]],
        logprobs: jax.Array,
        experts: jax.Array,
    ) -> dict[str, float]:
        """The metrics of `agreement` between the experts of sampler and trainer, and `routing/replay_gap`.

        replay_gap: mean |log-prob of the replay - log-prob that the sampler reported|, in nats. A gap far from 0 means
        that the replay did not repeat the sampler's computation.

        Args:
          replayed: (group, completion, result) of each completion that a sampler's program has computed once more.
          logprobs, experts: the trainer's log-probs [B, C] and experts [B, C, L, k] of the first micro-batch.
        """
        if not replayed:
            return {}
        old, chosen = hosts.gathered(logprobs), hosts.gathered(experts)
        sampler, trainer, gaps, again = [], [], [], []
        for p, g, found in replayed:
            _, row, first, _ = batch.packing.places[p][g]
            n = len(found.logprobs)
            own = slice(first + 1, first + 1 + n)
            reported = batch.groups[p].completions[g].logprobs[1 : 1 + n]
            sampler.append(found.experts)
            trainer.append(chosen[row, own])
            gaps.append(np.abs(reported - old[row, own]))
            again.append(np.abs(reported - found.logprobs))
        values = agreement(*map(np.concatenate, (sampler, trainer, gaps)))
        return {**values, "routing/replay_gap": float(np.concatenate(again).mean())}


def _first_turn(group: Group, index: int) -> np.ndarray:
    """The tokens of a completion before the environment's first token, at most `_LONGEST` of them."""
    completion = group.completions[index]
    own = np.logical_and.accumulate(completion.sampled)
    return completion.tokens[own][:_LONGEST]


def as_metrics(values: dict[str, float]) -> Metrics:
    """Turns numbers into metrics (sum, weight) with the weight 1."""
    return {name: (jnp.float32(value), jnp.float32(1)) for name, value in values.items()}
