"""The parts of a decoder layer: RMS norm, attention's projections, rotary positions (RoPE) and feed-forward."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax.models.config import DecoderConfig, Llama3, Yarn
from rpg_jax.models.logical import constrain
from rpg_jax.models.moe import MoE
from rpg_jax.models.projections import project, swiglu
from rpg_jax.models.weights import Declare


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / √(mean(x²) + eps) · weight [D] over the last axis of x [..., D], computed in f32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """The projections of grouped-query attention, with q/k norm or q/k/v bias and rotary positions. Mixes no tokens."""

    def __init__(self, config: DecoderConfig, declare: Declare):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        self.q = declare.matrix((D, N, H), ("embed", "heads", None), fan_in=D)
        self.k = declare.matrix((D, K, H), ("embed", "kv_heads", None), fan_in=D)
        self.v = declare.matrix((D, K, H), ("embed", "kv_heads", None), fan_in=D)
        self.o = declare.matrix((N, H, D), ("heads", None, "embed"), fan_in=N * H * 2 * config.num_layers)
        self.qkv_bias, self.qk_norm = config.qkv_bias, config.qk_norm
        if self.qkv_bias:
            self.q_bias = declare.constant(0.0, (N, H), ("heads", None))
            self.k_bias = declare.constant(0.0, (K, H), ("kv_heads", None))
            self.v_bias = declare.constant(0.0, (K, H), ("kv_heads", None))
        if self.qk_norm:
            self.q_norm = declare.constant(1.0, (H,), ("norm",))
            self.k_norm = declare.constant(1.0, (H,), ("norm",))

    def project(self, x: jax.Array, table, axes) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns q [B, T, N, H], k and v [B, T, K, H] of x [B, T, D] in x's dtype; q and k are normed (with `qk_norm`)
        and rotated by `table`, the result of `rope_tables`. `axes` are the logical names of B and T."""
        q, k, v = (
            project(x, weight[...], axes, ("embed",), (heads, None))
            for weight, heads in ((self.q, "heads"), (self.k, "kv_heads"), (self.v, "kv_heads"))
        )
        if self.qkv_bias:
            q, k, v = (y + b[...].astype(x.dtype) for y, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
        if self.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], self.eps), rms_norm(k, self.k_norm[...], self.eps)
        q = constrain(rotate(q, table), *axes, "heads", None)
        k = constrain(rotate(k, table), *axes, "kv_heads", None)
        return q, k, constrain(v, *axes, "kv_heads", None)

    def output(self, x: jax.Array, axes) -> jax.Array:
        """Projects attended values x [B, T, N, H] to the output [B, T, D], in x's dtype; `axes` names B and T."""
        return project(x, self.o[...], axes, ("heads", None), ("embed",))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). A call returns a pair, as that of `MoE`, with None for the experts."""

    def __init__(self, config: DecoderConfig, declare: Declare):
        D, F = config.embed_dim, config.hidden_dim
        self.gate = declare.matrix((D, F), ("embed", "hidden"), fan_in=D)
        self.up = declare.matrix((D, F), ("embed", "hidden"), fan_in=D)
        self.down = declare.matrix((F, D), ("hidden", "embed"), fan_in=F * 2 * config.num_layers)

    def __call__(self, x: jax.Array, axes, recorded: jax.Array | None = None) -> tuple[jax.Array, None]:
        """Returns (output [B, T, D] of x [B, T, D], None): a dense layer chooses no experts, and ignores `recorded`."""
        return swiglu(x, self.gate[...], self.up[...], self.down[...], axes), None


class Block(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, declare: Declare):
        self.eps = config.rms_norm_eps
        self.attention_norm = declare.constant(1.0, (config.embed_dim,), ("norm",))
        self.attention = Attention(config, declare)
        self.mlp_norm = declare.constant(1.0, (config.embed_dim,), ("norm",))
        self.mlp = MoE(config, config.experts, declare) if config.experts else MLP(config, declare)

    def __call__(
        self, x: jax.Array, table, attend: Callable, axes, recorded: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Returns the next x [B, T, D], this layer's k and v [B, T, K, H], and the experts i32[B, T, k] of its tokens
        (None in a dense layer) for x [B, T, D].

        Args:
          table: the result of `rope_tables`.
          attend: a function of q [B, T, N, H], k and v [B, T, K, H] that mixes tokens, and returns [B, T, N, H].
          axes: the logical names of B and T.
          recorded: in a mixture, the experts ints [B, T, k] that replace the router's choice; None: the router chooses.
        """
        q, k, v = self.attention.project(rms_norm(x, self.attention_norm[...], self.eps), table, axes)
        x = constrain(x + self.attention.output(attend(q, k, v), axes), *axes, None)
        mixed, experts = self.mlp(rms_norm(x, self.mlp_norm[...], self.eps), axes, recorded)
        return constrain(x + mixed, *axes, None), k, v, experts


def llama3_divisors(base: np.ndarray, llama3: Llama3) -> np.ndarray:
    """Returns the numbers by which llama3 divides the frequencies `base`, both f64[H/2]: 1 for fast pairs, `factor` for
    slow. The frequencies in between are blended linearly in their turns over the original context."""
    turns = llama3.original_max_position_embeddings * base / (2 * math.pi)
    kept = np.clip((turns - llama3.low_freq_factor) / (llama3.high_freq_factor - llama3.low_freq_factor), 0, 1)
    return 1 / ((1 - kept) / llama3.factor + kept)


def _yarn(base: np.ndarray, theta: float, head_dim: int, yarn: Yarn) -> tuple[np.ndarray, float]:
    """Returns YaRN's radians a position f64[H/2], from plain RoPE's `base`, and the factor on queries and keys."""

    def pair_turning(turns: float) -> float:
        """Returns the pair, a real number, that makes so many turns over the original context."""
        context = yarn.original_max_position_embeddings
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), head_dim - 1)
    stretched = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    blended = base * (1 - stretched) + base / yarn.factor * stretched
    scale = 0.1 * math.log(yarn.factor) + 1.0 if yarn.attention_factor is None else yarn.attention_factor
    return blended, scale


def rope_tables(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines f32[B, T, 1, H/2] of the rotation at positions i32[B, T], for `rotate`; with YaRN's
    factor. Pair i turns by theta^(-2i/H) radians a position, as the config's context extension changes it."""
    radians = config.rope.theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scale = 1.0
    match config.rope.scaling:
        case Yarn() as yarn:
            radians, scale = _yarn(radians, config.rope.theta, config.head_dim, yarn)
        case Llama3() as llama3:
            radians = radians / llama3_divisors(radians, llama3)
    angles = positions[..., None, None].astype(jnp.float32) * radians.astype(np.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (x[i], x[i + H/2]) of x [B, T, N, H] by `table`, the result of `rope_tables`. Computed in f32,
    returned in x's dtype."""
    cos, sin = table
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
