"""The mesh, and the table from logical to mesh axes."""

from rpg_jax.parallel.mesh import MESH_AXES, make_mesh, mesh_sizes
from rpg_jax.parallel.rules import RULES, Rules, activate, override, parse_rules, shardings, shards

__all__ = [
    "MESH_AXES",
    "RULES",
    "Rules",
    "activate",
    "make_mesh",
    "mesh_sizes",
    "override",
    "parse_rules",
    "shardings",
    "shards",
]
