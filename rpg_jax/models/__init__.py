"""Qwen in Flax NNX: weights, forward, prefill, decode."""

from rpg_jax.models.config import QwenConfig, Yarn
from rpg_jax.models.kv_cache import KVCache
from rpg_jax.models.qwen import REMAT, Params, Qwen, abstract, build, logical_axes

__all__ = ["REMAT", "KVCache", "Params", "Qwen", "QwenConfig", "Yarn", "abstract", "build", "logical_axes"]
