"""Seconds, days and dollars of a step: the bound of the hardware, the expected time, and the phase that binds.

The rollout, worked by hand for Qwen3-4B with completions of 8,192 tokens on v5p:4x4x4. There
are 1,536 prompts of 300 tokens and 24,576 completions of 4,096 tokens in the mean with a coefficient of variation of
0.6, in 2,560 slots. Each host of four chips has one copy of the weights.

  a token's keys and values    36 layers × 2 × 8 heads × 128 × 2 bytes           = 147,456 bytes
  attended in the mean         300 + (4096 × 1.36 - 1) / 2                       = 3,085 tokens
  cache that is read           24,576 × 4,096 × 3,085 × 147,456 bytes            = 4.58e16 bytes
    over 64 chips              / (64 × 2.765e12 bytes/s)                         = 259 s
  steps                        24,576 × 4,096 / 2,560                            = 39,322
  weights that are read        39,322 × 8.04e9 bytes / 4 chips / 2.765e12        = 29 s

With 128 slots the same weights are read 786,432 times, which takes 572 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rpg_jax.models import DecoderConfig
from rpg_jax.planning import efficiency
from rpg_jax.planning.compiling import Program, token_flops, token_training_flops
from rpg_jax.planning.topologies import Chip, Topology


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one step of a run.

    Attributes:
      steps: steps of the run.
      prompts: groups that are sampled, dynamic sampling's oversampling included.
      trained: groups that the updates train on.
      group_size: completions of a prompt.
      lengths: lengths of prompts and completions.
      meshes: decoding meshes, which take prompts from one list.
      prefill_prompts: prompts of mean length in a dispatch of prefill.
      updates: mini-batches.
      epochs: passes over the mini-batches.
      passes: log-probability passes, of the behaviour policy and of a reference that differs from it. A pass of a
        teacher counts by the sizes of the two models.
      micro_batch: (rows, tokens of a row).
      packed: whether completions share rows.
      remat: the activations that are computed again.
      frozen: whether updates train adapters alone.
      run: share of a micro-batch's operations that are run: attention skips blocks between completions of one row.
    """

    steps: int
    prompts: float
    trained: float
    group_size: int
    lengths: Lengths
    meshes: int
    prefill_prompts: int
    updates: int
    epochs: int
    passes: float
    micro_batch: tuple[int, int]
    packed: bool
    remat: str
    frozen: bool = False
    run: float = 1.0

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens of the groups that the updates train on."""
        return self.trained * self.group_size * (self.lengths.prompt + self.lengths.mean)

    @property
    def micro_batches(self) -> int:
        """Whole micro-batches of an update."""
        rows, length = self.micro_batch
        needed = self.trained * self.group_size / self.updates
        if self.packed:
            needed = self.tokens / self.updates / length / efficiency.PACKING
        return math.ceil(needed / rows)


def bound(work: Work, step: DecodeStep, programs: Mapping[str, Program], model: DecoderConfig, on: Topology) -> Phases:
    """Seconds of the phases at the hardware's peaks: tokens fill every row, attention stays within completions, each
    phase takes as long as its slowest resource."""
    chip, own = on.chip, work.prompts / work.meshes
    prompts = own / work.prefill_prompts
    rows = work.tokens / work.micro_batch[1] / work.micro_batch[0]  # in micro-batches
    sizes = {
        "tokens": work.tokens,
        "attended": work.lengths.attended_in_training,
        "predicted": work.trained * work.group_size * work.lengths.mean,
    }
    forward = token_flops(model, **sizes) / on.chips / chip.flops
    update = token_training_flops(model, **sizes, remat=work.remat, frozen=work.frozen) / on.chips / chip.flops
    network = {name: programs[name].limits(chip)["ICI"] for name in programs}
    once = "update" if "update" in programs else "start"
    phases = {
        "prefill": prompts * programs["prefill"].bound(chip)[1],
        "decode": max(decode_bound(step, own * work.group_size, work.lengths, chip).values()),
        "log-probs": work.passes * max(forward, rows * network["log-probs"]),
        "update": work.epochs * max(update, rows * network[once]),
    }
    if "baseline" in programs:
        phases["baseline"] = max(forward, rows * network["baseline"])
    return Phases(phases, work, on)


def expected(
    work: Work, step: DecodeStep, programs: Mapping[str, Program], on: Topology, hbm: float = efficiency.HBM
) -> Phases:
    """Seconds of the phases at the efficiencies of `efficiency`: whole micro-batches and dispatches, a latency for each
    collective, and slots that empty in the end. The wait for the slowest host is left out: 1 to 4 %.

    `hbm` is the share of HBM's bandwidth while decoding.
    """
    chip, own = on.chip, work.prompts / work.meshes
    seconds = {name: _run(program, work).expected(chip) for name, program in programs.items()}
    decode = decode_expected(step, own * work.group_size, work.lengths, chip, hbm)
    batches = work.micro_batches * work.updates
    if "update" in seconds:
        update = batches * seconds["update"]
    else:
        later = (batches - work.updates) * seconds["add"]
        update = work.updates * (seconds["start"] + seconds["apply"]) + later
    phases = {
        "prefill": math.ceil(own / work.prefill_prompts) * seconds["prefill"],
        **{f"decode: {part}": value for part, value in decode.items()},
        "log-probs": work.passes * batches * seconds["log-probs"],
        "update": work.epochs * update,
    }
    if "baseline" in seconds:
        phases["baseline"] = batches * seconds["baseline"]
    return Phases(phases, work, on)


def _run(program: Program, work: Work) -> Program:
    """The program with the operations that run. The count of the program itself has attention over whole rows."""
    if program.name in ("prefill", "decode"):
        return program
    costs = dataclasses.replace(program.costs, flops=work.run * program.costs.flops)
    return dataclasses.replace(program, costs=costs, model_flops=work.run * program.model_flops)


@dataclasses.dataclass(frozen=True)
class Phases:
    """Seconds of each phase of a step of `work` on the slice `on`."""

    seconds: Mapping[str, float]
    work: Work
    on: Topology

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def rollout(self) -> float:
        return sum(s for name, s in self.seconds.items() if name.startswith(("prefill", "decode")))

    @property
    def training(self) -> float:
        return self.total - self.rollout

    @property
    def beside_servers(self) -> float:
        """Seconds of a step if these chips only train, and as many other chips sample one step ahead. The time of a
        weight sync is left out."""
        return max(self.rollout, self.training)

    def as_dict(self) -> dict[str, Any]:
        run = self.work.steps * self.total
        hours = run / 3600
        return {
            "phases": dict(self.seconds),
            "seconds": self.total,
            "seconds_beside_servers": self.beside_servers,
            "days": run / 86_400,
            "chip_hours": hours * self.on.chips / self.on.chip.cores,
            "dollars": None if self.on.hourly is None else hours * self.on.hourly,
            "step_dollars": None if self.on.hourly is None else self.total / 3600 * self.on.hourly,
        }


def binding(phases: Phases) -> str:
    """A sentence that names the longest of the expected phases."""
    name = max(phases.seconds, key=phases.seconds.__getitem__)
    return f"{name}, {phases.seconds[name] / phases.total:.0%} of the expected step"


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One decode step of all slots of a mesh, on one of its chips.

    Attributes:
      slots: slots of the mesh.
      fixed: bytes to and from HBM at every step: weights, activations, logits.
      cached: bytes of the cache for one attended token of every slot.
      products: operations of matrix products.
      scores: operations of attention for one attended token of every slot.
      network: bytes that collectives bring.
      collectives: number of collectives.
      steps_per_dispatch: steps between two looks by the host.
      reading: factor of the expected share of HBM's bandwidth while attention reads the cache.
    """

    slots: float
    fixed: float
    cached: float
    products: float
    scores: float
    network: float = 0.0
    collectives: float = 0.0
    steps_per_dispatch: int = 16
    reading: float = 1.0


def decode_bound(step: DecodeStep, completions: float, lengths: Lengths, chip: Chip) -> dict[str, float]:
    """Seconds that each resource takes at its peak to decode `completions` on the mesh. No run can be faster.

    All slots are busy until the end, or one completion has the longest length. Only filled parts of the cache are read.
    """
    tokens = completions * lengths.mean
    steps, positions = max(tokens / step.slots, lengths.longest), tokens / step.slots * lengths.attended
    return {
        "compute": (tokens / step.slots * step.products + positions * step.scores) / chip.flops,
        "HBM": (steps * step.fixed + positions * step.cached) / chip.hbm_bandwidth,
        "ICI": steps * step.network / chip.ici_bandwidth,
    }


def decode_expected(
    step: DecodeStep, completions: float, lengths: Lengths, chip: Chip, hbm: float = efficiency.HBM
) -> dict[str, float]:
    """Expected seconds of each part of decoding, by the efficiencies of `efficiency`. The parts follow each other.

    weights: every step reads the weights and multiplies all slots, also idle slots. cache: attention. latency:
    collectives. host: the time between dispatches. At the end the slots become idle one by one. `hbm` is the share of
    HBM's bandwidth.
    """
    tokens = completions * lengths.mean
    steps, positions = decode_steps(completions, lengths, step.slots), tokens / step.slots * lengths.attended
    bandwidth, flops = hbm * chip.hbm_bandwidth, efficiency.FLOPS * chip.flops
    network = step.network / (efficiency.ICI * chip.ici_bandwidth)
    return {
        "weights": steps * max(step.fixed / bandwidth, step.products / flops),
        "cache": positions * max(step.cached / (step.reading * bandwidth), step.scores / flops),
        "latency": steps * (network + step.collectives * efficiency.COLLECTIVE_SECONDS),
        "host": steps / step.steps_per_dispatch * efficiency.DISPATCH_SECONDS,
    }


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in tokens.

    Attributes:
      prompt: p, the mean length of prompts.
      mean: m, the mean length of completions.
      spread: c, the coefficient of variation of the lengths of completions.
      limit: the largest length of a completion.
    """

    prompt: float
    mean: float
    spread: float
    limit: float

    @property
    def mean_square(self) -> float:
        """E[n²] = m² (1 + c²)."""
        return self.mean**2 * (1 + self.spread**2)

    @property
    def attended(self) -> float:
        """Cached tokens that a decoded token attends to, on average over all decoded tokens.

        The tokens of a completion of n tokens attend to p, p + 1, …, p + n - 1. The mean is p + (E[n²] / E[n] - 1) / 2.
        """
        return self.prompt + (self.mean_square / self.mean - 1) / 2

    @property
    def attended_in_training(self) -> float:
        """Tokens that a token of prompt or completion attends to in training, in the mean: E[(p + n)²] / 2(p + m)."""
        square = self.prompt**2 + 2 * self.prompt * self.mean + self.mean_square
        return square / (2 * (self.prompt + self.mean))

    @property
    def longest(self) -> float:
        """The longest of many completions: four standard deviations above the mean, at most the limit."""
        return min(self.limit, self.mean * (1 + 4 * self.spread))


def decode_steps(completions: float, lengths: Lengths, slots: float) -> float:
    """Decode steps until `completions` have passed through `slots`, where a free slot is refilled at once.

    Slots free themselves at a rate of slots / m a step, and the last completion starts when completions - slots have
    ended. It may be the longest: m (completions - slots) / slots + longest.
    """
    return lengths.mean * max(0.0, completions - slots) / slots + lengths.longest
