"""Plans programs for TPUs that are not there: compiles them, and compares their costs with a chip's limits."""

from rpg_jax.planning.compiling import Program as Program
from rpg_jax.planning.compiling import compile_program as compile_program
from rpg_jax.planning.compiling import forward_flops as forward_flops
from rpg_jax.planning.compiling import token_flops as token_flops
from rpg_jax.planning.compiling import training_flops as training_flops
from rpg_jax.planning.hlo import Costs as Costs
from rpg_jax.planning.hlo import count as count
from rpg_jax.planning.topologies import CHIPS as CHIPS
from rpg_jax.planning.topologies import Topology as Topology
from rpg_jax.planning.topologies import known as known
from rpg_jax.planning.topologies import parse as parse
