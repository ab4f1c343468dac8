"""Rotary position embedding, with YaRN."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.models.config import DecoderConfig, Yarn


def frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
    """Radians per position, theta^(-2i/H), f32[H/2], and the factor on queries and keys, 1 without YaRN."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base = config.rope.theta**-pairs
    if config.rope.scaling is None:
        return base.astype(np.float32), 1.0
    return _yarn(base, config.rope.theta, config.head_dim, config.rope.scaling)


def _yarn(base: np.ndarray, theta: float, head_dim: int, yarn: Yarn) -> tuple[np.ndarray, float]:
    def pair_turning(turns: float) -> float:
        """Index of the pair that makes this many turns over the original context."""
        context = yarn.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), head_dim - 1)
    stretched = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    blended = base * (1 - stretched) + base / yarn.factor * stretched
    scale = 0.1 * math.log(yarn.factor) + 1.0 if yarn.attention_factor is None else yarn.attention_factor
    return blended.astype(np.float32), scale


def tables(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines f32[B, T, 1, H/2] of positions i32[B, T]."""
    radians, scale = frequencies(config)
    angles = positions[..., None, None].astype(jnp.float32) * radians
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, N, H] turned by its positions; pair i is (x[i], x[i + H/2]). Computed in f32, returned in x's dtype."""
    cos, sin = table
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
