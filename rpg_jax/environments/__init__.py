"""Environments: problems that answer back. This package's workers never load JAX, so they start fast."""

from rpg_jax.environments.environment import Declaration as Declaration
from rpg_jax.environments.environment import Environment as Environment
from rpg_jax.environments.environment import Message as Message
from rpg_jax.environments.environment import Posed as Posed
from rpg_jax.environments.environment import Turn as Turn
from rpg_jax.environments.environment import play as play
