"""What a device does at most, measured: products of matrices, and reads of memory."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.models import DecoderConfig

_SIDE = 2048  # of the matrices of a product
_NUMBERS = 1 << 26  # f32, 256 MiB: more than any cache holds


class Machine(NamedTuple):
    """Operations per second in f32 products, and bytes per second that one program reads."""

    flops: float
    bytes: float


@functools.cache
def measured() -> Machine:
    """The default device, from medians of seven calls each."""
    square = jnp.ones((_SIDE, _SIDE))
    numbers = jnp.ones(_NUMBERS)
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))  # all of f32, as a f32 model decodes
    total = jax.jit(jnp.sum)
    return Machine(
        2 * _SIDE**3 / _seconds(lambda: product(square, square)), 4 * _NUMBERS / _seconds(lambda: total(numbers))
    )


def decode_limit(machine: Machine, model: DecoderConfig, parameters: int, slots: int, length: float) -> float:
    """The least seconds of a decode step in f32: max(operations / rate, bytes / rate).

    Operations are 2 for each weight and slot, and 4 N H L for each slot and token of its cache. Bytes are those of the
    weights and of the caches, each read once.

    Args:
      parameters: weights of the model; tied embeddings count once.
      length: mean tokens of a slot.
    """
    heads, cached = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    operations = slots * (2 * parameters + 4 * heads * model.num_layers * length)
    read = 4 * (parameters + slots * cached * model.num_layers * length)
    return max(operations / machine.flops, read / machine.bytes)


def _seconds(call: Callable[[], jax.Array]) -> float:
    times = []
    for _ in range(8):
        began = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
