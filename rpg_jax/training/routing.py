"""Where the routers of a mixture of experts send tokens: how evenly, and whether sampler and trainer agree.

In bfloat16, sampler and trainer round a router's logits differently. Where two experts are almost equally probable they
choose different ones, and the token's log-probability changes by far more than rounding.
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
"""Prompts and completions, one prompt a completion -> what the sampler computes, as `rollout.replay`."""


@functools.partial(jax.jit, static_argnames="count")
def expert_load(experts: jax.Array, mask: jax.Array, *, count: int) -> jax.Array:
    """Tokens of each expert in each layer, i32[L, count], of experts [B, C, L, k] and the mask f32[B, C]."""
    layers = jnp.arange(experts.shape[2])[:, None]
    tokens = jnp.broadcast_to(mask[..., None, None] != 0, experts.shape)
    return jnp.zeros((experts.shape[2], count), jnp.int32).at[layers, experts].add(tokens.astype(jnp.int32))


def load_metrics(load: np.ndarray) -> dict[str, float]:
    """How unevenly the experts are used, from their tokens [L, E]; all are 0 where they are used evenly.

    max_violation: max_e load_e / mean load - 1, MaxVio of arXiv:2408.15664, mean over layers; max_violation_worst: of
    the layer where it is largest. cv: the coefficient of variation, std(load) / mean load (arXiv:1701.06538), mean over
    layers. They are means over the tokens of a step, and NaN without any.
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
    """How often sampler and trainer send a token to other experts, and what becomes of its log-probability.

    pairs_differing: the share of (token, layer) pairs whose sets of experts differ. tokens_differing: the share of
    tokens with such a layer. gap_differing, gap_same: mean |log π_s - log π_old| of these tokens and of the others, in
    nats; each is left out where there is no such token.

    Args:
      sampler, trainer: [n, L, k], in any order of the k.
      gaps: f32[n], nats.
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

    The load is that of every step's log-prob pass. `replay` computes again what the sampler has chosen, for the first
    `completions` completions of the first micro-batch, in step 1 and every `every`-th; 0 never does. `cuts` says that
    the sampler cuts the distribution, by top-p or such.
    """

    experts: int
    every: int = 0
    completions: int = 0
    replay: Replay | None = None
    cuts: bool = False

    def replayed(self, step: int, batch: RolloutBatch[Group]) -> list[tuple[int, int, ReplayResult]]:
        """(group, completion, replay) of some completions, where a replay is due. Call it where the sampler has the
        weights that sampled the batch and nothing else needs a rollout's memory. Collective.

        Carried groups are left out, as older weights sampled them. A conversation ends at its first observation.
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
        """`agreement` with the trainer's log-probs [B, C] and experts [B, C, L, k] of the first micro-batch.

        replay_gap: mean |log-prob of the replay - that which the sampler reported|, in nats. If it is not near 0, the
        replay did not repeat what the sampler had computed. With `cuts` the two are not comparable: it is left out.
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
        return values if self.cuts else {**values, "routing/replay_gap": float(np.concatenate(again).mean())}


def _first_turn(group: Group, index: int) -> np.ndarray:
    """The tokens of a completion before the first that an environment wrote, at most `_LONGEST`."""
    completion = group.completions[index]
    own = np.logical_and.accumulate(completion.sampled)
    return completion.tokens[own][:_LONGEST]


def as_metrics(values: dict[str, float]) -> Metrics:
    """Numbers that need no division, as (sum, weight)."""
    return {name: (jnp.float32(value), jnp.float32(1)) for name, value in values.items()}
