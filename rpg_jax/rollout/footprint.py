"""Bytes of a device that weights and decode slots take, and the slots that fit beside what else it holds."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import parallel
from rpg_jax.models import DecoderConfig
from rpg_jax.rollout.decode_state import DecodeState
from rpg_jax.rollout.decoding import Decoding

UNKNOWN_MEMORY_SLOTS = 128  # over all devices that decode together
LEFT_FREE = 1 / 16  # of a device: prefilled prompts that wait, temporaries, gaps
_LOGITS = 4  # arrays f32[slots, vocabulary] at the peak of a decode step
_TILE = 16  # slots of a copy: rows of a bf16 tile


def slots_that_fit(memory: float, held: float, slot: float, *, tile: int, needed: int) -> int:
    """Decode slots of a device: those that fit, in whole tiles, but no more than `needed`, and at least one.

    floor((memory × 15/16 - held) / slot): bytes of the device, of what else it holds, and of a slot.
    """
    fitting = max(1, math.floor((memory * (1 - LEFT_FREE) - held) / slot))
    return min(fitting - fitting % tile if fitting > tile else fitting, needed)


def slots_beside(held: float, memory: float | None, model: DecoderConfig, decoding: Decoding, needed: int) -> int:
    """The slots of a device that has `memory` bytes and holds `held` of them; at most `needed`.

    `decoding` has one slot for each device of its mesh. Where the memory is unknown, all devices together have 128.
    """
    mesh = decoding.mesh
    assert mesh is not None, "slots are counted on a mesh"
    if memory is None:
        return min(needed, -(-UNKNOWN_MEMORY_SLOTS // mesh.size))
    copy = mesh.shape["tensor"] * mesh.shape["expert"]
    slot = cache_bytes(model, decoding) + _LOGITS * 4 * model.vocab_size * copy
    return slots_that_fit(memory, held, slot, tile=-(-_TILE // copy), needed=needed)


def placed(shapes: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs with shardings; `shardings` is a tree like `shapes`, or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def bytes_on_a_device(tree: Any) -> float:
    """Bytes of ShapeDtypeStructs with shardings; arrays in host memory do not count."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind in (None, "device")]
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves))


def cache_bytes(model: DecoderConfig, decoding: Decoding) -> float:
    """Bytes of the decode state on a device."""
    assert decoding.mesh is not None, "a layout decodes on a mesh"
    size, int8 = (decoding.slots, decoding.capacity, decoding.dtype or jnp.float32), {"int8_kv": decoding.int8_kv}
    shapes = jax.eval_shape(functools.partial(DecodeState.empty, model, *size, **int8))
    where = parallel.shardings(DecodeState.logical_axes(**int8), shapes, decoding.mesh, decoding.rules)
    return bytes_on_a_device(placed(shapes, where))
