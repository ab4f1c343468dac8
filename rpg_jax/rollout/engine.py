"""The engine of the local drivers: prefill, insert, generate and extend over a fixed set of slots.

A slot holds one completion at a time. `prefill` computes a prompt's cache once. `insert` copies the cache into a slot,
with the completion's key and sampling parameters. `generate` draws tokens until the slot's own stop rule holds.
`extend` appends an environment's tokens; then the slot draws on. No completion depends on its slot or on other slots.

With n threads, slot s is slot s // n of thread s % n. Each thread has its own decode state and launches its own
programs. On a CPU, XLA runs the programs of one thread one after the other, so more threads use more cores."""

import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax import parallel
from rpg_jax.models import DecoderConfig
from rpg_jax.models.logical import constrain, platform
from rpg_jax.rollout.decode_state import DecodeResult, DecodeState, Extension, Extensions, Insertion, Insertions, Prefix
from rpg_jax.rollout.decoding import Decoding, attention_bucket, prompt_bucket, token_keys
from rpg_jax.rollout.weights import Weights

State = tuple[DecodeState, ...]
"""The decode state of each thread."""

TOP_TOKENS = 20
"""The number of most probable tokens that `DecodeEngine.score` gives at each place."""
_SCORED_TOGETHER = 128  # positions whose logits exist at one time


class Scores(NamedTuple):
    """The model's own log-probabilities, in nats, of the T tokens of a text, at temperature 1 and without truncation.
    Entry t is of token t given tokens 0 to t - 1. Entry 0 has no meaning, because no token precedes token 0.

    Attributes:
      logprobs: f32[T], of the text's tokens.
      top_logprobs, top_ids: f32[T, K] and i32[T, K], the K most probable tokens of each place, the best first.
    """

    logprobs: Any
    top_logprobs: Any
    top_ids: Any


class DecodeEngine:
    """A model, its weights, and the compiled programs that decode with the weights. The caller owns the decode state.

    The state is donated to each method that returns a new state: the arrays of the old state must not be used again.
    The constructor raises ValueError if the mesh does not divide the slots or the heads.

    Args:
      config, graphdef: of the model; `nnx.merge(graphdef, params)` gives the module.
      weights: every dispatch reads the current params from this object.
      decoding: the number of slots, their capacity, and the devices.
    """

    def __init__(self, config: DecoderConfig, graphdef: nnx.GraphDef, weights: Weights, decoding: Decoding):
        self.config, self.graphdef, self.weights, self.decoding = config, graphdef, weights, decoding
        with weights.pinned() as params, self._scope():
            module = nnx.merge(graphdef, params)
            dtype, self._ragged = module.compute_dtype, platform() == "tpu"
            unrolled = module.decodes_unrolled(int8_kv=decoding.int8_kv)
            rules, how = tuple(decoding.rules.items()), (dtype, decoding.int8_kv, decoding.record_experts, unrolled)
            sizes = decoding.slots // decoding.threads, decoding.capacity, decoding.steps_per_dispatch
            self._programs = _programs(config, graphdef, *sizes, *how, decoding.mesh, rules)
        self._threads = [ThreadPoolExecutor(1, f"rpg-decode-{i}") for i in range(decoding.threads)]
        self._split: tuple[Any, Any] = None, None  # weights, and the arrays of each of their layers

    def init_decode_state(self) -> State:
        """Allocates the decode state in which all slots are free."""
        with self.weights.lock, self._scope():
            return tuple(self._programs.init() for _ in self._threads)

    def prefill(self, *, tokens: np.ndarray, lengths: np.ndarray) -> Prefix:
        """Computes the `Prefix` of P prompts by one forward pass, without waiting for it. `tokens` i32[P, T] are padded
        on the right; `lengths` i32[P], each at least 1, do not count the padding."""
        with self.weights.pinned() as params, self._scope():
            return self._programs.prefill(params, tokens, lengths)

    def insert(self, prefix: Prefix, state: State, rows: Sequence[Insertion]) -> State:
        """Copies the rows of `prefix` that `rows` names into slots, which become active. Returns the new state."""
        with self.weights.lock, self._scope():
            return tuple(
                self._programs.insert(one, prefix, Insertions.of(share, self._places)) if share else one
                for one, share in zip(state, self._by_thread(rows), strict=True)
            )

    def extend(self, state: State, rows: Sequence[Extension], shape: tuple[int, int]) -> State:
        """Appends an environment's tokens to slots that are not active. Returns the new state. Each thread reads its
        rows in one forward pass of `shape` (rows, tokens of each), which has room for them; the rest is padding."""
        with self.weights.pinned() as params, self._scope():
            return tuple(
                self._programs.extend(params, one, Extensions.of(share, self._places, shape)) if share else one
                for one, share in zip(state, self._by_thread(rows), strict=True)
            )

    def generate(
        self, state: State, *, idle: int | None = None, attend_length: int | None = None
    ) -> tuple[State, Sequence[DecodeResult]]:
        """Draws up to `decoding.steps_per_dispatch` tokens for each active slot, in one dispatch. Returns the new state
        (`state` is donated), and each thread's result, on the devices. `fetch` waits for the results; this call need
        not.

        Args:
          idle: the dispatch ends as soon as so many slots have become idle in it, so that they can be refilled. With n
            threads, each ends after idle // n of its slots, at least one. None: a thread ends with its last slot.
          attend_length: the caller promises that at the end of the dispatch no prompt with its completion has more
            tokens. None is the capacity. Each power of two is compiled once.
        """
        attend = self.decoding.capacity
        if attend_length is not None and not self._ragged:  # the ragged kernel reads only what each slot has filled
            attend = attention_bucket(attend_length, attend)
        with self.weights.pinned() as params:
            share = np.int32(self._places if idle is None else max(1, idle // len(self._threads)))
            layers = self._layers(params)

            def launch(one: DecodeState) -> tuple[DecodeState, DecodeResult]:
                with self._scope():
                    return self._programs.generate(params, layers, one, share, attend)

            if len(state) == 1:
                results = [launch(*state)]
            else:
                running = [thread.submit(launch, one) for thread, one in zip(self._threads, state, strict=True)]
                results = [future.result() for future in running]
        return tuple(state for state, _ in results), [drawn for _, drawn in results]

    def release(self, state: State, slots: Sequence[int]) -> State:
        """Makes `slots` inactive, because the caller has cancelled their completions. Returns the new state."""
        mask = np.zeros(self.decoding.slots, bool)
        mask[slots] = True
        with self.weights.lock, self._scope():
            return tuple(self._programs.stop(one, mask[i :: len(state)]) for i, one in enumerate(state))

    def fetch(self, drawn: Sequence[DecodeResult]) -> DecodeResult:
        """Waits for the results of a dispatch, one of each thread, and returns one result of all slots on the host, as
        numpy arrays. Steps in which no slot drew a token are left out."""
        parts = jax.device_get(drawn)  # [S / n, …] of each thread
        merged = jax.tree.map(lambda *arrays: np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:]), *parts)
        taken = int(merged.counts.max())
        by_step = {name: getattr(merged, name) for name in ("tokens", "logprobs", "experts")}
        return replace(merged, **{name: None if x is None else x[:, :taken] for name, x in by_step.items()})

    def score(self, tokens: np.ndarray) -> Scores:
        """Returns the scores of a text's tokens i32[T], all in the vocabulary, as numpy arrays with K = `TOP_TOKENS` or
        the size of a smaller vocabulary. Blocks. Raises ValueError if T is above the capacity of a slot."""
        padded = np.zeros(prompt_bucket(len(tokens), self.decoding.capacity), np.int32)
        padded[: len(tokens)] = tokens
        with self.weights.pinned() as params, self._scope():
            scores = self._programs.score(params, padded, np.int32(len(tokens)))
        return jax.tree.map(lambda x: np.roll(x, 1, axis=0)[: len(tokens)], jax.device_get(scores))

    def lower(self, prompts: int, length: int) -> dict[str, jax.stages.Lowered]:
        """Returns the lowered programs {"prefill": for `prompts` prompts of `length` tokens, "decode": over a full
        cache}. Nothing runs or is compiled. The engine's weights may be ShapeDtypeStructs."""
        mesh = self.decoding.mesh
        sharding = None if mesh is None else jax.NamedSharding(mesh, jax.P())
        tokens = jax.ShapeDtypeStruct((prompts, length), jnp.int32, sharding=sharding)
        lengths = jax.ShapeDtypeStruct((prompts,), jnp.int32, sharding=sharding)
        with self.weights.pinned() as params, self._scope():
            layers = self._programs.split and jax.eval_shape(self._programs.split, params)
            state, idle = self._programs.state_shapes, np.int32(1)
            return {
                "prefill": self._programs.prefill.lower(params, tokens, lengths),
                "decode": self._programs.generate.lower(params, layers, state, idle, self.decoding.capacity),
            }

    def _layers(self, params: Any) -> Any:
        """The weights of each layer in arrays of their own, for programs that do not scan the layers; else None."""
        if self._programs.split and self._split[0] is not params:
            with self._scope():
                self._split = params, self._programs.split(params)
        return self._split[1]

    @property
    def _places(self) -> int:
        """The number of slots of a thread."""
        return self.decoding.slots // self.decoding.threads

    def _by_thread(self, rows: Sequence[Any]) -> list[list[Any]]:
        """The rows of each thread. A row begins with its slot, which becomes the slot's place within the thread."""
        n = self.decoding.threads
        return [[(row[0] // n, *row[1:]) for row in rows if row[0] % n == i] for i in range(n)]

    def _scope(self) -> contextlib.AbstractContextManager:
        """A context that activates the mesh and its rules, if there is a mesh, for the calling thread."""
        mesh, rules = self.decoding.mesh, self.decoding.rules
        return contextlib.nullcontext() if mesh is None else parallel.activate(mesh, rules)


class _Programs:
    """The jitted programs of an engine, and the shapes of the state of a thread, which has `slots` slots. `split` is
    None if the layers are scanned (`unrolled` False)."""

    def __init__(
        self,
        config: DecoderConfig,
        graphdef: nnx.GraphDef,
        slots: int,
        capacity: int,
        steps: int,
        dtype: Any,
        int8_kv: bool,
        record_experts: bool,
        unrolled: bool,
        mesh: jax.sharding.Mesh | None,
        rules: tuple[tuple[str, Any], ...],
    ):
        sizes = slots, capacity, dtype
        empty = functools.partial(DecodeState.empty, config, *sizes, int8_kv=int8_kv, unstacked=unrolled)
        state, drawn, shapes = None, None, jax.eval_shape(empty)
        if mesh is not None:
            state = parallel.shardings(shapes.logical_axes, shapes, mesh, dict(rules))
            drawn = jax.NamedSharding(mesh, jax.P())
            shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state)
        generate = functools.partial(_decode_steps, graphdef, steps, record_experts)
        self.state_shapes = shapes
        self.init = jax.jit(empty, out_shardings=state)
        self.prefill = jax.jit(functools.partial(_prefill_prompts, graphdef, record_experts))
        self.score = jax.jit(functools.partial(_score_text, graphdef), out_shardings=drawn)
        self.insert = jax.jit(DecodeState.insert, donate_argnums=0, out_shardings=state)
        self.extend = jax.jit(functools.partial(_extend_slots, graphdef), donate_argnums=1, out_shardings=state)
        self.stop = jax.jit(DecodeState.stop, donate_argnums=0, out_shardings=state)
        self.generate = jax.jit(generate, donate_argnums=2, static_argnums=4, out_shardings=(state, drawn))
        self.split = jax.jit(lambda params: nnx.merge(graphdef, params).unstacked_layers()) if unrolled else None


# Equal arguments give the same programs, so that the engines of a process trace and compile them once.
_programs = functools.lru_cache(maxsize=8)(_Programs)


def _prefill_prompts(
    graphdef: nnx.GraphDef, record: bool, params: Any, tokens: jax.Array, lengths: jax.Array
) -> Prefix:
    module = nnx.merge(graphdef, params)
    with module.full_precision():
        hidden, cache, experts = module.prefill(tokens, lengths, keep_experts=record)
    # Every host reads the experts, as it reads the result of a dispatch.
    return Prefix(hidden, cache, None if experts is None else constrain(experts, None, None, None, None))


def _score_text(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, length: jax.Array) -> Scores:
    """Returns for each place t of the tokens i32[T] the scores of token t + 1, without meaning from length - 1 on."""
    module = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.size)[None]

    def scores(inputs):
        hidden, following = inputs
        logprobs = jax.nn.log_softmax(module.logits(hidden))
        return Scores(logprobs[following], *jax.lax.top_k(logprobs, min(TOP_TOKENS, logprobs.size)))

    with module.full_precision():
        hidden = module(tokens[None], positions, (positions < length).astype(jnp.int32), axes=(None, None))
        return jax.lax.map(scores, (hidden[0], jnp.roll(tokens, -1)), batch_size=_SCORED_TOGETHER)


def _extend_slots(graphdef: nnx.GraphDef, params: Any, state: DecodeState, rows: Extensions) -> DecodeState:
    module = nnx.merge(graphdef, params)
    where = state.cache.stacked(), rows.slots, rows.starts
    with module.full_precision():
        hidden, cache = module.extend(rows.tokens, rows.lengths, *where)
    return state.continued(rows, hidden, cache.unstacked() if isinstance(state.cache.keys, tuple) else cache)


def _decode_steps(
    graphdef: nnx.GraphDef,
    steps: int,
    record: bool,
    params: Any,
    layers: Sequence[Any] | None,
    state: DecodeState,
    idle: jax.Array,
    attend_length: int,
) -> tuple[DecodeState, DecodeResult]:
    """Runs up to `steps` decode steps. Ends early when `idle` slots have become idle here, or when all slots are idle.
    `record`: whether the experts of the tokens are returned. `layers`: the result of `_Programs.split`, or None."""
    module = nnx.merge(graphdef, params)
    floor = jnp.maximum(0, state.active.sum() - idle)

    def step(carry):
        i, state, tokens, logprobs, counts, kept = carry
        drawn, logprob = state.sampling.draw(module.logits(state.hidden), token_keys(state.keys, state.emitted))
        emitted = state.emitted + state.active
        how = {"attend_length": attend_length, "active": state.active, "layers": layers}
        hidden, cache, experts = module.decode(drawn, state.cache, **how)
        following = replace(state, cache=cache, hidden=hidden, emitted=emitted)
        following = following.stop(state.sampling.ends(drawn, emitted))
        tokens, logprobs = tokens.at[:, i].set(drawn), logprobs.at[:, i].set(logprob)
        kept = kept.at[:, i].set(experts) if record else None
        return i + 1, following, tokens, logprobs, counts + state.active, kept

    def unfinished(carry):
        i, state, *_ = carry
        return (i < steps) & (state.active.sum() > floor)

    blank = jnp.zeros((state.active.size, steps), jnp.int32)
    counts, kept = jnp.zeros(state.active.size, jnp.int32), None
    if record:
        own = module.config.experts
        kept = jnp.zeros((*blank.shape, module.config.num_layers, own.per_token), own.dtype)
    start = (jnp.int32(0), state, blank, blank.astype(jnp.float32), counts, kept)
    with module.full_precision():
        _, state, tokens, logprobs, counts, kept = jax.lax.while_loop(unfinished, step, start)
    return state, DecodeResult(tokens, logprobs, counts, state.active, kept)
