"""Logical axes: how a model names the dimensions of its arrays without knowing the mesh.

Parameters use `layers vocab embed heads kv_heads hidden experts router norm`. Activations use `batch length` (rows and
positions of a training batch), `slots` (rows of a decode step), and `heads kv_heads`, because a device computes the
heads whose weights it has. A dimension without a name is whole on every device. The rule table in force
(`flax.linen.logical_axis_rules`) maps the names to mesh axes. `parallel.activate` sets it, outside the model.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import PartitionSpec


def partition_spec(*names: str | None) -> PartitionSpec | None:
    """Returns the PartitionSpec of an array by the logical names of its dimensions, under the rules and the mesh in
    force. The name None is a whole dimension. Mesh axes of one device are left out. Returns None without rules or mesh.
    Raises ValueError if the rules lack a name, or put two dimensions on one mesh axis."""
    rules, mesh = dict(linen.get_logical_axis_rules()), jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return None
    unknown = [n for n in names if n is not None and n not in rules]
    if unknown:
        raise ValueError(f"no sharding rule for logical axes {unknown}; the rules name {sorted(rules)}")
    wide = {n: tuple(axis for axis in jax.tree.leaves(axes) if mesh.shape[axis] > 1) for n, axes in rules.items()}
    entries = [() if n is None else wide[n] for n in names]
    used = jax.tree.leaves(entries)
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {names} put two dimensions on one mesh axis: {entries}")
    return PartitionSpec(*(axes or None for axes in entries))


def mesh_axes(name: str | None) -> tuple[str, ...]:
    """Returns the mesh axes, of more than one device, that split a dimension of the logical axis `name`; () if none
    does, for None, and without rules or mesh. Raises ValueError if the rules lack the name."""
    spec = partition_spec(name)
    return () if spec is None else tuple(jax.tree.leaves(tuple(spec)))


def shards(name: str | None) -> int:
    """Returns the number of parts into which the rules and the mesh in force cut a dimension of the logical axis
    `name`; 1 for None and without rules or mesh. Raises ValueError if the rules lack the name."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def in_own_shard(index: jax.Array, name: str, size: int) -> tuple[jax.Array, jax.Array]:
    """Turns places along an axis, i32 of any shape, into places of this device's shard, which has `size` entries.
    Returns (places in the shard, whether each place is in the shard), both in the shape of `index`. `name` is the
    logical axis. A place outside becomes some place of the shard. Call this in a `jax.shard_map`, or without a mesh."""
    axes = mesh_axes(name)
    local = index - jax.lax.axis_index(axes) * size if axes else index
    return jnp.clip(local, 0, size - 1), (local >= 0) & (local < size)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` with the sharding of `partition_spec(*names)`; without rules or mesh `x` itself. Raises ValueError
    unless `names` has a name or None for each dimension of `x`, and as `partition_spec`."""
    if len(names) != x.ndim:
        raise ValueError(f"{len(names)} logical axes {names} for an array of shape {x.shape}")
    spec = partition_spec(*names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def _device() -> Any:
    """Returns a device of the mesh in force, real or only described; without a mesh, of the default backend."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def platform() -> str:
    """Returns the platform that programs are compiled for: "cpu", "gpu" or "tpu". The mesh in force decides, real or
    only described; without a mesh it is JAX's default backend."""
    name = _device().platform
    return "gpu" if name in ("cuda", "rocm") else name


def tensor_cores() -> int:
    """Returns how many TensorCores share a kernel on the TPU that programs are compiled for: 2 on v4, v5p; else 1."""
    return (platform() == "tpu" and getattr(_device(), "num_cores", None)) or 1  # a GPU's cores are counted too


def multiplies_int8() -> bool:
    """Whether the matrix unit of the device that programs are compiled for takes int8: False on a TPU v4, else True."""
    return "v4" not in _device().device_kind
