"""Environments: problems that answer back. What their worker processes import never loads JAX, so they start fast."""

from rpg_jax.environments.conversation import Environment as Environment
from rpg_jax.environments.conversation import Message as Message
from rpg_jax.environments.conversation import Posed as Posed
from rpg_jax.environments.conversation import Turn as Turn
from rpg_jax.environments.registry import ENVIRONMENTS as ENVIRONMENTS
from rpg_jax.environments.registry import Declaration as Declaration
