"""Logical axes: how a model names the dimensions of its arrays without knowing the mesh.

Parameters use `layers vocab embed heads kv_heads head_dim hidden experts router norm`; activations use `batch length`
(rows and positions of a training batch), `prompts` (rows of a prefill), `slots` (rows of a decode step),
`act_embed act_heads act_kv_heads act_hidden act_vocab act_experts` and `cache_length`. Which mesh axes they fall on is
decided by the rule table in force (`flax.linen.logical_axis_rules`), outside the model.
"""

from __future__ import annotations

import math

import jax
from flax import linen
from jax.sharding import PartitionSpec


def partition_spec(*names: str | None) -> PartitionSpec | None:
    """PartitionSpec of logical names under the rules and mesh in force; None where there are none.

    Raises:
      ValueError: a name that the rules do not have, or two dimensions on one mesh axis.
    """
    rules = dict(linen.get_logical_axis_rules())
    if not rules or jax.sharding.get_abstract_mesh().empty:
        return None
    unknown = [n for n in names if n is not None and n not in rules]
    if unknown:
        raise ValueError(f"no sharding rule for logical axes {unknown}; the rules name {sorted(rules)}")
    entries = [rules[n] if n is not None else None for n in names]
    used = jax.tree.leaves(entries)
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {names} put two dimensions on one mesh axis: {entries}")
    return PartitionSpec(*entries)


def mesh_axes(name: str) -> tuple[str, ...]:
    """Mesh axes that the rules in force give one logical axis; none where there are no rules."""
    spec = partition_spec(name)
    return () if spec is None else tuple(jax.tree.leaves(tuple(spec)))


def wide_axes(name: str | None) -> tuple[str, ...]:
    """Those of `mesh_axes` that have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if name is None else tuple(axis for axis in mesh_axes(name) if mesh.shape[axis] > 1)


def shards(name: str | None) -> int:
    """Into how many parts the rules and mesh in force cut dimensions of one logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if name is None else math.prod(mesh.shape[axis] for axis in mesh_axes(name))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x` with the sharding that the rules in force give its dimensions; `x` itself where there are no rules."""
    if len(names) != x.ndim:
        raise ValueError(f"{len(names)} logical axes {names} for an array of shape {x.shape}")
    spec = partition_spec(*names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def platform() -> str:
    """Of the mesh in force (which may be a described topology), else of the default backend: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
