"""Bytes that the parts of a run hold on a device, and the decode slots that fit beside them."""

from __future__ import annotations

import math
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax import models, parallel
from rpg_jax.models.lora import attached
from rpg_jax.models.quantized import quantized, quantized_shardings
from rpg_jax.rollout import Decoding
from rpg_jax.rollout.footprint import LEFT_FREE, bytes_on_a_device, placed, slots_beside
from rpg_jax.runs.layout import Layout
from rpg_jax.runs.learner import Learner, make_learner, offloaded
from rpg_jax.training.dynamic_sampling import UNKNOWN_SHARE


def prompts_of_a_step(config: ConfigDict) -> int:
    """Prompts that a step generates at once; with `dynamic_sampling.oversample` 0 those that it needs in the mean."""
    wanted, dynamic = config.rollout.prompts_per_step, config.dynamic_sampling
    if not dynamic.enabled:
        return wanted
    return wanted * dynamic.oversample or math.ceil(wanted / UNKNOWN_SHARE)


def slots_of_a_device(layout: Layout, decoding: Decoding) -> int:
    """The slots of a device where `rollout.slots` is unset; `decoding` has one slot for each device of its mesh.

    It depends on the config and the kind of device alone. So a run that resumes on the same machine has the same
    slots. While sampling runs ahead of training on the same devices, training keeps half of what is free. Where the
    memory is unknown, all devices together have 128 slots.
    """
    c, mesh = layout.config, decoding.mesh
    assert mesh is not None, "a layout decodes on a mesh"
    needed = -(-prompts_of_a_step(c) * c.rollout.group_size // (mesh.size * layout.decoding_hosts))
    held = 0.0
    if layout.device_memory is not None:
        held = bytes_on_a_device(decoding_params(layout, decoding))
        held += 0 if c.rollout.devices else held_while_sampling(layout, make_learner(layout), decoding)
        if c.rollout.max_staleness and not c.rollout.devices:
            held += (layout.device_memory * (1 - LEFT_FREE) - held) / 2
    return slots_beside(held, layout.device_memory, layout.model, decoding, needed)


def held_while_sampling(layout: Layout, learner: Learner, decoding: Decoding) -> float:
    """Bytes on a device that the trainer holds meanwhile: optimizer state, master weights that are not those that
    decode, and a resident reference."""
    trained, own = bytes_on_a_device(layout.abstract_trained), has_copy(layout, decoding)
    state = bytes_on_a_device(learner.like)  # without what waits on the host
    resident = layout.config.reference.resident and "reference" not in offloaded(layout.config)
    if layout.lora is not None:
        state += bytes_on_a_device(layout.abstract_base) if own else 0
    elif not own:
        state -= trained
    return state + (trained if resident else 0)


def has_copy(layout: Layout, decoding: Decoding) -> bool:
    """Whether the weights that decode are others than the trainer's; of adapters, whether the base is another."""
    c = layout.config
    if layout.lora is not None:
        return c.model.lora.merged or decoding.shardings is not None or (decoding.int8 and not c.model.lora.int8)
    return decoding.dtype is not None or decoding.shardings is not None or decoding.int8


def decoding_params(layout: Layout, decoding: Decoding) -> Any:
    """The model's weights as the rollout holds them: shapes, dtypes and shardings."""
    params = synced_params(layout, decoding)
    return attached(decoding_base(layout, decoding).weights, params) if _apart(layout) else params


def synced_params(layout: Layout, decoding: Decoding) -> Any:
    """What a sync brings to the rollout: all weights, or adapters that decode beside their base."""
    apart, shardings = _apart(layout), decoding.shardings
    params = layout.trained_shapes if apart else layout.param_shapes
    if decoding.dtype is not None:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, decoding.dtype), params)
    shardings = shardings or (layout.adapter_shardings if apart else layout.param_shardings)
    if decoding.int8 and not apart:
        params, shardings = jax.eval_shape(quantized, params), quantized_shardings(shardings, params)
    return placed(params, shardings)


def _apart(layout: Layout) -> bool:
    """Whether the rollout decodes with adapters beside their base."""
    return layout.lora is not None and not layout.config.model.lora.merged


def decoding_base(layout: Layout, decoding: Decoding) -> models.Base:
    """The frozen weights as a rollout with adapters beside them holds them: shapes, dtypes and shardings."""
    assert decoding.mesh is not None and layout.lora is not None, "a layout with adapters decodes on a mesh"
    shapes = layout.param_shapes
    where = parallel.shardings(models.logical_axes(layout.model), shapes, decoding.mesh, decoding.rules)
    if layout.config.model.lora.int8 or decoding.int8:
        shapes, where = jax.eval_shape(quantized, shapes), quantized_shardings(where, shapes)
    return models.Base(placed(shapes, where), layout.lora.scale)
