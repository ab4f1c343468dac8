"""Rewards of completions. This package never imports JAX: its workers start fast and cannot touch a device."""

from rpg_jax.rewards.callables import name_of as name_of
from rpg_jax.rewards.callables import named as named
from rpg_jax.rewards.callables import source_digests as source_digests
from rpg_jax.rewards.scorer import Scorer as Scorer
from rpg_jax.rewards.scorer import Scores as Scores
from rpg_jax.rewards.verifiers import ENVIRONMENT as ENVIRONMENT
from rpg_jax.rewards.verifiers import JUDGE as JUDGE
from rpg_jax.rewards.verifiers import NO_FUNCTIONS as NO_FUNCTIONS
from rpg_jax.rewards.verifiers import Functions as Functions
from rpg_jax.rewards.verifiers import check as check
from rpg_jax.rewards.verifiers import needs_answers as needs_answers
from rpg_jax.rewards.verifiers import paths as paths
