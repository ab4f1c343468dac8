"""The device mesh: five named axes, whatever the machine."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

MESH_AXES = ("replica", "fsdp", "expert", "context", "tensor")
"""Slowest-varying first, so that `tensor`, which communicates in every layer, spans the nearest devices.

`replica`: copies of the parameters, rows of the batch; the only axis across slices. `fsdp`: shards of the parameters,
rows of the batch. `expert`: experts of a mixture, rows of the batch. `context`: positions of a row. `tensor`: heads,
hidden units and vocabulary entries.
"""


def make_mesh(shape: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with every axis of `MESH_AXES`, of type Auto, of `devices` (None: all devices of the run).

    `shape` has the sizes of axes (None: none). A missing axis has size 1. One axis may be -1: it takes the devices that
    are left. On several TPU slices, `replica` spans the slices over the slow network (a size of 1 becomes their
    number), and every other axis lies within a slice. An axis may be a part of a dimension of the torus.

    Raises ValueError as `mesh_sizes`, or if the devices do not fill a box of the torus, the same box in every slice.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if devices[0].platform == "tpu" else 1
    sizes = mesh_sizes(shape or {}, len(devices), slices)
    within = tuple((sizes | {"replica": sizes["replica"] // slices}).values())
    try:
        if slices > 1:
            across = tuple(slices if axis == "replica" else 1 for axis in MESH_AXES)
            placed = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
        else:
            placed = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError) as error:  # some of these messages list every device
        raise ValueError(
            f"{_words(sizes)} cannot be laid on these {len(devices)} devices, which must fill a box of the torus, the "
            "same in every slice: take whole slices; with rollout.devices, half of the devices of one host"
        ) from error
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_sizes(shape: Mapping[str, int], devices: int, slices: int = 1) -> dict[str, int]:
    """Returns the size of every axis of `MESH_AXES`, in this order, on `devices` devices of all `slices` TPU slices.

    An axis that `shape` lacks has size 1. One axis may be -1: it takes the devices that are left. On several slices, a
    `replica` of 1 becomes the number of slices: one copy of the parameters in each.

    Raises ValueError if an axis is unknown, a size is below 1, the product of the sizes is not the number of devices,
    or the slices do not divide `replica`.
    """
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(shape)
    unknown = set(sizes) - set(MESH_AXES)
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}; the axes are {', '.join(MESH_AXES)}")
    if sizes["replica"] == 1:
        sizes["replica"] = slices
    product = math.prod(sizes.values())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) == 1 and product < 0 and devices % -product == 0:
        sizes[free[0]] = devices // -product
    elif min(sizes.values()) < 1 or product != devices:
        on = f"{devices} devices" if slices == 1 else f"{devices} devices of {slices} slices, each with its replica"
        raise ValueError(
            f"{_words(sizes)} does not cover {on}: sizes must be >= 1 (one may be -1, the rest of the "
            "devices) and multiply to the number of devices"
        )
    if sizes["replica"] % slices:
        raise ValueError(
            f"{_words(sizes)} does not divide over {slices} slices: only replica spans them, so take "
            f"mesh.replica={slices} or a multiple, and mesh.fsdp=-1"
        )
    return sizes


def _words(sizes: Mapping[str, int]) -> str:
    return "mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items())
