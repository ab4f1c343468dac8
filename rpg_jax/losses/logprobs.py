"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all tokens.

The vocabulary is the largest axis of the program: logits of 4096 tokens over 152k words are 2.5 GB in f32. So tokens
are taken in chunks, forward and backward; the backward pass computes a chunk's logits again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
    entropy: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """log softmax(hidden @ headᵀ / temperature)[targets], and the entropy of that distribution.

    Args:
      hidden: f[..., T, D].
      head: f[V, D].
      targets: i32[..., T], in 0 … V − 1.
      temperature: > 0, the sampling temperature.
      chunk_size: positions of the T axis taken at once; the largest temporary is f32[..., chunk_size, V]. The leading
        axes stay whole, so that a batch axis keeps its sharding.
      entropy: also return the entropy, nats; it costs nothing where it is not asked for.

    Returns:
      log-probabilities f32[..., T], nats (f64 for f64 inputs), and entropy f32[..., T] or None.

    Matrix products take the inputs' dtype and accumulate in f32, so do the gradients of `hidden` and `head` until they
    are cast to the dtype of their input. Gradients reach `hidden` and `head`, through both outputs.

    Raises:
      ValueError: shapes that do not match, temperature <= 0, chunk_size < 1.
    """
    if hidden.ndim < 2 or head.ndim != 2 or hidden.shape[-1] != head.shape[1] or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            "hidden [..., T, D], head [V, D] and targets [..., T] do not match: "
            f"got {hidden.shape}, {head.shape} and {targets.shape}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 (at 0 the distribution has no log-probabilities), got {temperature}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 position, got {chunk_size}")
    length = hidden.shape[-2]
    chunks = max(1, -(-length // chunk_size))
    logprobs, entropies = _token_logprobs(hidden, head, targets, float(temperature), chunks, entropy)
    return logprobs, entropies if entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _token_logprobs(hidden, head, targets, temperature, chunks, entropy):
    return _forward(hidden, head, targets, temperature, chunks, entropy)[0]


def _forward(hidden, head, targets, temperature, chunks, entropy):
    def chunk(_, xs):
        logits = _logits(xs[0], head, temperature)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        logprobs = jnp.take_along_axis(logits, xs[1][..., None], axis=-1)[..., 0] - normalizer
        if not entropy:
            return None, (logprobs, normalizer, None)
        probabilities = jnp.exp(logits - normalizer[..., None])
        return None, (logprobs, normalizer, normalizer - jnp.sum(probabilities * logits, axis=-1))

    _, outputs = lax.scan(chunk, None, (_split(hidden, chunks, -2), _split(targets, chunks, -1)))
    logprobs, normalizer, entropies = jax.tree.map(lambda x: _join(x, targets.shape), outputs)
    return (logprobs, entropies), (hidden, head, targets, normalizer, entropies)


def _backward(temperature, chunks, entropy, residuals, cotangents):
    hidden, head, targets, normalizer, entropies = residuals
    accumulate = _accumulator(hidden, head)

    def chunk(head_gradient, xs):
        h, target, z, h_entropy, g_logprob, g_entropy = xs
        logits = _logits(h, head, temperature)
        probabilities = jnp.exp(logits - z[..., None])
        chosen = lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1) == target[..., None]
        # ∂ log p_target / ∂ logits = 1[target] − p;  ∂ H / ∂ logits = −p (log p + H)
        g_logits = jnp.where(chosen, g_logprob[..., None], 0) - probabilities * g_logprob[..., None]
        if entropy:
            surprise = logits - z[..., None] + h_entropy[..., None]
            g_logits -= g_entropy[..., None] * probabilities * surprise
        g_logits /= temperature
        g_hidden = jnp.einsum("...v,vd->...d", g_logits, head, preferred_element_type=accumulate)
        g_head = jnp.einsum("...v,...d->vd", g_logits, h, preferred_element_type=accumulate)
        return head_gradient + g_head, g_hidden.astype(hidden.dtype)

    g_logprobs, g_entropies = cotangents
    per_token = (targets, normalizer, entropies, g_logprobs, g_entropies if entropy else None)
    xs = (_split(hidden, chunks, -2), *jax.tree.map(lambda x: _split(x, chunks, -1), per_token))
    g_head, g_hidden = lax.scan(chunk, jnp.zeros(head.shape, accumulate), xs)
    return _join(g_hidden, hidden.shape, axis=-2), g_head.astype(head.dtype), None


_token_logprobs.defvjp(_forward, _backward)


def _accumulator(hidden, head):
    return jnp.promote_types(jnp.promote_types(hidden.dtype, head.dtype), jnp.float32)


def _logits(hidden, head, temperature):
    logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=_accumulator(hidden, head))
    return logits / temperature


def _split(x, chunks, axis):
    """[..., T, …] -> [chunks, ..., ceil(T / chunks), …], zero-padded at the end of the T axis."""
    axis %= x.ndim
    size = -(-x.shape[axis] // chunks)
    padding = [(0, chunks * size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], chunks, size, *x.shape[axis + 1 :]), axis, 0)


def _join(x, shape, axis=-1):
    """The inverse of `_split`: back to `shape`, padding dropped."""
    axis %= len(shape)
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return lax.slice_in_dim(x, 0, shape[axis], axis=axis)
