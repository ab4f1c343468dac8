"""Completions from the current policy: one engine, several drivers, the same random numbers in each."""

from rpg_jax.rollout.decoding import Decoding as Decoding
from rpg_jax.rollout.decoding import capacity as capacity
from rpg_jax.rollout.decoding import prefill_shape as prefill_shape
from rpg_jax.rollout.drivers import DRIVERS as DRIVERS
from rpg_jax.rollout.drivers import LOCAL_DRIVERS as LOCAL_DRIVERS
from rpg_jax.rollout.drivers import find_driver as find_driver
from rpg_jax.rollout.drivers import make_rollout as make_rollout
from rpg_jax.rollout.engine import DecodeEngine as DecodeEngine
from rpg_jax.rollout.request import Request as Request
from rpg_jax.rollout.request import Start as Start
from rpg_jax.rollout.rollout import Feedable as Feedable
from rpg_jax.rollout.rollout import GroupJournal as GroupJournal
from rpg_jax.rollout.rollout import Rollout as Rollout
from rpg_jax.rollout.rollout import Split as Split
from rpg_jax.rollout.weights import RolloutError as RolloutError
from rpg_jax.rollout.weights import Staged as Staged
from rpg_jax.rollout.weights import Weights as Weights
from rpg_jax.rollout.weights import weights_checksum as weights_checksum
