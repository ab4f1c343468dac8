"""Imports JetStream 0.2.2 without TensorFlow, and puts JetStream's Engine interface around `DecodeEngine`.

The wheel is installed without its dependencies, because its tokenizers need TensorFlow. So this module puts stubs of
`seqio` and `tiktoken` into `sys.modules` if they are absent; neither tokenizer is ever constructed. The import replaces
JetStream's logger, its class of threads and its function that deletes arrays. No other file changes JetStream: import
`orchestrator`, `engine_api` and the rest from here. Without JetStream the import raises ModuleNotFoundError."""

import importlib.util
import logging
import sys
import threading
import types
from typing import Any

import jax
import numpy as np

from rpg_jax.rollout.decode_state import DecodeResult, Prefix
from rpg_jax.rollout.engine import DecodeEngine, State
from rpg_jax.rollout.jetstream import INSTALL
from rpg_jax.rollout.weights import Weights
from rpg_jax.types import Sampling

if importlib.util.find_spec("jetstream") is None:
    raise ModuleNotFoundError(f"JetStream is not installed: {INSTALL}", name="jetstream")


def _stub(package: str, submodule: str, **attributes) -> None:
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        return
    for name in (package, f"{package}.{submodule}"):
        sys.modules[name] = types.ModuleType(name)
    for name, value in attributes.items():
        setattr(sys.modules[f"{package}.{submodule}"], name, value)


_stub("seqio", "vocabularies", Vocabulary=object, SentencePieceVocabulary=object)
_stub("tiktoken", "load", load_tiktoken_bpe=object)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

from jetstream.core import orchestrator  # noqa: E402
from jetstream.core.metrics.prometheus import JetstreamMetricsCollector as JetstreamMetricsCollector  # noqa: E402
from jetstream.core.proto import jetstream_pb2 as jetstream_pb2  # noqa: E402
from jetstream.core.proto import jetstream_pb2_grpc as jetstream_pb2_grpc  # noqa: E402
from jetstream.engine import engine_api as engine_api  # noqa: E402
from jetstream.engine import token_utils  # noqa: E402
from jetstream.engine import tokenizer_pb2 as tokenizer_pb2  # noqa: E402

_root.handlers[:] = _handlers
_root.setLevel(_level)

# JetStream logs a record per request and decode step, at INFO on the root logger: a logger of its own can be silenced.
logger = logging.getLogger("jetstream")
logger.setLevel(logging.WARNING)
orchestrator.logging = logger
token_utils.logging = logger


class GuardedThread(threading.Thread):
    """A daemon thread that runs `target`, a `functools.partial` of a method of a `GuardedDriver`. An exception in the
    thread calls the driver's `on_fault(name, exception)`. JetStream's own class would send SIGKILL to the process.
    `daemon` is ignored: an interpreter with a running driver would never end if the thread were no daemon."""

    def __init__(self, *, target, name: str, daemon: bool = True):
        super().__init__(target=target, name=name, daemon=True)
        self._driver = target.func.__self__

    def run(self):
        try:
            super().run()
        except BaseException as fault:
            self._driver.on_fault(self.name, fault)


# The original deletes arrays that the completions of a prompt share. Reference counts free them as well.
orchestrator.delete_pytree = lambda tree: None
orchestrator.JetThread = GuardedThread


class TokenIds:
    """JetStream's interface of a tokenizer, without text and stop tokens: the engine itself ends completions."""

    stop_tokens: frozenset[int] = frozenset()
    bos_id, eos_id, pad_id = None, None, 0


class JetStreamEngine(engine_api.Engine):
    """JetStream's interface of an engine, over `engine`, which has its own weights: no method reads `params`."""

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(self, engine: DecodeEngine):
        self.engine = engine

    def load_params(self, *_args, **_kwargs) -> Weights:
        """Returns the `Weights` of the engine. Nothing is loaded, and all arguments are ignored."""
        return self.engine.weights

    def init_decode_state(self, *_args, **_kwargs) -> State:
        """Allocates the decode state in which all slots are free. All arguments are ignored."""
        return self.engine.init_decode_state()

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> Prefix:
        """Computes the `Prefix` of `padded_tokens`: right-padded prompts i32[P, T], or one prompt i32[T]. `true_length`
        is their lengths without padding, i32[P] or one number. Raises ValueError unless `existing_prefix` is None."""
        if existing_prefix is not None:
            raise ValueError("a prompt is prefilled in one piece: existing_prefix must be None")
        tokens = np.atleast_2d(np.asarray(padded_tokens, np.int32))
        return self.engine.prefill(tokens=tokens, lengths=np.atleast_1d(np.asarray(true_length, np.int32)))

    def insert(self, prefix: Prefix, decode_state: State, slot: int) -> State:
        """Copies row 0 of `prefix` into `slot`, which then decodes greedily, at most as many tokens as the slot has
        places after the padded prompt, but at least one. Returns the new state. `decode_state` is donated."""
        room = self.engine.decoding.capacity - prefix.cache.capacity
        greedy = Sampling(temperature=0.0, max_tokens=max(1, room))
        return self.engine.insert(prefix, decode_state, [(slot, 0, 0, (0, 0, 0, 0), greedy)])

    def generate(self, params, decode_state: State) -> tuple[State, engine_api.ResultTokens]:
        """Draws up to `Decoding.steps_per_dispatch` tokens for each active slot, and waits for them. Returns the new
        decode state, and the tokens as `packed` arranges them. `decode_state` is donated."""
        decode_state, drawn = self.engine.generate(decode_state)
        return decode_state, packed(self.engine.fetch(drawn))

    def get_prefix_destination_sharding(self) -> Any:
        """The sharding that replicates a prefix over the mesh; None without a mesh."""
        return None if self.mesh is None else jax.NamedSharding(self.mesh, jax.P())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """JetStream's description of a tokenizer, without a path: there is no file."""
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> TokenIds:
        """A new `TokenIds`. `metadata` is ignored."""
        return TokenIds()

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots: the most completions that are decoded together."""
        return self.engine.decoding.slots

    @property
    def max_prefill_length(self) -> int:
        """The most tokens of a prompt: the capacity of a slot."""
        return self.engine.decoding.capacity

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that decode; None for JAX's default device."""
        return self.engine.decoding.mesh


def packed(drawn: DecodeResult) -> engine_api.ResultTokens:
    """Returns a dispatch's tokens, which are on the host, in JetStream's form: i32[S, 2n + 3] for S slots and n steps.

    A row has n + 1 lanes of tokens, of which the last is -1, n + 1 lanes of validity, 1 or 0, and one lane with the
    number of tokens. JetStream ends a completion at the first invalid lane. A slot that goes on has no invalid lane: in
    a step without a token it has the token -1. The last lane of a slot that ends is invalid, so JetStream sees the end
    in the result that brings the last token."""
    slots, steps = drawn.tokens.shape
    lanes = steps + 1
    data = np.full((slots, 2 * lanes + 1), -1, np.int32)
    drew = np.arange(steps) < drawn.counts[:, None]
    data[:, :steps] = np.where(drew, drawn.tokens, -1)
    data[:, lanes : 2 * lanes - 1] = drew | drawn.active[:, None]
    data[:, 2 * lanes - 1], data[:, 2 * lanes] = drawn.active, drawn.counts
    return engine_api.ResultTokens(
        data=data,
        tokens_idx=(0, lanes),
        valid_idx=(lanes, 2 * lanes),
        length_idx=(2 * lanes, 2 * lanes + 1),
        samples_per_slot=1,
    )
