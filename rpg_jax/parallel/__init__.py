"""The device mesh with its five axes, and the table that maps a model's logical axes to mesh axes."""

from rpg_jax.parallel.mesh import MESH_AXES as MESH_AXES
from rpg_jax.parallel.mesh import make_mesh as make_mesh
from rpg_jax.parallel.mesh import mesh_sizes as mesh_sizes
from rpg_jax.parallel.rules import RULES as RULES
from rpg_jax.parallel.rules import Rules as Rules
from rpg_jax.parallel.rules import activate as activate
from rpg_jax.parallel.rules import override as override
from rpg_jax.parallel.rules import parse_rules as parse_rules
from rpg_jax.parallel.rules import shardings as shardings
from rpg_jax.parallel.rules import shards as shards
