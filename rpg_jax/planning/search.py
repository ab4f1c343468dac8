"""Looks by arithmetic for the settings with the shortest expected step that fit a slice, before any is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rpg_jax import parallel
from rpg_jax.planning import beside
from rpg_jax.planning.lengths import Lengths
from rpg_jax.planning.run_plan import with_known_shapes
from rpg_jax.planning.topologies import Topology
from rpg_jax.runs.layout import rows_per_update
from rpg_jax.runs.memory import TRUSTED

Change = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Found:
    """Settings that fit by arithmetic, {field: value}, and their expected seconds a step and days of the run."""

    change: Change
    slots_of_a_chip: float
    seconds: float
    days: float


def search(config: ConfigDict, topology: Topology, lengths: Lengths | None = None) -> list[Found]:
    """All combinations of the choices that fit, the fastest first.

    Sampling and training are estimated apart, as they take turns: layouts of the decoding weights and the cache's
    dtype, each with the slots that fill the memory; and micro-batches with what is computed again.
    """
    config = with_known_shapes(config)
    now = _estimate(config, topology, {"rollout.slots": None}, lengths)
    samplings = _estimates(config, topology, sampling_choices(config, topology), lengths)
    trainings = _estimates(config, topology, training_choices(config, topology), lengths)
    found = []
    for (first, sampled), (second, trained) in itertools.product(samplings, trainings):
        seconds = sampled["rollout"] + trained["training"]
        days = now["days"] * seconds / now["seconds"]
        found.append(Found({**first, **second}, sampled["slots_of_a_chip"], seconds, days))
    return sorted(found, key=lambda one: one.seconds)


def sampling_choices(config: ConfigDict, topology: Topology) -> Iterable[Change]:
    """Chips of a copy of the decoding weights, up to those of a host, with a cache in bf16 and in int8."""
    sizes = [n for n in (1, 2, 4, 8) if topology.host.chips % n == 0]
    for tensor, int8_kv in itertools.product(sizes, (False, True)):
        yield {"rollout.slots": None, "rollout.tensor": tensor, "rollout.int8_kv": int8_kv}


def training_choices(config: ConfigDict, topology: Topology) -> Iterable[Change]:
    """One, two or four rows for each shard of rows, if they divide an update; what the backward pass computes again."""
    mesh = parallel.mesh_sizes(config.mesh.to_dict(), topology.chips, topology.slices)
    shards = parallel.shards("batch", mesh, parallel.parse_rules(config.sharding))
    sizes = [rows for rows in (shards, 2 * shards, 4 * shards) if rows_per_update(config) % rows == 0]
    for rows, remat in itertools.product(sizes, ("full", "offload", "none")):
        yield {"train.microbatch_size": rows, "model.remat": remat}


def _estimates(
    config: ConfigDict, topology: Topology, choices: Iterable[Change], lengths: Lengths | None
) -> Sequence[tuple[Change, dict[str, float]]]:
    """The choices whose own programs fit, with their figures."""
    found = []
    for change in choices:
        try:
            figures = _estimate(config, topology, change, lengths)
        except ValueError:  # heads or rows that do not divide
            continue
        sampling = "rollout.tensor" in change  # whose slots leave room
        room = topology.chip.hbm * (1 if sampling else TRUSTED)
        if figures["peak/sampling" if sampling else "peak/training"] <= room:
            found.append((change, figures))
    return found


def changed(config: ConfigDict, change: Change) -> ConfigDict:
    """A copy with other settings."""
    tried = config.copy_and_resolve_references()
    with tried.unlocked():
        for field, value in change.items():
            section, name = field.split(".")
            tried[section][name] = value
    return tried


def _estimate(config: ConfigDict, topology: Topology, change: Change, lengths: Lengths | None) -> dict[str, float]:
    """Expected seconds, days, slots and peaks of memory after a change."""
    print("estimating", *(f"{field}={value}" for field, value in change.items()), file=sys.stderr, flush=True)
    found = beside.estimate(changed(config, change), topology, lengths)
    expected = found.step["expected"]
    return {
        "rollout": sum(s for name, s in expected["phases"].items() if name.startswith(("prefill", "decode"))),
        "training": sum(s for name, s in expected["phases"].items() if not name.startswith(("prefill", "decode"))),
        "seconds": expected["seconds"],
        "days": expected["days"],
        "slots_of_a_chip": found.step["slots_of_a_chip"],
        "peak/sampling": found.peak(sampling=True)[0],
        "peak/training": found.peak(sampling=False)[0],
    }
