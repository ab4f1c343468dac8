"""The bytes of a run on a device, and the sizes that follow: copies that decode, their slots, micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from rpg_jax import models, parallel, rollout
from rpg_jax.models import DecoderConfig
from rpg_jax.models.lora import adapter_axes, attached
from rpg_jax.models.sizes import parameter_count
from rpg_jax.rollout import Decoding
from rpg_jax.rollout.decode_state import DecodeState
from rpg_jax.runs.layout import (
    Layout,
    in_8_bits,
    make_layout,
    packing_shape,
    reference_layout,
    row_shape,
    rows_per_update,
    teacher_folder,
)
from rpg_jax.runs.learner import Learner, make_learner, reference_differs
from rpg_jax.training.collect import UNKNOWN_SHARE
from rpg_jax.training.state import abstract, shardings_of

UNKNOWN_MEMORY_SLOTS = 128  # over all devices that decode together
LEFT_FREE = 1 / 16  # share of a device for prefilled prompts that wait, temporaries and gaps
_LOGITS = 4  # arrays f32[slots, vocabulary] at the peak of a decode step
_TILE = 16  # slots of a copy: rows of a bf16 tile


def slots_that_fit(memory: float, held: float, slot: float, *, tile: int, needed: int) -> int:
    """Decode slots of a device: floor((memory × 15/16 - held) / slot), at least one, rounded down to tiles of `tile`
    slots if a tile fits, and at most `needed`. `memory`, `held` and `slot` are bytes: of the device, of the other
    arrays on it, and of a slot."""
    fitting = max(1, math.floor((memory * (1 - LEFT_FREE) - held) / slot))
    return min(fitting - fitting % tile if fitting > tile else fitting, needed)


def bytes_on_a_device(tree: Any) -> float:
    """Bytes on one device of `tree`, of `ShapeDtypeStruct`s with shardings; None has 0. Arrays in host memory do not
    count."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind in (None, "device")]
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves))


def cache_bytes(layout: Layout, decoding: Decoding) -> float:
    """Bytes on one device of the decode state (the cache of keys and values and more) for all of `decoding.slots`."""
    assert decoding.mesh is not None, "a layout decodes on a mesh"
    size, dtype = (decoding.slots, decoding.capacity), jnp.dtype(layout.config.model.compute_dtype)
    empty = functools.partial(DecodeState.empty, layout.model, *size, dtype, int8_kv=decoding.int8_kv)
    with parallel.activate(decoding.mesh, decoding.rules):
        shapes = jax.eval_shape(empty)
    where = parallel.shardings(shapes.logical_axes, shapes, decoding.mesh, decoding.rules)
    return bytes_on_a_device(abstract(shapes, where))


def prompts_of_a_step(config: ConfigDict) -> int:
    """Prompts of a generation batch: `rollout.prompts_per_step`, or with dynamic sampling `dynamic_sampling.oversample`
    times as many. If `oversample` is 0: twice as many, since `UNKNOWN_SHARE` of the groups count."""
    wanted, dynamic = config.rollout.prompts_per_step, config.dynamic_sampling
    if not dynamic.enabled:
        return wanted
    return wanted * dynamic.oversample or math.ceil(wanted / UNKNOWN_SHARE)


def _slots_of_a_device(layout: Layout, decoding: Decoding, most: int | None) -> int:
    """The slots of a device: as many as fit, and at most `most`; None: at most as many as a step needs. `decoding` has
    one slot for each device of its mesh.

    The number depends on the config and the kind of device alone. So a run that resumes on the same machine has the
    same slots. While sampling runs ahead of training on the same devices, training keeps half of the free memory. Where
    the memory is unknown, all devices together have about 128 slots at most."""
    c, mesh, memory = layout.config, decoding.mesh, layout.device_memory
    assert mesh is not None, "a layout decodes on a mesh"
    needed = most or -(-prompts_of_a_step(c) * c.rollout.group_size // (mesh.size * layout.decoding_hosts))
    if memory is None:
        return min(needed, -(-UNKNOWN_MEMORY_SLOTS // mesh.size))
    held = bytes_on_a_device(decoding_params(layout, decoding))
    held += _held_while_sampling(layout, make_learner(layout), decoding)
    if layout.trains and c.rollout.max_staleness and not c.rollout.devices:
        held += (memory * (1 - LEFT_FREE) - held) / 2
    copy = mesh.shape["tensor"] * mesh.shape["expert"]
    slot = cache_bytes(layout, decoding) + _LOGITS * 4 * layout.model.vocab_size * copy
    return slots_that_fit(memory, held, slot, tile=-(-_TILE // copy), needed=needed)


def _held_while_sampling(layout: Layout, learner: Learner, decoding: Decoding) -> float:
    """Bytes on a device that are held during sampling beside the weights that decode: the optimizer's and the critic's
    state and a resident reference, if `layout.trains`; the adapters, and the trainer's weights or frozen base if a copy
    decodes; `rollout.max_staleness` copies for later batches. 0 on devices that only sample."""
    if layout.config.rollout.devices:
        return 0.0
    ahead = layout.config.rollout.max_staleness if layout.trains else 0
    trained, own = bytes_on_a_device(layout.trained), has_copy(layout, decoding)
    state = bytes_on_a_device(learner.like) if layout.trains else trained  # without arrays in host memory
    if layout.lora is not None:
        state += bytes_on_a_device(layout.base) if own else 0
    elif not own and not ahead:
        state -= trained
    copies = ahead * bytes_on_a_device(synced_params(layout, decoding))
    return state + copies + (_resident_reference(layout) if layout.trains else 0.0)


def _reference_bytes(layout: Layout) -> float:
    """Bytes on a device of the reference's weights; 0 if servers have the teacher."""
    if layout.config.reference.path and not teacher_folder(layout.config):
        return 0.0  # servers have the teacher
    own = reference_layout(layout)
    return bytes_on_a_device(layout.trained if own is layout else own.weights)


def _resident_reference(layout: Layout) -> float:
    """Bytes on a device of the reference's weights if they stay there between steps, else 0."""
    c = layout.config
    stays = (c.reference.resident or teacher_folder(c)) and "reference" not in c.offload
    return _reference_bytes(layout) if stays else 0.0


def has_copy(layout: Layout, decoding: Decoding) -> bool:
    """Whether the rollout holds its own copy of the trainer's weights: in another dtype, in 8 bits, or on another mesh.
    If adapters are trained: whether the rollout holds a copy of the frozen base, with the adapters merged into the
    copy, on another mesh, or in 8 bits that the trainer's base does not have."""
    c = layout.config
    if layout.lora is not None:
        return c.model.lora.merged or decoding.shardings is not None or (decoding.int8 and not c.model.lora.int8)
    return decoding.dtype is not None or decoding.shardings is not None or decoding.int8


def decoding_params(layout: Layout, decoding: Decoding) -> Any:
    """Nested dict of the weights that the rollout holds, a frozen base included: `ShapeDtypeStruct`s with shardings."""
    params = synced_params(layout, decoding)
    return attached(decoding_base(layout, decoding).weights, params) if _apart(layout) else params


def synced_params(layout: Layout, decoding: Decoding) -> Any:
    """The arrays that a sync brings to the rollout, as `ShapeDtypeStruct`s with shardings: all weights, or the adapters
    if the rollout keeps their base beside them."""
    params = layout.adapters if _apart(layout) else layout.weights
    where = decoding.shardings or shardings_of(params)
    if decoding.dtype is not None:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, decoding.dtype), params)
    params = abstract(params, where)
    return in_8_bits(params) if decoding.int8 and not _apart(layout) else params


def _apart(layout: Layout) -> bool:
    """Whether the rollout decodes with adapters beside their base."""
    return layout.lora is not None and not layout.config.model.lora.merged


def decoding_base(layout: Layout, decoding: Decoding) -> models.Base:
    """The frozen weights in a rollout that keeps the adapters of `layout` beside them, without making an array.

    A `ShapeDtypeStruct`, with its sharding on `decoding.mesh`, stands for each array. The layers' matrices are `Int8`
    if `model.lora.int8` or `decoding.int8` is set. `layout` must have adapters, and `decoding` a mesh."""
    assert decoding.mesh is not None and layout.lora is not None, "a layout with adapters decodes on a mesh"
    where = parallel.shardings(models.logical_axes(layout.model), layout.weights, decoding.mesh, decoding.rules)
    weights = abstract(layout.weights, where)
    rounds = layout.config.model.lora.int8 or decoding.int8
    return models.Base(in_8_bits(weights) if rounds else weights, layout.lora.scale)


def fitting_layout(config: ConfigDict, vocab_size: int) -> Layout:
    """The config's layout, to sample with; if it does not fit these devices, one copy of the weights over all devices.
    The change is printed to stderr, and stands in `layout.config`. A teacher is left out: only training needs a
    teacher. `vocab_size` is as in `make_layout`. Raises ValueError if the changed layout does not fit either."""
    if config.reference.path:
        config = config.copy_and_resolve_references()
        config.reference.path = None
    try:
        layout = dataclasses.replace(make_layout(config, vocab_size), trains=False)
        make_decoding(layout)
        return layout
    except ValueError as error:
        changed = config.copy_and_resolve_references()
        changed.mesh.update(dict.fromkeys(changed.mesh, 1) | {"fsdp": -1})
        changed.rollout.update({"devices": 0, "tensor": None, "expert": None})
        layout = dataclasses.replace(make_layout(changed, vocab_size), trains=False)
        print(f"using mesh.fsdp={layout.mesh.shape['fsdp']} instead of the config's layout: {error}", file=sys.stderr)
        return layout


def make_decoding(layout: Layout, most: int | None = None) -> rollout.Decoding:
    """How a layout decodes.

    With `rollout.tensor`, `rollout.expert` or `rollout.devices` the rollout has copies of the weights, on tensor ×
    expert devices each. A copy has all weights, so that a decode step gathers none. Key-value heads that
    `rollout.tensor` does not divide are on each of a copy's devices. Without these fields the weights decode as the
    trainer has spread them, or spread over the devices of a host. A device has `rollout.slots` slots; unset, as many as
    fit, at most `most` (None: a step's need). Raises ValueError if the size of a copy does not divide the devices."""
    c, m, mesh, rules = layout.config, layout.config.model, _decoding_mesh(layout), layout.rules
    shardings = None
    if mesh is not layout.mesh:
        if layout.model.num_kv_heads % mesh.shape["tensor"]:
            rules = parallel.override({"kv_heads": ()}, rules)
        shapes, axes = layout.weights, models.logical_axes(layout.model)
        if layout.lora is not None and not m.lora.merged:
            shapes, axes = layout.adapters, adapter_axes(layout.model, layout.lora)
        shardings = parallel.shardings(axes, shapes, mesh, rules)
    decoding = rollout.Decoding(
        slots=mesh.size,
        capacity=rollout.capacity(c.task.max_prompt_tokens, c.rollout.max_tokens),
        dtype=None if m.compute_dtype == m.param_dtype else jnp.dtype(m.compute_dtype),
        int8=c.rollout.int8,
        int8_kv=c.rollout.int8_kv,
        record_experts=m.replay_experts,
        mesh=mesh,
        rules=rules,
        shardings=shardings,
    )
    threads = c.rollout.threads
    each = c.rollout.slots or -(-_slots_of_a_device(layout, decoding, most) // threads) * threads
    return dataclasses.replace(decoding, slots=each * mesh.size, threads=threads)


def _decoding_mesh(layout: Layout) -> Mesh:
    """The mesh that decodes: of copies of the weights, `rollout.tensor` × `rollout.expert` devices each (unset: 1).

    Without these fields and `rollout.devices` the trainer's mesh decodes; where hosts decode by themselves, the devices
    of a host are one mesh (fsdp). Raises ValueError if the size of a copy does not divide the devices."""
    c, devices = layout.config.rollout, layout.decoding_devices
    if not c.devices and c.tensor is None and c.expert is None:
        return layout.mesh if layout.decoding_hosts == 1 else _mesh(devices, fsdp=len(devices))
    tensor, expert = c.tensor or 1, c.expert or 1
    if len(devices) % (tensor * expert):
        raise ValueError(
            f"rollout.tensor={tensor} times rollout.expert={expert} does not divide {len(devices)} devices of one mesh"
        )
    return _mesh(devices, replica=len(devices) // (tensor * expert), expert=expert, tensor=tensor)


def _mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """A mesh of `devices` in their order, so that one program can reshard the trainer's weights."""
    shape = [sizes.get(axis, 1) for axis in parallel.MESH_AXES]
    return Mesh(np.array(devices).reshape(shape), parallel.MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))


TRUSTED = 0.8  # share of a device's memory that the arithmetic may fill in training: a compiler needs more
_EMPTY = 1 / 8  # the largest share of an update's packed rows that may be empty
_TOKENS = 8192  # tokens of packed rows on a device at once; more save gathers, and cost more in empty rows


def with_micro_batch(layout: Layout) -> Layout:
    """The layout with `train.microbatch_size` chosen, if it is unset: the largest number of rows that fits.

    A size divides a mini-batch evenly over the devices, and fits if training then fills at most 4/5 of a device. If no
    size fits, the smallest is chosen. The choice depends on the config and the kind of device only; a size below a
    mini-batch is printed to stderr. On a CPU the memory is unknown: packed rows get the largest size, and without
    packed rows the field stays unset, so that a micro-batch is a mini-batch."""
    c, fitted, memory = layout.config, layout, layout.device_memory
    if c.train.microbatch_size is not None or (memory is None and not c.train.packed_length):
        return layout
    learner, decoding = make_learner(layout), make_decoding(layout)
    for rows in _sizes(layout):
        config = layout.config.copy_and_resolve_references()
        config.train.microbatch_size = rows
        fitted = dataclasses.replace(layout, config=config)
        if memory is None or peak(fitted, learner, decoding) <= TRUSTED * memory:
            break
    rows, whole = row_shape(fitted.config).rows, rows_per_update(layout.config)
    if memory is not None and rows < whole:
        fits = f"which fits {memory / 2**30:.1f} GiB"
        print(f"train.microbatch_size={rows} of {whole} rows an update, {fits}", file=sys.stderr)
    return fitted


def checked(layout: Layout) -> Layout:
    """Returns `layout` if training and sampling fit the memory of a device by arithmetic. On a CPU that memory is the
    machine's, divided by the devices of this process; elsewhere everything fits a memory that is unknown. Raises
    ValueError if training or sampling does not fit. A run that fits by arithmetic may still fail in practice."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / jax.local_device_count()
    available = layout.device_memory or (machine if jax.default_backend() == "cpu" else math.inf)
    learner, decoding = make_learner(layout), make_decoding(layout)
    needed = {"training": peak(layout, learner, decoding)}
    if not rollout.find_driver(layout.config.rollout.driver).remote:
        weights = bytes_on_a_device(decoding_params(layout, decoding))  # arguments of the program
        needed["sampling"] = resident(layout, learner, decoding)["prefill"] + weights
    name = max(needed, key=lambda key: needed[key])
    if needed[name] > available:
        c = layout.config
        raise ValueError(
            f"{name} needs {needed[name] / 2**30:.1f} GiB or more on a device with {available / 2**30:.1f}: lower "
            f"rollout.max_tokens={c.rollout.max_tokens}, rollout.slots={decoding.slots} or "
            f"train.microbatch_size={row_shape(c).rows}; python -m rpg_jax.plan has the sum"
        )
    return layout


def peak(layout: Layout, learner: Learner, decoding: Decoding) -> float:
    """Bytes on a device at the peak of training: the largest program with all that stays beside it. The rollout's
    weights and a resident reference count, and the decode state where sampling runs ahead on the same devices."""
    held = resident(layout, learner, decoding)
    return max(held[name] + own for name, own in own_peaks(layout).items())


def own_peaks(layout: Layout) -> dict[str, float]:
    """{program of training: bytes on a device at its peak}, by arithmetic, without what only stays beside the program.

    The bytes are of the activations that wait, the gradients, one gathered layer and the state that the program works
    on. The programs are "log-probs" and "update"; "start", "add" and "apply" replace "update" if an update sums several
    micro-batches or has a rehearsal. Left out is what a compiler keeps beside: activations between two products of a
    layer, copies, gaps. The critic is left out too."""
    c, model, shape = layout.config, layout.model, row_shape(layout.config)
    held, frozen = bytes_on_a_device(layout.trained), bytes_on_a_device(layout.base)
    width, layers = bytes_of_a_number(layout), model.num_layers
    rows = shape.rows * shape.length / layout.mesh.size  # tokens of a device
    inputs = rows * layers * _kept(model, c.model.remat) * width
    layer = 3 * width * parameter_count(model) / layers + 16 * rows * model.embed_dim * width
    found = {"log-probs": held + frozen + layer}
    if shape.rows >= rows_per_update(c) and not c.rehearsal.path:
        return found | {"update": 4 * held + inputs + frozen + layer}
    accumulating = inputs + frozen + layer
    return found | {"start": 2 * held + accumulating, "add": 3 * held + accumulating, "apply": 4 * held}


def resident(layout: Layout, learner: Learner, decoding: Decoding) -> dict[str, float]:
    """{program: bytes on a device that are not the program's own arguments but stay there while the program runs}.

    The programs are those of `own_peaks`, "baseline", "prefill" and "decode". The optimizer's state and frozen weights
    count where they are no arguments. A copy of the weights for decoding, and the arrays of a step's completions, stay
    while the trainer works; the cache, during "prefill", and during training if sampling runs ahead on these devices.
    `rollout.max_staleness` copies of the synced weights stay, the rollout's own among them, unless servers sample.
    The reference's weights are there during "log-probs" if it may differ from the policy, and during updates that sum
    the KL over the vocabulary. With `reference.resident`, and for a teacher, these weights always stay, unless
    `offload` names the reference. Devices that only sample hold nothing of the trainer's; a copy for them waits on the
    trainer's devices to be moved."""
    c, shape = layout.config, row_shape(layout.config)
    weights, frozen = bytes_on_a_device(layout.trained), bytes_on_a_device(layout.base)
    slots = bytes_on_a_device(learner.like) - weights  # without arrays in host memory
    params = decoding_params(layout, decoding)
    own = bytes_on_a_device(params) if has_copy(layout, decoding) else 0
    cache = cache_bytes(layout, decoding)
    row = 4 * (3 * shape.length + 8 * shape.completion_length)
    training = own + c.rollout.prompts_per_step * c.rollout.group_size * row / layout.mesh.size
    ahead = 0 if rollout.find_driver(c.rollout.driver).remote else c.rollout.max_staleness
    training += cache if ahead and not c.rollout.devices else 0.0
    training += max(0, ahead - (own > 0)) * bytes_on_a_device(synced_params(layout, decoding))
    stays = _resident_reference(layout)
    read = _reference_bytes(layout)
    other = read if stays or reference_differs(c) else 0
    anchor = read if c.loss.estimator == "exact" else stays
    sampling = _held_while_sampling(layout, learner, decoding)
    return {
        "log-probs": training + slots + other,
        "baseline": training + slots + stays,
        "start": training + slots + anchor,
        "add": training + slots + anchor,
        "apply": training + frozen + anchor,
        "update": training + anchor,
        "prefill": sampling + cache,
        "decode": sampling,
    }


def bytes_of_a_number(layout: Layout) -> int:
    """Bytes of a number in `model.compute_dtype`: of an activation, and of a weight that is gathered for a product."""
    return 2 if layout.config.model.compute_dtype == "bfloat16" else 4


def _sizes(layout: Layout) -> Iterator[int]:
    """The numbers of rows that a micro-batch may have, the largest first.

    The number of packed rows depends on the lengths of completions, and the last micro-batch of an update is filled up
    with empty rows. So a device gets at most `_TOKENS` tokens or one row, and a micro-batch at most the share `_EMPTY`
    of the rows that prompts and completions of half their limits fill."""
    c, whole = layout.config, rows_per_update(layout.config)
    shards = parallel.shards("batch", dict(layout.mesh.shape), layout.rules)
    most = whole
    if c.train.packed_length:
        prompts = c.rollout.group_size if packing_shape(layout).shared else 1  # completions of each
        filled = whole * (c.task.max_prompt_tokens / prompts + c.rollout.max_tokens) / 2 / c.train.packed_length
        most = max(shards, int(min(filled * _EMPTY, shards * _TOKENS / c.train.packed_length)))
    yield from (rows for rows in range(most, 0, -1) if whole % rows == 0 and rows % shards == 0)


def _kept(model: DecoderConfig, remat: str) -> float:
    """The number of a token's activations that wait in a layer for the backward pass; `remat` is `model.remat`.
    With "none" the results between the matrix products wait too, some of them in f32. Their number is fitted to one
    compiled update of Qwen3-4B, in rows of 10,240 tokens on v5p:4x4x4: 87 thousand."""
    heads, pairs = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    products = 2 * model.embed_dim + 2 * model.hidden_dim + heads + pairs
    kept = {"full": 0, "offload": -model.embed_dim, "dots": products}
    return model.embed_dim + kept.get(remat, products + 8 * model.embed_dim + 2 * model.hidden_dim + 3 * heads)
