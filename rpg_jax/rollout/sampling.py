"""Draws one token per slot from logits, and gives its log-probability under the distribution that was sampled.

Every function here is pure: it knows no slot number, batch size or mutable key. So equal logits and counters give equal
tokens, in any slot and beside any other completion.
"""

import jax
import jax.numpy as jnp

# Initialisation and shuffling share the seed: this number keeps their random numbers apart from those of rollouts.
PURPOSE = 0x5A3F1E


def completion_keys(seed: jax.Array, step: jax.Array, prompt_id: jax.Array, index: jax.Array) -> jax.Array:
    """Key of completion `index` of a prompt: fold_in over (seed, purpose, step, prompt_id, index).

    Each argument is u32[S]. Returns raw threefry keys u32[S, 2]; `token_keys` folds in the token position.
    """

    def chain(seed, *counters):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), PURPOSE)
        for counter in counters:
            key = jax.random.fold_in(key, counter)
        return jax.random.key_data(key)

    return jax.vmap(chain)(seed, step, prompt_id, index)


def token_keys(keys: jax.Array, position: jax.Array) -> jax.Array:
    """Typed keys [S] for the completion tokens at `position` i32[S] (0 is the first) from raw keys u32[S, 2]."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), position)


def sample(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token per slot from softmax(logits / temperature), cut to top-k, nucleus and min-p, renormalised.

    The nucleus is the smallest set of most probable tokens whose mass, under the distribution that top-k left, reaches
    `top_p`. It includes tokens that tie with its least probable token. Min-p keeps tokens of at least `min_p` times the
    highest probability (arXiv:2407.01082). Temperature 0 takes the most probable token (the first of equals) and
    ignores all cuts.

    Args:
      logits: f32[S, V].
      keys: typed keys [S], from `token_keys`.
      temperature: f32[S], 0 for greedy.
      top_p: f32[S] in (0, 1]; 1 is off.
      top_k: i32[S]; 0 is off.
      min_p: f32[S] in [0, 1]; 0 is off.

    Returns:
      tokens i32[S]; logprobs f32[S] in nats, of the renormalised distribution; 0 where temperature is 0.

    The vocabulary is never sorted: the cuts are found by bisection, and only if some slot asks for a cut.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    cut = ((top_p < 1) | (top_k > 0) | (min_p > 0)) & ~greedy
    floor = jax.lax.cond(
        cut.any(),
        lambda: jnp.where(cut, _smallest_kept(scaled, top_p, top_k, min_p), -jnp.inf),
        lambda: jnp.full(cut.shape, -jnp.inf),
    )
    kept = jnp.where(scaled >= floor[:, None], scaled, -jnp.inf)
    return _draw(kept, keys, greedy)


def _draw(logits: jax.Array, keys: jax.Array, greedy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gumbel-max in two stages: a block of the vocabulary by its mass, then a token within it.

    This is exact and takes about 2·√V random numbers a slot instead of V. At V = 151,936, V random numbers cost more
    than the head's matrix product; the cost of 2·√V is too small to measure.
    """
    slots, vocabulary = logits.shape
    width = 1 << (max(vocabulary - 1, 1).bit_length() + 1) // 2
    blocks = -(-vocabulary // width)
    padded = jnp.pad(logits, ((0, 0), (0, blocks * width - vocabulary)), constant_values=-jnp.inf)
    tiled = padded.reshape(slots, blocks, width)
    peak = tiled.max(-1)
    origin = jnp.where(jnp.isfinite(peak), peak, 0.0)
    mass = jnp.log(jnp.exp(tiled - origin[..., None]).sum(-1)) + origin
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,), jnp.float32))(keys)

    def pick(score, sure, offset):
        drawn = score + noise[:, offset : offset + score.shape[-1]]
        return jnp.argmax(jnp.where(greedy[:, None], sure, drawn), -1).astype(jnp.int32)

    block = pick(mass, peak, 0)
    within = jnp.take_along_axis(tiled, block[:, None, None], axis=1)[:, 0]
    offset = pick(within, within, blocks)
    logprob = jnp.take_along_axis(within, offset[:, None], axis=1)[:, 0] - jax.nn.logsumexp(mass, axis=-1)
    return block * width + offset, jnp.where(greedy, 0.0, jnp.minimum(logprob, 0.0))


def _smallest_kept(logits: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array) -> jax.Array:
    """The threshold f32[S] of each slot's logits f32[S, V]: sampling keeps the logits at or above the threshold.

    The threshold is the highest of three: top-k's, top-p's over the renormalised tokens of top-k, and min-p's, which
    is the largest logit plus log(min_p). It is at most the largest logit, so sampling keeps a token.
    """
    order, vocabulary = _ordered(logits), logits.shape[-1]
    kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    kth = _largest_reaching(order, jnp.ones_like(logits), kept)
    probs = jax.nn.softmax(jnp.where(order >= kth[:, None], logits, -jnp.inf), axis=-1)
    nucleus = jnp.where(top_p < 1, _largest_reaching(order, probs, top_p), 0)
    nucleus = jnp.minimum(nucleus, order.max(-1))  # a top_p that is 0 in f32 is reached by no token at all
    return jnp.maximum(_unordered(jnp.maximum(kth, nucleus)), logits.max(-1) + jnp.log(min_p))


def _largest_reaching(order: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Largest t u32[S] such that the weights of the entries with order >= t sum to at least `target`; else 0."""

    def set_bit(i, t):
        candidate = t | jnp.left_shift(jnp.uint32(1), jnp.uint32(31 - i))
        reached = jnp.where(order >= candidate[:, None], weights, 0.0).sum(-1) >= target
        return jnp.where(reached, candidate, t)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(order.shape[0], jnp.uint32))


def _ordered(x: jax.Array) -> jax.Array:
    """Bit patterns of f32 as u32 in the same order as the numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unordered(order: jax.Array) -> jax.Array:
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(1 << 31), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
