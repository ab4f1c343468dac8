"""Seconds, days and dollars of a training step: the bound, what is expected, what binds, and what to try next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rpg_jax.models import DecoderConfig
from rpg_jax.planning import efficiency
from rpg_jax.planning.compiling import Program
from rpg_jax.planning.flops import token_flops, token_training_flops
from rpg_jax.planning.lengths import Lengths, imbalance
from rpg_jax.planning.rollout_time import DecodeStep, decode_bound, decode_expected
from rpg_jax.planning.topologies import Topology
from rpg_jax.training.collect import UNKNOWN_SHARE


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step of a run has to do.

    Attributes:
      steps: of the run.
      prompts: groups that are sampled, dynamic sampling's oversampling included.
      trained: groups that are trained on.
      group_size: completions of a prompt.
      lengths: of prompts and completions.
      meshes: decoding meshes, which take prompts from one list.
      prefill_prompts: prompts of mean length in a dispatch of prefill.
      updates: mini-batches.
      epochs: passes over them.
      passes: passes of log-probabilities: of the behaviour policy, and of a reference that differs.
      micro_batch: (rows, tokens of a row).
      packed: whether completions share rows.
      remat: the activations that are computed again.
      frozen: whether only adapters are trained.
      weights: bytes that a sync brings to servers.
      store: bytes a second of a host, into the folder of these weights and from it.
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
    passes: int
    micro_batch: tuple[int, int]
    packed: bool
    remat: str
    frozen: bool = False
    run: float = 1.0
    weights: float = 0.0
    store: float = efficiency.STORE

    @property
    def tokens(self) -> float:
        """Prompt and completion tokens that are trained on."""
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


def expected(work: Work, step: DecodeStep, programs: Mapping[str, Program], on: Topology) -> Phases:
    """Seconds of the phases at the efficiencies of `efficiency`: whole micro-batches and dispatches, a latency for each
    collective, slots that empty in the end, and hosts that wait for the last one."""
    chip, own, lengths = on.chip, work.prompts / work.meshes, work.lengths
    seconds = {name: _run(program, work).expected(chip) for name, program in programs.items()}
    share = imbalance(work.meshes, own, work.group_size, step.slots, lengths.spread, efficiency.CORRELATION)
    decode = decode_expected(step, own * work.group_size, lengths, chip)
    batches = work.micro_batches * work.updates
    if "update" in seconds:
        update = batches * seconds["update"]
    else:
        later = (batches - work.updates) * seconds["add"]
        update = work.updates * (seconds["start"] + seconds["apply"]) + later
    phases = {
        "prefill": math.ceil(own / work.prefill_prompts) * seconds["prefill"],
        **{f"decode: {part}": value for part, value in decode.items()},
        "decode: spread over hosts": efficiency.LONGEST_FIRST * (share - 1) * sum(decode.values()),
        "log-probs": work.passes * batches * seconds["log-probs"],
        "update": work.epochs * update,
    }
    if "baseline" in seconds:
        phases["baseline"] = batches * seconds["baseline"]
    return Phases(phases, work, on)


def _run(program: Program, work: Work) -> Program:
    """A program with the operations that it runs; its own count has attention over whole rows."""
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
    def host_chips(self) -> int:
        return self.on.chip.one_host * self.on.chip.cores

    @property
    def sync(self) -> dict[str, float]:
        """Seconds of a sync of servers. Training stands still for the copy to host memory, a server for the others; the
        hosts write their parts while training goes on."""
        whole = self.work.weights
        own = whole / math.ceil(self.on.chips / self.host_chips)
        parts = {"copy": own / efficiency.HOST, "write": own / self.work.store}
        return parts | {"read": whole / self.work.store, "swap": whole / efficiency.HOST}

    @property
    def beside_servers(self) -> float:
        """Seconds of a step where as many chips again sample one step ahead, and these only train."""
        sync = self.sync
        return max(self.rollout + sync["read"] + sync["swap"], self.training + sync["copy"], sync["write"])

    @property
    def servers(self) -> int | None:
        """Servers, each a whole host of such chips, that sample a step ahead as fast as these chips train. None if a
        server needs longer to load the weights than these chips to train."""
        sync = self.sync
        left = self.training + sync["copy"] - sync["read"] - sync["swap"]
        return math.ceil(self.on.chips * self.rollout / left / self.host_chips) if left > 0 else None

    def as_dict(self) -> dict[str, Any]:
        run = self.work.steps * self.total
        hours = run / 3600
        return {
            "phases": dict(self.seconds),
            "seconds": self.total,
            "seconds_beside_servers": self.beside_servers,
            "sync": self.sync,
            "days": run / 86_400,
            "chip_hours": hours * self.on.chips / self.on.chip.cores,
            "dollars": None if self.on.hourly is None else hours * self.on.hourly,
        }


def binding(phases: Phases) -> str:
    """The longest phase of what is expected, in words."""
    name = max(phases.seconds, key=phases.seconds.__getitem__)
    return f"{name}, {phases.seconds[name] / phases.total:.0%} of the expected step"


def suggestions(
    work: Work, step: DecodeStep, programs: Mapping[str, Program], on: Topology, *, head_dim: int, int8_kv: bool
) -> dict[str, float]:
    """Expected seconds of a step after each of some changes, the fastest first."""
    found, now = {}, expected(work, step, programs, on)
    found["servers of as many chips that sample a step ahead"] = now.beside_servers
    if not int8_kv:
        int8 = (1 + 4 / head_dim) / 2  # a byte for two, and an f32 scale for each head
        tried = dataclasses.replace(step, cached=int8 * step.cached, reading=efficiency.HBM_INT8)
        found["rollout.int8_kv=True, with loss.sampler_correction"] = expected(work, tried, programs, on).total
    needed = math.ceil(work.trained / UNKNOWN_SHARE)
    if work.prompts > needed:
        tried_work = dataclasses.replace(work, prompts=needed)
        change = (
            f"dynamic_sampling.oversample=0 and surplus=carry, where {UNKNOWN_SHARE:.0%} of the groups are informative"
        )
        found[change] = expected(tried_work, step, programs, on).total
    rows, length = work.micro_batch
    if work.packed and rows > on.chips and rows % 2 == 0:
        tried_work = dataclasses.replace(work, micro_batch=(rows // 2, length))
        waste = work.micro_batches / (tried_work.micro_batches / 2)
        found[f"train.microbatch_size={rows // 2}"] = now.total - now.training * (1 - 1 / waste)
    return dict(sorted(found.items(), key=lambda item: item[1]))
