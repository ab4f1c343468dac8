"""Plans by arithmetic, without a compiler: a config, and a search among settings and slices."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax.models.sizes import parameter_count
from rpg_jax.planning import run_plan
from rpg_jax.planning.compiling import SAMPLING, Program, operations
from rpg_jax.planning.hlo import Costs
from rpg_jax.planning.step_time import Lengths
from rpg_jax.planning.topologies import Topology
from rpg_jax.rollout import Decoding, prefill_shape
from rpg_jax.runs import config_files, memory
from rpg_jax.runs.layout import Layout, row_shape


def estimated_programs(layout: Layout, decoding: Decoding, resident: dict[str, float]) -> dict[str, Program]:
    """Returns the programs of a step by name, with operations, traffic, collectives and peaks by arithmetic. `resident`
    has the bytes that other programs' arrays take on a chip meanwhile, by program. The estimate leaves out activations
    that go to HBM and back between two products of a layer, copies, gaps in memory, and the programs and operations of
    a critic. The time also leaves out the traffic of remat=offload to the host and back."""
    flops = operations(layout, decoding)
    return {
        name: Program(resident=resident[name], costs=costs, model_flops=costs.flops, peak=peak)
        for name, (costs, peak) in {**_training(layout, flops), **_sampling(layout, decoding, flops)}.items()
    }


def _training(layout: Layout, flops: Mapping[str, float]) -> dict[str, tuple[Costs, float]]:
    """{name: (costs, peak in bytes)} of the programs that train. In each layer a collective gathers the weights for
    every pass, and a collective sums the gradients once."""
    model, shape = layout.model, row_shape(layout.config)
    weights, held = parameter_count(model), memory.bytes_on_a_device(layout.trained)
    summed = sum(4 * x.size for x in jax.tree.leaves(layout.trained))
    width, layers = memory.bytes_of_a_number(layout), model.num_layers
    split = layout.mesh.shape["fsdp"] > 1
    gathered = split * width * weights / layout.mesh.shape["tensor"]
    rows = shape.rows * shape.length / layout.mesh.size  # tokens of a chip

    def costs(name: str, passes: int, *, gradients: bool = False) -> Costs:
        network = {"all-gather": passes * gathered, "reduce-scatter": gradients * split * summed}
        launches = (passes + gradients) * layers * split
        traffic = passes * width * weights + 2 * passes * rows * layers * 16 * model.embed_dim * width
        return Costs(flops[name], traffic, network, launches)

    found = {"log-probs": costs("log-probs", 1), "apply": Costs(0.0, 7 * held)}
    found |= dict.fromkeys(("update", "start", "add"), costs("update", 3, gradients=True))
    return {name: (found[name], peak) for name, peak in memory.own_peaks(layout).items()}


def _sampling(layout: Layout, decoding: Decoding, flops: Mapping[str, float]) -> dict[str, tuple[Costs, float]]:
    """Returns {name: (costs, peak in bytes)} of "prefill" and "decode". A decode step reads the weights of a chip and
    the whole cache. Each layer has two sums over a copy's chips."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    model, slots, mesh = layout.model, decoding.slots, decoding.mesh
    tensor, fsdp, layers = mesh.shape["tensor"], mesh.shape["fsdp"], model.num_layers
    weights = memory.bytes_on_a_device(memory.decoding_params(layout, decoding))
    cache, copies = memory.cache_bytes(layout, decoding), mesh.size // (tensor * mesh.shape["expert"])
    own = slots / copies  # slots of a copy
    logits = 4 * own * model.vocab_size
    split, share = tensor > 1, (tensor - 1) / tensor
    summed = (2 * layers + 1) * 2 * model.embed_dim * 2 * share  # bytes for each token
    network = {"all-reduce": summed * own, "all-gather": logits * share + weights * (fsdp - 1)}
    launches = (2 * layers + 2) * split + layers * (fsdp > 1)
    decode = Costs(flops["decode"], weights + cache + 3 * logits, network, launches)
    rows, length = prefill_shape(layout.config.task.max_prompt_tokens, decoding.capacity)
    sums = {"all-reduce": summed * rows * length}
    first = Costs(flops["prefill"] * copies, weights, sums, (2 * layers + 1) * split)
    return {"prefill": (first, weights), "decode": (decode, weights + cache + 3 * logits)}


def estimate(config: ConfigDict, topology: Topology, lengths: Lengths | None = None) -> dict[str, Any]:
    """Estimates memory and time of a resolved config by arithmetic. Compiles nothing. `lengths` None: as
    `run_plan.lengths_of` assumes. Raises ValueError if libtpu is not installed, model, mesh and sizes of the config
    conflict, or `rollout.devices` is set.

    Returns for JSON "fits", whether sampling fits in the HBM of a chip, and training in the share `memory.TRUSTED`
    (0.8) of the HBM; "trained", the count of numbers that an update changes, of the whole model; "step", of
    `run_plan.step_figures`; and bytes on one chip: "base_bytes" of frozen weights, "state_bytes" of trained weights and
    optimizer, "sync_bytes" of what a weight sync brings, and "training_peak_bytes" and "sampling_peak_bytes" of HBM at
    the peak of the largest program of each."""
    layout, learner, decoding, held = run_plan.parts_on(config, topology)
    lengths = lengths or run_plan.lengths_of(config)
    programs = estimated_programs(layout, decoding, held)
    programs |= run_plan.exchange(layout, decoding, held, topology, lengths)
    training = max(program.hbm for name, program in programs.items() if name not in SAMPLING)
    sampling = max(program.hbm for name, program in programs.items() if name in SAMPLING)
    return {
        "fits": sampling <= topology.chip.hbm and training <= memory.TRUSTED * topology.chip.hbm,
        "trained": sum(x.size for x in jax.tree.leaves(layout.trained)),
        "base_bytes": memory.bytes_on_a_device(layout.base),
        "state_bytes": memory.bytes_on_a_device(learner.like),
        "sync_bytes": memory.bytes_on_a_device(memory.synced_params(layout, decoding)),
        "training_peak_bytes": training,
        "sampling_peak_bytes": sampling,
        "step": run_plan.step_figures(layout, decoding, programs, topology, lengths),
    }


def search(
    config: ConfigDict, topology: Topology, lengths: Lengths | None = None
) -> tuple[dict[str, dict[str, Any]], ConfigDict]:
    """Returns the changes of `config` that fit by arithmetic, as {"FIELD=VALUE,FIELD=VALUE": estimate}, the fastest
    expected step first, and the config with the first of them; ({}, `config`) if none fits.

    A search unsets `rollout.slots` and `train.microbatch_size`; the memory then decides both. The search tries 1 to 8
    chips of a host for a copy of the decoding weights, `rollout.int8_kv`, and three remat policies. If nothing fits, a
    search also spreads rows over two, then four chips (`mesh.context`). Settings that `estimate` refuses are left
    out. `lengths` is as in `estimate`. Raises ValueError without libtpu, or if `rollout.devices` is set."""
    tried = {
        "rollout.tensor": [n for n in (1, 2, 4, 8) if topology.host.chips % n == 0],
        "rollout.int8_kv": (False, True),
        "model.remat": ("full", "offload", "none"),
    }
    run_plan.check_one_mesh(config)  # or without libtpu, every choice would fail below, as if none fitted
    topology.devices()
    unset, found = {"rollout.slots": None, "train.microbatch_size": None}, []
    for spread in ({}, {"mesh.context": 2}, {"mesh.context": 4}):
        for values in itertools.product(*tried.values()):
            choice = {**spread, **dict(zip(tried, values, strict=True))}
            # Heads, rows or a mesh may not divide. Every choice of a micro-batch would be printed.
            with contextlib.suppress(ValueError), contextlib.redirect_stderr(io.StringIO()):
                changed = config_files.changed(config, {**unset, **choice})
                one = estimate(changed, topology, lengths)
                if one["fits"]:
                    found.append((",".join(f"{name}={value}" for name, value in choice.items()), one, changed))
        if found:
            break
    found.sort(key=lambda each: each[1]["step"]["expected"]["seconds"])
    return {name: one for name, one, _ in found}, found[0][2] if found else config
