"""Seconds of decoding by the lengths of completions, and days and dollars of steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rpg_jax.planning.chips import Chip, Rates
from rpg_jax.planning.topologies import Topology


def figures(seconds: Mapping[str, float], on: Topology, rates: Rates, *, steps: int, synced: float) -> dict[str, Any]:
    """The times of a step and of the run of `steps`, for JSON. `seconds` are the phases of the step on the slice `on`
    at `rates`; they follow each other. `synced` are the bytes of the weights that each server loads after a step.
    Returns "phases", the seconds of each; "seconds" and "seconds_beside_servers" of a step; "days" of the run; and
    "dollars" of the run and "step_dollars", at list prices, None if the chip's price is not known.

    Beside servers these chips only train, and as many other chips, the servers, sample one step ahead. Training stands
    still while a host copies its part of the weights to its memory. While servers sample, the part is written and then
    every server reads all weights; a step takes at least as long as write and read together. Servers sample
    evaluations, too, while training waits."""
    step, evaluations = sum(seconds.values()), seconds.get("evaluations", 0.0)
    rollout = sum(s for name, s in seconds.items() if name.startswith(("prefill", "decode", "exchange")))
    part = synced / on.hosts / rates.host
    training = step - rollout - evaluations + part
    hours, hourly = steps * step / 3600, on.hourly
    return {
        "phases": dict(seconds),
        "seconds": step,
        "seconds_beside_servers": max(rollout, training, part + synced / rates.host) + evaluations,
        "days": hours / 24,
        "dollars": None if hourly is None else hours * hourly,
        "step_dollars": None if hourly is None else step / 3600 * hourly,
    }


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One decode step of all slots of a mesh, with its costs on one chip of the mesh.

    Attributes:
      slots: slots of the mesh.
      fixed: bytes to and from HBM at every step: weights, activations, logits.
      cached: bytes of the cache for one attended token of every slot.
      products: operations of matrix products.
      scores: operations of attention for one attended token of every slot.
      network: bytes that collectives bring.
      collectives: number of collectives.
      steps_per_dispatch: decode steps of a dispatch, after which the host fills slots.
    """

    slots: float
    fixed: float
    cached: float
    products: float
    scores: float
    network: float = 0.0
    collectives: float = 0.0
    steps_per_dispatch: int = 16


def decode(step: DecodeStep, completions: float, lengths: Lengths, chip: Chip, rates: Rates) -> dict[str, float]:
    """The seconds of each part of decoding `completions` on a mesh, all steps together. The parts follow each other.
    "weights": every step reads the weights and multiplies all slots, also idle slots. "cache": attention reads the
    filled part of the cache. "latency": the collectives. "host": the time between dispatches."""
    tokens = completions * lengths.mean
    steps, positions = decode_steps(completions, lengths, step.slots), tokens / step.slots * lengths.attended
    bandwidth, flops = rates.hbm * chip.hbm_bandwidth, rates.flops * chip.flops
    network = step.network / (rates.ici * chip.ici_bandwidth)
    return {
        "weights": steps * max(step.fixed / bandwidth, step.products / flops),
        "cache": positions * max(step.cached / bandwidth, step.scores / flops),
        "latency": steps * (network + step.collectives * rates.collective_seconds),
        "host": steps / step.steps_per_dispatch * rates.dispatch_seconds,
    }


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes:
      prompt: p, the mean length of prompts.
      mean: m, the mean length of completions.
      spread: c, the coefficient of variation of the lengths of completions.
      limit: the largest length of a completion.
      part: the most tokens of a completion that a step draws (`rollout.partial_tokens`); inf: no limit of its own.
    """

    prompt: float
    mean: float
    spread: float
    limit: float
    part: float = math.inf

    @property
    def mean_square(self) -> float:
        """E[n²] = m² (1 + c²) of the lengths n of completions, in tokens²."""
        return self.mean**2 * (1 + self.spread**2)

    @property
    def attended(self) -> float:
        """Cached tokens that a decoded token attends to, on average over all decoded tokens. The tokens of a completion
        of n tokens attend to p, p + 1, …, p + n - 1. The mean is p + (E[n²] / E[n] - 1) / 2."""
        return self.prompt + (self.mean_square / self.mean - 1) / 2

    @property
    def attended_in_training(self) -> float:
        """Tokens that a token of prompt or completion attends to in training, in the mean: E[(p + n)²] / (2(p + m))."""
        square = self.prompt**2 + 2 * self.prompt * self.mean + self.mean_square
        return square / (2 * (self.prompt + self.mean))

    @property
    def longest(self) -> float:
        """Tokens of the longest of many parts in a step: mean + 4 standard deviations, at most `limit` and `part`."""
        return min(self.limit, self.part, self.mean * (1 + 4 * self.spread))

    @property
    def begun(self) -> list[tuple[float, float]]:
        """For the second and each further part of a completion: (tokens that the part's prefill reads, share of the
        completions that reach the part). [] if a completion has one part. Lengths are taken as normally distributed."""
        if self.part >= self.limit:
            return []
        drawn = [k * self.part for k in range(1, math.ceil(self.limit / self.part))]
        deviation = self.mean * self.spread * math.sqrt(2)
        return [(self.prompt + n, math.erfc((n - self.mean) / deviation) / 2) for n in drawn]


def decode_steps(completions: float, lengths: Lengths, slots: float) -> float:
    """Returns the decode steps in which `slots` draw `completions` completions; a free slot is refilled at once.

    A completion is one part; or several, where a step draws only a part of a long completion (`lengths.begun`). With
    parts of m tokens in the mean, slots / m parts end at a step. So the last part starts at step m (parts - slots) /
    slots, and takes at most `longest` steps. For one to two parts a slot the sum is up to a fifth low, because parts of
    like length end together."""
    parts = completions * (1 + sum(share for _, share in lengths.begun))
    return completions * lengths.mean / parts * max(0.0, parts - slots) / slots + lengths.longest
