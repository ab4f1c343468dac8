"""How a config's layout decodes: copies of the weights on the devices that sample, and the slots of each."""

import dataclasses
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from rpg_jax import models, parallel, rollout
from rpg_jax.models.lora import adapter_axes
from rpg_jax.runs import memory
from rpg_jax.runs.layout import Layout, make_layout


def fitting_layout(config: ConfigDict, vocab_size: int) -> Layout:
    """The config's layout; where it does not fit these devices, one copy of the weights over all of them.

    The change is said on stderr, and `layout.config` has it.
    """
    try:
        layout = make_layout(config, vocab_size)
        make_decoding(layout)
        return layout
    except ValueError as error:
        changed = config.copy_and_resolve_references()
        changed.mesh.update(dict.fromkeys(changed.mesh, 1) | {"fsdp": -1})
        changed.rollout.update({"devices": 0, "tensor": None, "expert": None})
        layout = make_layout(changed, vocab_size)
        print(f"using mesh.fsdp={layout.mesh.shape['fsdp']} instead of the config's layout: {error}", file=sys.stderr)
        return layout


def make_decoding(layout: Layout) -> rollout.Decoding:
    """How a layout decodes: in copies of the weights, `rollout.tensor` × `rollout.expert` devices each.

    Each copy has all weights, so that a decode step gathers none. Key-value heads that `rollout.tensor` does not divide
    are on each of its devices. `rollout.slots` unset takes as many slots as fit, see `memory.slots_of_a_device`.

    Raises:
      ValueError: copies that do not divide the devices, or a driver that cannot decode in several processes.
    """
    c, m, mesh, rules = layout.config, layout.config.model, _decoding_mesh(layout), layout.rules
    shardings = None
    if mesh is not layout.mesh:
        if layout.model.num_kv_heads % mesh.shape["tensor"]:
            rules = parallel.override({"kv_heads": None}, rules)
        shapes, axes = layout.param_shapes, models.logical_axes(layout.model)
        if layout.lora is not None and not m.lora.merged:
            shapes, axes = layout.adapter_shapes, adapter_axes(layout.model, layout.lora)
        shardings = parallel.shardings(axes, shapes, mesh, rules)
    decoding = rollout.Decoding(
        slots=mesh.size,
        capacity=rollout.capacity(c.task.max_prompt_tokens, c.rollout.max_tokens),
        mixed=c.rollout.max_staleness > 0 and c.rollout.swap == "midway",
        dtype=None if m.compute_dtype == m.param_dtype else jnp.dtype(m.compute_dtype),
        int8=c.rollout.int8,
        int8_kv=c.rollout.int8_kv,
        mesh=mesh,
        rules=rules,
        shardings=shardings,
    )
    threads = c.rollout.threads
    each = c.rollout.slots or -(-memory.slots_of_a_device(layout, decoding) // threads) * threads
    return dataclasses.replace(decoding, slots=each * mesh.size, threads=threads)


def _decoding_mesh(layout: Layout) -> Mesh:
    """With `rollout.tensor` or `rollout.expert` set, a copy has that many devices. Otherwise each of `rollout.devices`
    has a copy. Without such devices the trainer's mesh decodes, or each host that decodes by itself (fsdp)."""
    c, devices = layout.config.rollout, layout.decoding_devices
    if layout.decoding_hosts > 1 and rollout.find_driver(c.driver).single_process:
        raise ValueError(f"rollout.driver={c.driver} decodes in one process; choose orchestrator or lockstep")
    if not c.devices and c.tensor is None and c.expert is None:
        return layout.mesh if layout.decoding_hosts == 1 else _mesh(devices, fsdp=len(devices))
    tensor, expert = c.tensor or 1, c.expert or 1
    if len(devices) % (tensor * expert):
        raise ValueError(
            f"rollout.tensor={tensor} times rollout.expert={expert} does not divide {len(devices)} devices of one mesh"
        )
    return _mesh(devices, replica=len(devices) // (tensor * expert), expert=expert, tensor=tensor)


def _mesh(devices: Sequence[jax.Device], **sizes: int) -> Mesh:
    """`devices` in their order: one program reshards the trainer's weights."""
    shape = [sizes.get(axis, 1) for axis in parallel.MESH_AXES]
    return Mesh(np.array(devices).reshape(shape), parallel.MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
