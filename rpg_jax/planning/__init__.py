"""Plans programs for TPUs that are not there: compiles them, and compares their costs with a chip's limits."""

from rpg_jax.planning.compiling import (
    Program,
    compile_program,
    forward_flops,
    needed_bytes,
    token_flops,
    token_training_flops,
    training_flops,
)
from rpg_jax.planning.hlo import Costs, count
from rpg_jax.planning.topologies import CHIPS, Topology, known, parse

__all__ = [
    "CHIPS",
    "Costs",
    "Program",
    "Topology",
    "compile_program",
    "count",
    "forward_flops",
    "known",
    "needed_bytes",
    "parse",
    "token_flops",
    "token_training_flops",
    "training_flops",
]
