"""A decoder: forward pass for training, prefill and decode for sampling, with one set of weights."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rpg_jax.models.attention import attention, decode_attention, extend_attention, layer_attention
from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.kv_cache import KVCache
from rpg_jax.models.layers import Block, rms_norm, rope_tables
from rpg_jax.models.logical import constrain, platform
from rpg_jax.models.projections import lookup
from rpg_jax.models.weights import Declare

Params = dict[str, Any]

_ONCE = {"xla_backend_optimization_level": 1}
"""XLA options of a program that runs once: on a CPU it compiles in a third of the time, with the same numbers."""

_UNROLLED = 8
"""The most layers that decoding on a CPU does not scan. A scan copies the weights and the cache of each layer."""

REMAT: dict[str, Callable | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""The values of a layer that the forward pass keeps: all, the matrix products, the input, or the input on the host."""


class Decoder(nnx.Module):
    """Maps token ids to the hidden states after the final norm. `init` and `abstract` make it.

    Layers are stacked [L, ...] and scanned, so that compile time does not grow with L. Weights are drawn by `seed` in
    `param_dtype`. Activations are in `compute_dtype`, and weights are cast to it where they are used. Norms, softmax
    and rotations are f32. Programs that call the model enter `full_precision`. The platform chooses how tokens attend.
    Raises ValueError if `REMAT` lacks `remat`.
    """

    def __init__(self, config: DecoderConfig, seed, param_dtype, compute_dtype, remat: str):
        if remat not in REMAT:
            raise ValueError(f"unknown remat policy {remat!r}; known: {', '.join(REMAT)}")
        self.config, self.compute_dtype, self.remat = config, jnp.dtype(compute_dtype), remat
        V, D = config.vocab_size, config.embed_dim
        keys = (jax.random.fold_in(jax.random.key(seed), i) for i in itertools.count())  # nnx.Rngs traces slowly
        declare = Declare(keys, param_dtype)
        self.embed = declare.matrix((V, D), ("vocab", "embed"), fan_in=D)
        self.layers = Block(config, Declare(keys, param_dtype, stack=config.num_layers))
        self.final_norm = declare.constant(1.0, (D,), ("norm",))
        if not config.tie_embeddings:
            self.lm_head = declare.matrix((V, D), ("vocab", "embed"), fan_in=D)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        axes: tuple[str | None, str | None] = ("batch", "length"),
        experts: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the hidden states [B, T, D], in the compute dtype, of tokens i32[B, T].

        Args:
          positions: i32[B, T], from 0 in a segment; from the prompt's length in a completion that shares its prompt.
          segment_ids: i32[B, T], 0 for padding. A token attends to itself, the earlier tokens of its segment and its
            prompt; the id of a prompt that completions share is their id modulo `types.BRANCH`.
          axes: the logical names of B and T.
          experts: ints [B, T, L, k], the k experts of each token in each layer; None: the routers choose.
        """
        return self._forward(tokens, positions, segment_ids, axes, experts)[0]

    def routed(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, experts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Takes a training batch through the model: tokens, positions and segment ids i32[B, T], and `experts`, ints
        [B, T, L, k] in place of the routers' choice (None: the routers choose). Returns hidden states [B, T, D], and
        the k experts of every token in every layer, [B, T, L, k] in `Experts.dtype`, or None in a dense model."""
        axes = ("batch", "length")
        hidden, _, used = self._forward(tokens, positions, segment_ids, axes, experts, keep_experts=True)
        return hidden, None if used is None else self._numbered(used)

    def prefill(
        self, tokens: jax.Array, lengths: jax.Array, *, keep_experts: bool = False
    ) -> tuple[jax.Array, KVCache, jax.Array | None]:
        """Runs a forward pass over B prompts, `tokens` i32[B, T], right-padded, of `lengths` i32[B], each at least 1.
        Returns hidden states [B, D] at each prompt's last token; a stacked cache of B slots and capacity T with the
        prompts' tokens; and with `keep_experts` in a mixture the experts [B, T, L, k] in `Experts.dtype`, else None."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
        how = {"keep_kv": True, "keep_experts": keep_experts}
        hidden, (k, v), experts = self._forward(tokens, positions, segment_ids, (None, None), **how)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        cache = KVCache(k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4), lengths.astype(jnp.int32))
        return last, cache, None if experts is None else self._numbered(experts)

    def extend(
        self, tokens: jax.Array, lengths: jax.Array, cache: KVCache, slots: jax.Array, starts: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """Continues P slots of a cache by several tokens each. Returns hidden states [P, D] at the last new token of
        each row, which mean nothing for length 0, and the cache with the new tokens. Experts are not recorded.

        Args:
          tokens: i32[P, T], right-padded. A token attends to itself and to all tokens before it in its slot.
          lengths: i32[P], the number of new tokens of each row; 0 writes nothing.
          cache: a stacked cache, of capacity T at least. Its `lengths` are not read and stay: the caller sets them.
          slots, starts: i32[P], the slot of each row, and the number of the slot's tokens so far.
        """
        x, k, v, _ = self._over_cache(tokens, starts, extend_attention(cache, slots, starts), (None, None))
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        chunk = KVCache(k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4), lengths)
        return last, cache.extend(chunk, slots, starts)

    def decode(
        self,
        tokens: jax.Array,
        cache: KVCache,
        *,
        attend_length: int | None = None,
        active: jax.Array | None = None,
        layers: Sequence[Params] | None = None,
    ) -> tuple[jax.Array, KVCache, jax.Array | None]:
        """Takes one new token per slot, `tokens` i32[S], through the model. Slots are independent.

        Token s is written at cache.lengths[s] and attends to itself and to all tokens before it. Every length grows by
        1. Full and inactive slots keep their entries, and their hidden states mean nothing. Returns hidden states [S,
        D] of the new tokens, the cache, and the tokens' k experts [S, L, k] in `Experts.dtype`, or None in a dense
        model. Raises ValueError unless 0 < attend_length <= capacity.

        Args:
          attend_length: static; the caller promises that no slot has more tokens, and no more are read. None: all are.
          active: bool[S]; a slot outside this mask keeps its entries. None: all slots are active.
          layers: the result of `unstacked_layers`, for an unstacked cache. The layers are then not scanned, and
            `attend_length` counts the new token, too.
        """
        limit = cache.capacity if attend_length is None else attend_length
        if not 0 < limit <= cache.capacity:
            raise ValueError(f"attend_length {limit} must be in 1..{cache.capacity}, the cache's capacity")
        if layers is not None:
            x, cache, experts = self._decode_unrolled(tokens, layers, cache, limit, active)
        else:
            ragged = platform() == "tpu"
            attend_slot = decode_attention(cache, attend_length=limit, ragged=ragged)

            def attend(q, k, v, layer):
                return attend_slot(q[:, 0], k[:, 0], v[:, 0], layer)[:, None]

            x, k, v, experts = self._over_cache(tokens[:, None], cache.lengths, attend, ("slots", None))
            cache = cache.append(k[:, :, 0], v[:, :, 0], active=active, ragged=ragged)
        return x[:, 0], cache, None if experts is None else self._numbered(experts)[:, 0]

    def _over_cache(self, tokens: jax.Array, starts: jax.Array, attend: Callable, axes):
        """Returns hidden states [B, T, D], k and v [L, B, T, K, H], and experts i32[L, B, T, k] or None, of new tokens
        i32[B, T], which follow the `starts` i32[B] tokens of a cache. `attend` is a function of (q, k, v, layer)."""
        table = rope_tables(self.config, starts[:, None] + jnp.arange(tokens.shape[1]))
        graphdef, weights = nnx.split(self.layers)

        def layer(x, inputs):
            weights, index = inputs
            x, *kept = nnx.merge(graphdef, weights)(x, table, lambda q, k, v: attend(q, k, v, index), axes)
            return x, kept

        # The cache is only read inside the scan; carrying it would copy it at every layer.
        x, kept = jax.lax.scan(layer, self._embed(tokens, axes), (weights, jnp.arange(self.config.num_layers)))
        return self._final(x), *kept

    def _decode_unrolled(
        self, tokens: jax.Array, layers: Sequence[Params], cache: KVCache, limit: int, active: jax.Array | None
    ) -> tuple[jax.Array, KVCache, jax.Array | None]:
        """Makes the step of `decode` with an unstacked cache. Returns hidden states [S, 1, D], the cache, and experts
        i32[L, S, 1, k] or None. Each layer's cache is written before it is read: XLA would copy it otherwise."""
        axes, table = ("slots", None), rope_tables(self.config, cache.lengths[:, None])
        graphdef, held, chosen = nnx.graphdef(self.layers), [], []
        x = self._embed(tokens[:, None], axes)
        for i, weights in enumerate(layers):

            def attend(q, k, v, i=i):
                keys, values = cache.append_to_layer(i, k[:, 0], v[:, 0], active=active)
                held.append((keys, values))
                return layer_attention(q[:, 0], keys[..., :limit], values[..., :limit, :], cache.lengths + 1)[:, None]

            x, *_, experts = nnx.merge(graphdef, weights)(x, table, attend, axes)
            chosen.append(experts)
        keys, values = zip(*held, strict=True)
        cache = replace(cache, keys=keys, values=values, lengths=cache.lengths + 1)
        return self._final(x), cache, jnp.stack(chosen) if self.config.experts else None

    def decodes_unrolled(self, *, int8_kv: bool) -> bool:
        """Whether a loop over tokens is faster with `unstacked_layers` and an unstacked cache: on CPUs, for at most 8
        layers, unless the cache is int8 (`int8_kv`)."""
        return platform() == "cpu" and self.config.num_layers <= _UNROLLED and not int8_kv

    def unstacked_layers(self) -> list[Params]:
        """Slices the weights: returns an `nnx.State` for each layer. Call it outside the loop over tokens."""
        weights = nnx.state(self.layers)
        return [jax.tree.map(lambda x, i=i: x[i], weights) for i in range(self.config.num_layers)]

    def full_precision(self) -> contextlib.AbstractContextManager:
        """Returns a context in which products of float32 matrices are exact to float32, if this model computes in
        float32. By default a TPU rounds the factors to bfloat16, and a GPU with TF32 to TF32. Enter the context around
        a whole program, because the products of the gradient are traced after the forward pass."""
        exact = self.compute_dtype == jnp.float32
        return jax.default_matmul_precision("highest") if exact else contextlib.nullcontext()

    def head(self) -> jax.Array:
        """Returns the output head [V, D], the embedding if tied, in the compute dtype; logits are hidden · headᵀ."""
        weight = self.embed if self.config.tie_embeddings else self.lm_head
        return weight[...].astype(self.compute_dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits f32[..., V] of the next token from hidden states [..., D]."""
        return jnp.einsum("...d,vd->...v", hidden, self.head(), preferred_element_type=jnp.float32)

    def _embed(self, tokens: jax.Array, axes) -> jax.Array:
        return constrain(lookup(self.embed[...], tokens, axes, self.compute_dtype), *axes, None)

    def _final(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps)

    def _numbered(self, experts: jax.Array) -> jax.Array:
        """Returns the experts i32[L, B, T, k] as [B, T, L, k], in `Experts.dtype`."""
        assert self.config.experts is not None
        return jnp.moveaxis(experts, 0, 2).astype(self.config.experts.dtype)

    def _forward(
        self, tokens, positions, segment_ids, axes, experts=None, *, keep_kv: bool = False, keep_experts: bool = False
    ):
        """Returns hidden states [B, T, D]; with `keep_kv` k and v [L, B, T, K, H], else None; and with `keep_experts`
        in a mixture the experts i32[L, B, T, k], else None."""
        table = rope_tables(self.config, positions)
        graphdef, weights = nnx.split(self.layers)

        def attend(q, k, v):
            return attention(q, k, v, segment_ids, axes=axes)

        def layer(x, inputs):
            weights, recorded = inputs
            x = checkpoint_name(x, "layer_input")
            x, k, v, used = nnx.merge(graphdef, weights)(x, table, attend, axes, recorded)
            return x, ((k, v) if keep_kv else None, used if keep_experts else None)

        if REMAT[self.remat] is not None and not keep_kv:
            layer = jax.checkpoint(layer, policy=REMAT[self.remat], prevent_cse=False)
        inputs = weights, None if experts is None else jnp.moveaxis(experts, 2, 0)
        x, (kv, used) = jax.lax.scan(layer, self._embed(tokens, axes), inputs)
        return self._final(x), kv, used


def abstract(
    config: DecoderConfig, param_dtype=jnp.float32, *, compute_dtype=jnp.float32, remat="none"
) -> tuple[nnx.GraphDef, Params]:
    """Returns the graphdef and params that `init` returns for these arguments, with a ShapeDtypeStruct in place of
    every array. Computes nothing. Raises ValueError for an unknown `remat`."""
    module = nnx.eval_shape(lambda: Decoder(config, 0, param_dtype, compute_dtype, remat))
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)


def logical_axes(config: DecoderConfig) -> Params:
    """Returns a model's params, a nested dict, with a tuple in place of each array: its dimensions' logical names."""
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, 0, jnp.float32, jnp.float32, "none")), nnx.Param)
    axes = jax.tree.map(lambda p: p.get_metadata("axes"), state, is_leaf=lambda x: isinstance(x, nnx.Param))
    return nnx.to_pure_dict(axes)


def init(
    config: DecoderConfig,
    *,
    seed: int = 0,
    param_dtype=jnp.float32,
    compute_dtype=jnp.float32,
    remat: str = "none",
    shardings: Params | None = None,
) -> tuple[nnx.GraphDef, Params]:
    """Draws a model: `nnx.merge(graphdef, params)` is the module, `params` a nested dict of arrays. Raises ValueError
    for an unknown `remat`.

    Args:
      seed: the weights depend on `seed`, `config` and `param_dtype` only.
      compute_dtype: dtype of activations and of the weights where they are used, bfloat16 or float32.
      remat: a name in `REMAT`, what the forward pass keeps for the backward pass.
      shardings: a tree of shardings like `params`; weights are drawn directly into it. None: on the default device.
    """
    graphdef, _ = abstract(config, param_dtype, compute_dtype=compute_dtype, remat=remat)
    options = _ONCE if platform() == "cpu" else None
    draw = jax.jit(_draw, static_argnums=(1, 2), out_shardings=shardings, compiler_options=options)
    return graphdef, draw(seed, config, param_dtype)


def _draw(seed: jax.Array, config: DecoderConfig, param_dtype) -> Params:
    return nnx.to_pure_dict(nnx.state(Decoder(config, seed, param_dtype, jnp.float32, "none"), nnx.Param))
