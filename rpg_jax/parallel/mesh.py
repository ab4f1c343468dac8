"""The device mesh: five named axes, whatever the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

MESH_AXES = ("replica", "fsdp", "expert", "context", "tensor")
"""Slowest-varying first, so that `tensor`, which communicates in every layer, spans the nearest devices.

`replica`: copies of the parameters, rows of the batch. `fsdp`: shards of the parameters, rows of the batch.
`expert`: experts of a mixture, rows of the batch. `context`: positions of a row. `tensor`: heads, hidden units and
vocabulary entries.
"""


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices` (default: all of them) with every axis of `MESH_AXES`, of size 1 where `shape` has none.

    One axis may be -1: the devices that the others leave. Axes are of type Auto.

    Raises:
      ValueError: an unknown axis, a size below 1, or sizes whose product is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(shape or {})
    unknown = set(sizes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}; the axes are {', '.join(MESH_AXES)}")
    product = 1
    for size in sizes.values():
        product *= size
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) == 1 and product < 0 and len(devices) % -product == 0:
        sizes[free[0]] = len(devices) // -product
    elif min(sizes.values()) < 1 or product != len(devices):
        wanted = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"mesh {wanted} does not cover {len(devices)} devices: sizes must be >= 1 (one may be -1, the rest of the "
            "devices) and multiply to the number of devices"
        )
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), devices=devices)
