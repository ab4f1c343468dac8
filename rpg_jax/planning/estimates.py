"""The costs of a run's programs by arithmetic, in place of a compiler's, for a search."""

from __future__ import annotations

import jax

from rpg_jax.models.sizes import parameter_count
from rpg_jax.planning.compiling import Program
from rpg_jax.planning.flops import forward_flops, token_flops, training_flops
from rpg_jax.planning.hlo import Costs
from rpg_jax.rollout import Decoding, footprint, prefill_shape
from rpg_jax.runs import memory
from rpg_jax.runs.layout import Layout, row_shape
from rpg_jax.runs.memory import bytes_of_a_number, own_peaks


def programs(layout: Layout, decoding: Decoding, resident: dict[str, float]) -> dict[str, Program]:
    """The programs of a step with their operations, traffic and collectives; `resident` as for compiled programs.

    What is left out: activations that go to HBM and back between two products of a layer, copies, gaps in memory. The
    peak of a training program is that of `own_peaks`. What remat=offload sends to the host and back is not in the time.
    """
    return {
        name: Program(name, 0, 0, 0, 0, resident[name], costs, costs.flops, 0.0, peak=peak)
        for name, (costs, peak) in {**_training(layout), **_sampling(layout, decoding)}.items()
    }


def _training(layout: Layout) -> dict[str, tuple[Costs, float]]:
    """Weights are gathered for every pass and gradients are summed once; a collective for each layer and pass."""
    c, model, shape, chips = layout.config, layout.model, row_shape(layout.config), layout.mesh.size
    sizes = {"rows": shape.rows, "length": shape.length, "predicted": shape.completion_length}
    weights, held = parameter_count(model), footprint.bytes_on_a_device(layout.abstract_trained)
    summed = sum(4 * x.size for x in jax.tree.leaves(layout.trained_shapes))
    width, layers = bytes_of_a_number(layout), model.num_layers
    split = layout.mesh.shape["fsdp"] > 1
    gathered = split * width * weights / layout.mesh.shape["tensor"]
    rows = shape.rows * shape.length / chips  # tokens of a chip

    def costs(flops: float, passes: int, *, gradients: bool = False) -> Costs:
        network = {"all-gather": passes * gathered, "reduce-scatter": gradients * split * summed}
        launches = (passes + gradients) * layers * split
        traffic = passes * width * weights + 2 * passes * rows * layers * 16 * model.embed_dim * width
        return Costs(flops / chips, traffic, network, launches)

    frozen = layout.lora is not None
    update = costs(training_flops(model, **sizes, remat=c.model.remat, frozen=frozen), 3, gradients=True)
    forward = costs(forward_flops(model, **sizes), 1)
    found = {"log-probs": forward, "update": update, "start": update, "add": update, "apply": Costs(0.0, 7 * held)}
    return {name: (found[name], peak) for name, peak in own_peaks(layout).items()}


def _sampling(layout: Layout, decoding: Decoding) -> dict[str, tuple[Costs, float]]:
    """A decode step reads the weights of a chip and the whole cache; two sums over a copy's chips for each layer."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    model, slots, mesh = layout.model, decoding.slots, decoding.mesh
    tensor, layers = mesh.shape["tensor"], model.num_layers
    weights = footprint.bytes_on_a_device(memory.decoding_params(layout, decoding))
    cache, copies = footprint.cache_bytes(model, decoding), mesh.size // (tensor * mesh.shape["expert"])
    own = slots / copies  # of a copy
    logits = 4 * own * model.vocab_size
    split = tensor > 1
    share = (tensor - 1) / tensor
    summed = 2 * own * model.embed_dim * 2 * share
    gathered = mesh.shape["fsdp"] > 1
    network = {"all-reduce": (2 * layers + 1) * summed * split, "all-gather": logits * share * split}
    network["all-gather"] += gathered * weights * (mesh.shape["fsdp"] - 1)
    step = token_flops(model, tokens=slots, attended=decoding.capacity, predicted=slots) / mesh.size
    decode = Costs(step, weights + cache + 3 * logits, network, (2 * layers + 2) * split + gathered * layers)
    rows, length = prefill_shape(layout.config.task.max_prompt_tokens, decoding.capacity)
    prefill = forward_flops(model, rows=rows, length=length, predicted=0) / (tensor * mesh.shape["expert"])
    sums = {"all-reduce": (2 * layers + 1) * 2 * rows * length * model.embed_dim * 2 * share * split}
    first = Costs(prefill, weights, sums, (2 * layers + 1) * split)
    return {"prefill": (first, weights), "decode": (decode, weights + cache + 3 * logits)}
