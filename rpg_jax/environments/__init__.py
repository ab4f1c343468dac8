"""Environments: problems that answer back. This package never imports JAX, but for `player`: its workers start fast."""

from rpg_jax.environments.conversation import Environment as Environment
from rpg_jax.environments.conversation import Message as Message
from rpg_jax.environments.conversation import Posed as Posed
from rpg_jax.environments.conversation import Turn as Turn
from rpg_jax.environments.registry import ENVIRONMENTS as ENVIRONMENTS
from rpg_jax.environments.registry import Declaration as Declaration
