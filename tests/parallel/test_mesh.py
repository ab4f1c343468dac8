"""Meshes on TPU slices: described ones where the compiler for TPUs is installed, drawn ones everywhere."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from rpg_jax.parallel import MESH_AXES, make_mesh
from rpg_jax.planning import topologies


@dataclasses.dataclass(frozen=True)
class Chip:
    """What JAX asks of a TPU device to lay a mesh."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    process_index: int = 0
    core_on_chip: int = 0
    device_kind: str = "TPU v6 lite"
    platform: str = "tpu"


def chips(x, y, z=1, slices=1):
    places = itertools.product(range(slices), range(z), range(y), range(x))
    return [Chip(i, (at_x, at_y, at_z), n) for i, (n, at_z, at_y, at_x) in enumerate(places)]


def assert_only_replica_spans_slices(mesh, slices):
    blocks = np.split(np.vectorize(lambda d: d.slice_index)(mesh.devices), slices, axis=MESH_AXES.index("replica"))
    assert [np.unique(block).tolist() for block in blocks] == [[n] for n in range(slices)]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ({"fsdp": -1}, (2, 16, 1, 1, 1)),
        ({"replica": 2, "fsdp": 16}, (2, 16, 1, 1, 1)),
        ({"replica": 4, "fsdp": -1, "tensor": 2}, (4, 4, 1, 1, 2)),
        ({"replica": -1, "expert": 8}, (4, 1, 8, 1, 1)),
    ],
)
def test_replica_spans_the_slices_and_every_other_axis_lies_within_one(shape, sizes):
    mesh = make_mesh(shape, chips(4, 4, slices=2))
    assert tuple(mesh.shape.values()) == sizes
    assert_only_replica_spans_slices(mesh, 2)
    assert mesh.axis_types == (AxisType.Auto,) * len(MESH_AXES)


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ({"replica": 3, "fsdp": -1}, "replica 3 .* does not cover 32 devices of 2 slices, each with its replica"),
        ({"fsdp": 32}, "replica 2 x fsdp 32 .* does not cover 32 devices of 2 slices, each with its replica"),
        (
            {"replica": -1, "fsdp": 32},
            "does not divide over 2 slices: .* take mesh.replica=2 or a multiple, and ",
        ),
    ],
)
def test_weights_are_not_cut_across_slices(shape, line):
    with pytest.raises(ValueError, match=line) as error:
        make_mesh(shape, chips(4, 4, slices=2))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "torus"),
    [
        ({"fsdp": 8, "tensor": 2}, (4, 4)),
        ({"fsdp": 2, "tensor": 8}, (4, 4)),
        ({"fsdp": -1, "context": 2}, (4, 4, 4)),
        ({"fsdp": 8, "expert": 8}, (4, 4, 4)),
    ],
    ids=str,
)
def test_an_axis_may_take_a_part_of_a_dimension_of_the_torus(shape, torus):
    devices = chips(*torus)
    mesh = make_mesh(shape, devices)
    assert set(mesh.devices.flat) == set(devices)
    (inner,) = [axis for axis in shape if axis != "fsdp"]
    ring = np.moveaxis(mesh.devices, MESH_AXES.index(inner), -1).reshape(-1, mesh.shape[inner])[0]
    spread = np.ptp([chip.coords for chip in ring], axis=0) + 1
    assert np.prod(spread) == mesh.shape[inner], "its devices fill a box"


def test_devices_with_a_hole_are_one_line():
    with pytest.raises(ValueError, match="cannot be laid on these 6 devices.*: take whole slices; ") as error:
        make_mesh({"fsdp": -1}, chips(4, 2)[:6])
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_without_a_torus_devices_keep_their_order():
    assert make_mesh({"fsdp": 4, "tensor": 2}).devices.flatten().tolist() == jax.devices()
    assert make_mesh({"fsdp": 2}, jax.devices()[::-2][:2]).devices.flatten().tolist() == jax.devices()[::-2][:2]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v6e:4x4", {"fsdp": 8, "tensor": 2}),
        ("v6e:4x4", {"fsdp": -1, "tensor": 8}),
        ("v5p:4x4x4", {"fsdp": -1, "context": 2}),
        ("v5p:4x4x4", {"fsdp": 8, "expert": 8}),
        ("v6e:4x4*2", {"fsdp": -1}),
        ("v6e:4x4*2", {"replica": 2, "fsdp": 8, "tensor": 2}),
        ("v5p:2x2x2*3", {"replica": 6, "fsdp": -1}),
    ],
    ids=str,
)
def test_meshes_on_described_slices(name, shape):
    if topologies.compiler_library() is None:
        pytest.skip(f"needs the compiler for TPUs: {topologies.GET_COMPILER}")
    topology = topologies.parse(name)
    mesh = make_mesh(shape, topology.devices())
    assert mesh.size == topology.chips
    if topology.slices > 1:
        assert_only_replica_spans_slices(mesh, topology.slices)
