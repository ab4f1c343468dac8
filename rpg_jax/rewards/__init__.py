"""Rewards of completions. This package never imports JAX: its workers start fast and cannot touch a device."""

from rpg_jax.rewards.extraction import extract_answer as extract_answer
from rpg_jax.rewards.scorer import Scorer as Scorer
from rpg_jax.rewards.scorer import Scores as Scores
from rpg_jax.rewards.scorer import check as check
from rpg_jax.rewards.scorer import make_scorer as make_scorer
from rpg_jax.rewards.scorer import needs_answers as needs_answers
