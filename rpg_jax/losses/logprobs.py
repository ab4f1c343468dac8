"""Log-probabilities of given tokens from hidden states, without the logits of all tokens at once.

`token_logprobs` reads one policy. `token_divergences` also reads a reference policy, and sums the KL of the two
next-token distributions over the whole vocabulary, in the same chunks.

The vocabulary is the largest axis of the program: logits of 4096 tokens over 152k words are 2.5 GB in f32. So the
forward and the backward pass take tokens in chunks, and the backward pass computes a chunk's logits again.

On a mesh the devices that shard the head also share the vocabulary, and the tokens of a chunk go to all these devices
(`Cut`). No device ever holds the whole head or its gradient, and neither crosses the network more than once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rpg_jax.losses.tokens import PrefixKL

Axes = tuple[str, ...]

_SCALAR = PartitionSpec()
_ABSENT = -1e30  # the logit of an entry that pads the vocabulary: finite, so that no difference of two is NaN


class Cut(NamedTuple):
    """How hidden [B, T, D], targets [B, T] and head [V, D] lie on a mesh: the mesh axes that shard each dimension.
    `rows` shard B, `positions` shard T, `vocab` shards V and `width` shards the D of the head; () shards nothing.
    Every axis of `width` must be in `rows`."""

    mesh: Mesh | AbstractMesh
    rows: Axes = ()
    positions: Axes = ()
    vocab: Axes = ()
    width: Axes = ()


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
    entropy: bool = False,
    cut: Cut | None = None,
    used: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """log softmax(hidden @ headᵀ / temperature)[targets], and the entropy of the whole distribution.

    Args:
      hidden: f[..., T, D].
      head: f[V, D].
      targets: i32[..., T], in 0 … V − 1.
      temperature: > 0, the sampling temperature.
      chunk_size: the most positions of the T axis in one chunk; the largest temporary is f32[..., chunk_size, V]. The
        leading axes stay whole, so that a batch axis keeps its sharding.
      entropy: also return the entropy, nats.
      cut: how the arrays lie on a mesh; hidden is then [B, T, D]. None: the arrays are whole.
      used: i32[], the number of leading positions of the T axis that are wanted; None: all. A device
        leaves out the chunks after its first `used` positions: the outputs and gradients of these chunks are 0.

    Returns:
      log-probabilities f32[..., T], nats (f64 for f64 inputs), and entropy f32[..., T] or None.

    Matrix products take the inputs' dtype and accumulate in f32. The gradients of `hidden` and `head` also accumulate
    in f32, and are cast to the dtype of their input at the end. Both outputs are differentiable. Raises ValueError for
    shapes that do not match, temperature <= 0, chunk_size < 1, or a cut that does not fit the shapes.
    """
    _check(hidden, head, targets, temperature, chunk_size, cut)
    how = (float(temperature), chunk_size, entropy, cut)
    logprobs, entropies, _ = _token_numbers(hidden, head, targets, used, None, *how)
    return logprobs, entropies


class TokenNumbers(NamedTuple):
    """The numbers of a token from the next-token distributions of a policy and of a reference at the token's prefix.

    Attributes:
      logprobs, ref_logprobs: f32[..., T], the log-probabilities of the token under both policies, nats.
      entropy: f32[..., T] of the policy, nats; None if it was not requested.
      kl: f32[..., T] each, the KL of the two distributions in both directions, in nats.
    """

    logprobs: jax.Array
    entropy: jax.Array | None
    ref_logprobs: jax.Array
    kl: PrefixKL


def token_divergences(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    ref_hidden: jax.Array,
    ref_head: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_size: int = 256,
    entropy: bool = False,
    cut: Cut | None = None,
    used: jax.Array | None = None,
) -> TokenNumbers:
    """Log-probabilities under a policy and a reference, and the KL of their distributions over the vocabulary, in nats.

        reverse = Σ_a π(a|s) log(π/π_ref)(a|s)        ∂reverse/∂z_a = π(a|s) (log(π/π_ref)(a|s) − reverse)
        forward = Σ_a π_ref(a|s) log(π_ref/π)(a|s)    ∂forward/∂z_a = π(a|s) − π_ref(a|s)

    s is the prefix of a token and z the policy's logits over the temperature. A chunk holds the logits of both
    policies. The gradient reaches `hidden` and `head`; the reference is a constant.

    Args:
      hidden, head, targets: f[..., T, D], f[V, D] and i32[..., T] in 0 … V − 1, of the policy.
      ref_hidden, ref_head: f[..., T, E] and f[V, E], of the reference, whose width E may be another.
      temperature, chunk_size: the sampling temperature, > 0, and the most positions of T in a chunk, for both policies.
      entropy: also return the policy's entropy, in nats.
      cut: how the arrays lie on a mesh. `ref_hidden` and `ref_head` are sharded in the way of `hidden` and `head`.
      used: i32[], the number of leading positions of the T axis whose numbers are wanted, as in `token_logprobs`.

    Raises ValueError for shapes that do not match, temperature <= 0, chunk_size < 1, a cut that does not fit the
    shapes, or a reference with another V, or with other leading dimensions than `hidden`.

    Source: the Rao-Blackwell estimate of arXiv:2504.10637 is the sum of `reverse` over the tokens of a completion.
    """
    _check(hidden, head, targets, temperature, chunk_size, cut)
    if ref_hidden.shape[:-1] != targets.shape or ref_head.shape != (head.shape[0], ref_hidden.shape[-1]):
        raise ValueError(
            "ref_hidden [..., T, E] and ref_head [V, E] do not match head [V, D] and targets [..., T]: "
            f"got {ref_hidden.shape}, {ref_head.shape}, {head.shape} and {targets.shape}"
        )
    reference, how = (ref_hidden, ref_head), (float(temperature), chunk_size, entropy, cut)
    logprobs, entropies, (ref_logprobs, *kl) = _token_numbers(hidden, head, targets, used, reference, *how)
    return TokenNumbers(logprobs, entropies, ref_logprobs, PrefixKL(*kl))


def _check(hidden, head, targets, temperature, chunk_size, cut):
    if hidden.ndim < 2 or head.ndim != 2 or hidden.shape[-1] != head.shape[1] or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            "hidden [..., T, D], head [V, D] and targets [..., T] do not match: "
            f"got {hidden.shape}, {head.shape} and {targets.shape}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0 (at 0 the distribution has no log-probabilities), got {temperature}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1 position, got {chunk_size}")
    if cut is not None and (hidden.ndim != 3 or not set(cut.width) <= set(cut.rows)):
        raise ValueError(f"a cut needs hidden [B, T, D] and its width axes among its rows: got {hidden.shape}, {cut}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _token_numbers(hidden, head, targets, used, reference, temperature, chunk_size, entropy, cut):
    """(log-probs, entropies or None, (ref_logprobs, reverse, forward) or None without a reference), f[..., T] each."""
    return _forward(hidden, head, targets, used, reference, temperature, chunk_size, entropy, cut)[0]


def _forward(hidden, head, targets, used, reference, temperature, chunk_size, entropy, cut):
    def local(hidden, head, targets, used, reference):
        words, first, entries = _vocab_shard(head, cut)
        ref_hidden, ref_words = _reference_shard(reference, cut)
        chunks = max(1, -(-targets.shape[-1] // chunk_size))

        def chunk(_, xs):
            logits = _logits(_all_gather(xs[0], cut), words, temperature, entries)
            normalizer = _normalizer(logits, cut)
            index = _all_gather(xs[2], cut)[..., None] - first
            held = (index >= 0) & (index < entries)
            index = jnp.where(held, index, 0)

            def chosen(logits):
                return _psum(jnp.where(held, jnp.take_along_axis(logits, index, axis=-1), 0)[..., 0], cut)

            logprobs, h_entropy, known = chosen(logits) - normalizer, None, None
            if entropy:
                mean = _psum((jnp.exp(logits - normalizer[..., None]) * logits).sum(-1), cut)
                h_entropy = normalizer - mean
            if reference is not None:
                ref_logits = _logits(_all_gather(xs[1], cut), ref_words, temperature, entries)
                ref_normalizer = _normalizer(ref_logits, cut)
                log_p, log_q = logits - normalizer[..., None], ref_logits - ref_normalizer[..., None]
                reverse, forward = (
                    _psum((jnp.exp(of) * (of - to)).sum(-1), cut) for of, to in ((log_p, log_q), (log_q, log_p))
                )
                known = chosen(ref_logits) - ref_normalizer, reverse, forward, ref_normalizer
            return None, jax.tree.map(lambda x: _shard(x, cut), (logprobs, normalizer, h_entropy, known))

        both = jax.tree.map(lambda x: _split(x, chunks, -2), (hidden, ref_hidden))
        _, outputs = _scan(chunk, None, (*both, _split(targets, chunks, -1)), used)
        return jax.tree.map(lambda x: _join(x, targets.shape), outputs)

    *inputs, spec = _specs(cut)
    outputs = (spec, spec, spec if entropy else None, None if reference is None else (spec,) * 4)
    specs = (*inputs, spec, _SCALAR, None if reference is None else tuple(inputs))
    found = _on_mesh(local, cut, specs, outputs)(hidden, head, targets, used, reference)
    logprobs, normalizer, entropies, known = found
    numbers = logprobs, entropies, None if known is None else known[:3]
    return numbers, (hidden, head, targets, used, reference, normalizer, entropies, known)


def _backward(temperature, chunk_size, entropy, cut, residuals, cotangents):
    hidden, head, targets, used, reference, normalizer, entropies, known = residuals
    accumulate = _accumulator(hidden, head)

    def local(hidden, head, used, reference, *per_token):
        words, first, entries = _vocab_shard(head, cut)
        ref_hidden, ref_words = _reference_shard(reference, cut)
        chunks = max(1, -(-hidden.shape[-2] // chunk_size))

        def chunk(words_gradient, xs):
            xs = jax.tree.map(lambda x: _all_gather(x, cut), xs)
            h, ref_h, of_kl, target, z, h_entropy, g_logprob, g_entropy = xs
            logits = _logits(h, words, temperature, entries)
            probabilities = jnp.exp(logits - z[..., None])
            chosen = lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1) == target[..., None] - first
            # ∂ log p_target / ∂ logits = 1[target] − p;  ∂ H / ∂ logits = −p (log p + H)
            g_logits = jnp.where(chosen, g_logprob[..., None], 0) - probabilities * g_logprob[..., None]
            if entropy:
                surprise = logits - z[..., None] + h_entropy[..., None]
                g_logits -= g_entropy[..., None] * probabilities * surprise
            if of_kl is not None:
                ref_z, reverse, g_reverse, g_forward = (x[..., None] for x in of_kl)
                ref_logprobs = _logits(ref_h, ref_words, temperature, entries) - ref_z
                log_ratio = logits - z[..., None] - ref_logprobs
                g_logits += g_reverse * probabilities * (log_ratio - reverse)
                g_logits += g_forward * (probabilities - jnp.exp(ref_logprobs))
            g_logits /= temperature
            g_hidden = jnp.einsum("...v,vd->...d", g_logits, words, preferred_element_type=accumulate)
            return words_gradient + _outer(g_logits, h, accumulate), _reduce_scatter(g_hidden, cut).astype(hidden.dtype)

        both = jax.tree.map(lambda x: _split(x, chunks, -2), (hidden, ref_hidden))
        xs = (*both, *jax.tree.map(lambda x: _split(x, chunks, -1), per_token))
        g_words, g_hidden = _scan(chunk, jnp.zeros(words.shape, accumulate), xs, used)
        g_words = _psum_tokens(g_words, cut).astype(head.dtype)
        # A barrier on both: without it, XLA:TPU keeps the head's sum in f32 until the gradients of all layers are done.
        g_hidden, g_words = lax.optimization_barrier((g_hidden, g_words))
        return _join(g_hidden, hidden.shape, axis=-2), _head_shard(g_words, head, cut)

    g_logprobs, g_entropies, g_known = cotangents
    of_kl = None if known is None else (known[3], known[1], *g_known[1:])  # the reference's log-probs are constants
    per_token = (of_kl, targets, normalizer, entropies, g_logprobs, g_entropies if entropy else None)
    *outputs, spec = _specs(cut)
    of_reference = None if reference is None else tuple(outputs)
    inputs = (*outputs, _SCALAR, of_reference, *jax.tree.map(lambda _: spec, per_token))
    gradients = _on_mesh(local, cut, inputs, tuple(outputs))(hidden, head, used, reference, *per_token)
    return *gradients, None, None, None


_token_numbers.defvjp(_forward, _backward)


def _accumulator(hidden, head):
    return jnp.promote_types(jnp.promote_types(hidden.dtype, head.dtype), jnp.float32)


def _outer(g_logits, h, accumulate):
    """Σ over tokens of g_logits ⊗ h, f[V, D]. XLA:CPU copies the left factor: there it is `h`, which is smaller."""
    of = functools.partial(jnp.einsum, preferred_element_type=accumulate)
    return lax.platform_dependent(
        g_logits,
        h,
        cpu=lambda g, h: of("...d,...v->dv", h, g).T,
        default=lambda g, h: of("...v,...d->vd", g, h),
    )


def _normalizer(logits, cut):
    peak = logits.max(-1)
    if cut is not None:
        peak = lax.pmax(peak, (*cut.vocab, *cut.width))
    return peak + jnp.log(_psum(jnp.exp(logits - peak[..., None]).sum(-1), cut))


def _logits(hidden, words, temperature, entries):
    logits = jnp.einsum("...d,vd->...v", hidden, words, preferred_element_type=_accumulator(hidden, words))
    logits /= temperature
    if isinstance(entries, int) and entries == words.shape[0]:
        return logits
    return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < entries, logits, _ABSENT)


def _scan(chunk, carry, xs, used):
    """`lax.scan(chunk, carry, xs)`. If there are several chunks, a chunk without one of the first `used` positions is
    left out, and its outputs are 0."""
    chunks, size = jax.tree.leaves(xs)[-1].shape[0], jax.tree.leaves(xs)[-1].shape[-1]
    if used is None or chunks == 1:
        return lax.scan(chunk, carry, xs)

    def body(i, state):
        carry, outputs = state
        carry, own = chunk(carry, jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), xs))
        return carry, jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, i, 0), outputs, own)

    first = jax.tree.map(lambda x: x[0], xs)
    shapes = jax.eval_shape(chunk, carry, first)[1]
    outputs = jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), shapes)
    return lax.fori_loop(0, jnp.minimum(-(-used // size), chunks), body, (carry, outputs))


# Arrays on a mesh. Tokens are [rows, chunk, ...] on one device and [devices, rows, chunk, ...] after `_all_gather`.
# Without a cut every function here is the identity.


def _specs(cut):
    """The partitions of the hidden states, of the head and of arrays with one number a token."""
    if cut is None:
        return None, None, None
    rows, positions, vocab, width = (axes or None for axes in cut[1:])
    return PartitionSpec(rows, positions, None), PartitionSpec(vocab, width), PartitionSpec(rows, positions)


def _on_mesh(function, cut, in_specs, out_specs):
    if cut is None:
        return function
    # check_vma off: JAX's types do not show that `_psum` and `_shard` give equal values on all devices.
    return jax.shard_map(function, mesh=cut.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _vocab_shard(head, cut):
    """This device's vocabulary entries [v, D], the index of the first entry, and the number of real entries."""
    if cut is None:
        return head, 0, head.shape[0]
    entries, parts = head.shape[0], math.prod(cut.mesh.shape[axis] for axis in cut.width)
    each = -(-entries // parts)
    first = lax.axis_index(cut.vocab) * entries
    if cut.width:
        head = jnp.pad(head, ((0, each * parts - entries), (0, 0)))
        head = lax.all_to_all(head, cut.width, split_axis=0, concat_axis=1, tiled=True)
    own = lax.axis_index(cut.width) * each
    held = each if each * parts == entries else jnp.clip(entries - own, 0, each)
    return head, first + own, held


def _reference_shard(reference, cut):
    """The reference's hidden states and this device's entries of its head; a pair of None without a reference."""
    return (None, None) if reference is None else (reference[0], _vocab_shard(reference[1], cut)[0])


def _psum_tokens(gradient, cut):
    """The sum over the devices whose tokens `_all_gather` has not brought together."""
    others = () if cut is None else tuple(axis for axis in (*cut.rows, *cut.positions) if axis not in cut.width)
    return lax.psum(gradient, others) if others else gradient


def _head_shard(gradient, head, cut):
    """The gradient of this device's shard of `head`: the inverse of `_vocab_shard`."""
    if cut is not None and cut.width:
        gradient = lax.all_to_all(gradient, cut.width, split_axis=1, concat_axis=0, tiled=True)
    return gradient[: head.shape[0]]


def _all_gather(x, cut):
    return x if cut is None or not cut.width else lax.all_gather(x, cut.width)


def _shard(x, cut):
    """This device's tokens: the inverse of `_all_gather`."""
    return x if cut is None or not cut.width else x[lax.axis_index(cut.width)]


def _reduce_scatter(x, cut):
    """The sum over the devices that share the vocabulary; each device keeps the sums of its own tokens."""
    if cut is not None and cut.width:
        x = lax.psum_scatter(x, cut.width)
    return x if cut is None or not cut.vocab else lax.psum(x, cut.vocab)


def _psum(x, cut):
    return x if cut is None else lax.psum(x, (*cut.vocab, *cut.width))


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
