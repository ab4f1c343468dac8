"""How completions are decoded: slots, devices, the shapes of prefill and cache, and the draw of one token per slot.

A slot is a place of the decode engine for one completion at a time. The draw knows no slot number, batch size or
mutable key. So equal logits and counters give equal tokens, in any slot and beside any other completion."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import parallel

PREFILL_TOKENS = 2048
_SMALLEST_BUCKET = 16
_SMALLEST_ATTENTION = 128
# Initialisation and shuffling share the seed: this number keeps their random numbers apart from those of rollouts.
PURPOSE = 0x5A3F1E


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How a rollout decodes, with every driver that decodes in this process. Raises ValueError if `slots`, `capacity`,
    `threads` or `steps_per_dispatch` is below 1, if `threads` does not divide `slots`, or if several threads have a
    mesh of several devices.

    Attributes:
      slots: the number of places in the cache, one for each completion that is decoded at the same time.
      capacity: the most tokens of a slot, prompt and completion together.
      threads: threads that decode, each an equal share of the slots, on one device. A program of XLA's for CPUs seldom
        uses two cores at a time; two programs do.
      steps_per_dispatch: the most decode steps of one launched program. The host sees the tokens after each program.
      prefill_tokens: the tokens, padding included, that one forward pass over prompts should have at most. The number
        of prompts is then rounded up to a power of two, see `prefill_shape`. A longer prompt goes alone.
      refill: while completions wait for slots or replies, a dispatch ends once this share of the slots fell idle in it.
      patience_s: seconds that a completion keeps its slot for sure while its environment replies. After that a waiting
        completion may take the slot; then all tokens of the first completion are read again after the reply.
      dtype: the dtype of the decoding weights; None for the trainer's dtype.
      int8: whether the matrices of the layers are rounded to eight bits, with one scale per output channel.
      int8_kv: whether the cache keeps keys and values in eight bits, with one scale per token and head.
      record_experts: whether completions carry the experts of every token; for a mixture, and not with an environment.
      mesh: the devices that decode; None for JAX's default device. Slots and key-value heads are spread over the
        devices, and the drawn tokens are replicated. The devices may be others than the trainer's.
      rules: for each logical axis the axis of `mesh`.
      shardings: where the weights that a sync brings lie on `mesh`, as `Weights` takes it; None: as the trainer's lie.
    """

    slots: int
    capacity: int
    threads: int = 1
    steps_per_dispatch: int = 16
    prefill_tokens: int = PREFILL_TOKENS
    refill: float = 1 / 16
    patience_s: float = 0.25
    dtype: Any = None
    int8: bool = False
    int8_kv: bool = False
    record_experts: bool = False
    mesh: jax.sharding.Mesh | None = None
    rules: parallel.Rules = dataclasses.field(default_factory=lambda: parallel.RULES)
    shardings: Any = None

    def __post_init__(self):
        for name in ("slots", "capacity", "threads", "steps_per_dispatch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.slots % self.threads:
            raise ValueError(f"{self.threads} threads must divide the {self.slots} slots")
        if self.threads > 1 and self.mesh is not None and self.mesh.size > 1:
            raise ValueError(
                f"{self.threads} threads decode on one device, and the mesh has {self.mesh.size}; give one thread"
            )


def capacity(max_prompt_tokens: int, max_tokens: int) -> int:
    """Returns the tokens of a slot for the longest prompt and completion, rounded up to a multiple of 16."""
    return -(-(max_prompt_tokens + max_tokens) // 16) * 16


def prompt_bucket(length: int, capacity: int) -> int:
    """Returns the number of tokens to which a prompt of `length` tokens is padded: the next power of two, at least 16
    and at most `capacity`, the tokens of a slot. `length` is from 1 to `capacity`."""
    return min(max(_SMALLEST_BUCKET, power_of_two(length)), capacity)


def attention_bucket(length: int, capacity: int) -> int:
    """Returns the number of cache positions that a dispatch reads of each slot if no slot has more than `length`
    tokens: the next power of two, at least 128 and at most `capacity`, the tokens of a slot."""
    return min(max(_SMALLEST_ATTENTION, power_of_two(length)), capacity)


def prompts_per_prefill(bucket: int, prefill_tokens: int = PREFILL_TOKENS) -> int:
    """The most prompts, each padded to `bucket` tokens, that one forward pass of `prefill_tokens` takes; at least 1."""
    return max(1, prefill_tokens // bucket)


def prefill_shape(max_prompt_tokens: int, capacity: int, prefill_tokens: int = PREFILL_TOKENS) -> tuple[int, int]:
    """Returns the shape (prompts, tokens of each), padding included, of the largest forward pass over prompts that have
    `max_prompt_tokens`. `capacity` is the tokens of a slot. The number of prompts is rounded up to a power of two, so
    the pass may have more than `prefill_tokens`, the tokens that it should have at most."""
    bucket = prompt_bucket(max_prompt_tokens, capacity)
    return power_of_two(prompts_per_prefill(bucket, prefill_tokens)), bucket


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()


def completion_keys(seed: jax.Array, step: jax.Array, prompt_id: jax.Array, index: jax.Array) -> jax.Array:
    """Returns raw threefry keys u32[S, 2] of S completions, by fold_in over seed, `PURPOSE`, step, prompt_id and index.
    Each argument is u32[S]; `index` is the completion's number in its group, from 0."""

    def chain(seed, *counters):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), PURPOSE)
        for counter in counters:
            key = jax.random.fold_in(key, counter)
        return jax.random.key_data(key)

    return jax.vmap(chain)(seed, step, prompt_id, index)


def token_keys(keys: jax.Array, position: jax.Array) -> jax.Array:
    """Returns typed keys [S] to draw one token of each of S completions: the completion's raw key in `keys` u32[S, 2],
    from `completion_keys`, with the token's `position` i32[S] in its completion, from 0, folded in."""
    return jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), position)


def sample(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token for each of S slots from softmax(logits / temperature), cut to top-k, nucleus and min-p.

    The nucleus is the smallest set of most probable tokens whose mass, under the distribution that top-k left, reaches
    `top_p`. Min-p keeps tokens of at least `min_p` times the highest probability (arXiv:2407.01082). Top-k and nucleus
    include tokens that tie with their least probable token. Temperature 0 takes the most probable token (the first of
    equals) and ignores all cuts. The vocabulary is never sorted: bisection finds the cuts, if some slot asks for one.

    Args:
      logits: f32[S, V].
      keys: typed keys [S], from `token_keys`.
      temperature: f32[S], 0 for greedy.
      top_p: f32[S] in (0, 1]; 1 is off.
      top_k: i32[S]; 0 is off.
      min_p: f32[S] in [0, 1]; 0 is off.

    Returns:
      (tokens i32[S], log-probabilities f32[S] in nats, renormalised; 0 where temperature is 0, NaN where logits are).
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
    """Returns a token i32[S] of each row of `logits`, -inf at cut tokens, and its log-probability f32[S]: the most
    probable token and 0 or NaN where `greedy`. Elsewhere, Gumbel-max draws a block of the vocabulary by its mass, then
    a token within the block. This is exact and takes about 2·√V random numbers a slot; V random numbers would cost more
    than the head's matrix product at V = 151,936."""
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
    return block * width + offset, jnp.where(greedy & ~jnp.isnan(logprob), 0.0, jnp.minimum(logprob, 0.0))


def _smallest_kept(logits: jax.Array, top_p: jax.Array, top_k: jax.Array, min_p: jax.Array) -> jax.Array:
    """Returns a threshold f32[S] for each slot's logits f32[S, V]: sampling keeps logits at or above the threshold. The
    threshold is the highest of three: top-k's, top-p's over the renormalised tokens of top-k, and min-p's, which is the
    largest logit plus log(min_p). It is at most the largest logit, so sampling keeps a token."""
    order, vocabulary = _ordered(logits), logits.shape[-1]
    kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    kth = _largest_reaching(order, jnp.ones_like(logits), kept)
    probs = jax.nn.softmax(jnp.where(order >= kth[:, None], logits, -jnp.inf), axis=-1)
    nucleus = jnp.where(top_p < 1, _largest_reaching(order, probs, top_p), 0)
    nucleus = jnp.minimum(nucleus, order.max(-1))  # a top_p that is 0 in f32 is reached by no token at all
    return jnp.maximum(_unordered(jnp.maximum(kth, nucleus)), logits.max(-1) + jnp.log(min_p))


def _largest_reaching(order: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the largest t u32[S] such that the `weights` of entries with order >= t sum to `target` or more; or 0."""

    def set_bit(i, t):
        candidate = t | jnp.left_shift(jnp.uint32(1), jnp.uint32(31 - i))
        reached = jnp.where(order >= candidate[:, None], weights, 0.0).sum(-1) >= target
        return jnp.where(reached, candidate, t)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(order.shape[0], jnp.uint32))


def _ordered(x: jax.Array) -> jax.Array:
    """Maps each f32 to a u32 such that the integers have the order of the numbers; `_unordered` maps back."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unordered(order: jax.Array) -> jax.Array:
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(1 << 31), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
