"""Causal grouped-query attention within segments, and one-token attention over a cache.

Softmax is f32 whatever the compute dtype; keys and values are never repeated over the query heads of their group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rpg_jax.models.logical import constrain

_MASKED = -1e30  # finite: a padding row may then be all masked without becoming NaN

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """softmax(q kᵀ / √H) v over the earlier tokens (and itself) of each token's own segment.

    Args:
      q: [B, T, N, H].
      k, v: [B, T, K, H]; query head n reads key-value head n // (N / K).
      segment_ids: i32[B, T]; tokens of one segment are contiguous and in order; 0 is padding.
      implementation: "xla", "cudnn" (GPU), "splash" (TPU), or "auto", which follows the platform that the program is
        compiled for: the mesh in force, else jax's default backend.

    Returns:
      [B, T, N, H] in q's dtype; rows of padding are finite and mean nothing.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return _xla(q, k, v, segment_ids)


def platform() -> str:
    """ "cpu", "gpu" or "tpu": of the mesh in force (which may be a described topology), else the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H) * (H**-0.5)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = constrain(scores, "batch", "act_kv_heads", None, "length", None)
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)
    mask = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


def decode_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Attention of one new token per slot over its cached predecessors and itself.

    Args:
      q: [S, N, H]; k, v: [S, K, H], the new token.
      keys: [S, K, H, C]; values: [S, K, C, H]; entries at or past `lengths` i32[S] are ignored.

    Returns:
      [S, N, H] in q's dtype.
    """
    S, N, H = q.shape
    K = k.shape[1]
    grouped = q.reshape(S, K, N // K, H) * (H**-0.5)
    past = jnp.einsum("skgh,skhc->skgc", grouped, keys, preferred_element_type=jnp.float32)
    filled = jnp.arange(keys.shape[-1]) < lengths[:, None]
    past = jnp.where(filled[:, None, None], past, _MASKED)
    own = jnp.einsum("skgh,skh->skg", grouped, k, preferred_element_type=jnp.float32)[..., None]
    peak = jnp.maximum(past.max(-1, keepdims=True), own)
    past, own = jnp.exp(past - peak), jnp.exp(own - peak)
    total = past.sum(-1, keepdims=True) + own
    out = jnp.einsum("skgc,skch->skgh", past.astype(v.dtype), values, preferred_element_type=jnp.float32)
    return ((out + own * v[:, :, None]) / total).astype(q.dtype).reshape(S, N, H)
