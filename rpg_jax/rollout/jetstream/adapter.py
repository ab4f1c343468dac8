"""JetStream's Engine interface around `DecodeEngine`, and its results: floats packed into integer lanes.

JetStream carries integers from the device to a caller. So a result row has two lanes for each decode step: the bits of
the log-probability, which are a negative integer, and the token.
"""

from typing import Any

import jax
import numpy as np

from rpg_jax.rollout.decode_state import DecodeResult, Prefix
from rpg_jax.rollout.engine import DecodeEngine, State
from rpg_jax.rollout.jetstream.compat import engine_api, tokenizer_pb2
from rpg_jax.rollout.weights import Weights
from rpg_jax.types import Sampling


class TokenIds:
    """A tokenizer for JetStream's interface. The engine takes and returns token ids, and stops on the device."""

    stop_tokens: frozenset[int] = frozenset()
    bos_id, eos_id, pad_id = None, None, 0


class JetStreamEngine(engine_api.Engine):
    """JetStream's interface of an engine. `engine` has its own weights, so no method reads its argument `params`."""

    samples_per_slot = 1
    colocated_cpus = None

    def __init__(self, engine: DecodeEngine):
        self.engine = engine

    def load_params(self, *_args, **_kwargs) -> Weights:
        return self.engine.weights

    def init_decode_state(self, *_args, **_kwargs) -> State:
        return self.engine.init_decode_state()

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length) -> Prefix:
        """Prefills right-padded prompts i32[P, T] of lengths i32[P], or one prompt i32[T]."""
        if existing_prefix is not None:
            raise ValueError("a prompt is prefilled in one piece: existing_prefix must be None")
        tokens = np.atleast_2d(np.asarray(padded_tokens, np.int32))
        return self.engine.prefill(tokens=tokens, lengths=np.atleast_1d(np.asarray(true_length, np.int32)))

    def insert(self, prefix: Prefix, decode_state: State, slot: int) -> State:
        """Starts row 0 of the prefix in `slot`, with greedy decoding until the slot is full. The state is donated."""
        room = self.engine.decoding.capacity - prefix.cache.capacity
        greedy = Sampling(temperature=0.0, max_tokens=max(1, room))
        return self.engine.insert(prefix, decode_state, [(slot, 0, 0, (0, 0, 0, 0), greedy)])

    def generate(self, params, decode_state: State) -> tuple[State, engine_api.ResultTokens]:
        """Draws up to K tokens per slot in one dispatch. The state is donated."""
        decode_state, drawn = self.engine.generate(decode_state)
        return decode_state, packed(self.engine.fetch(drawn))

    def get_prefix_destination_sharding(self) -> Any:
        return None if self.mesh is None else jax.NamedSharding(self.mesh, jax.P())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> TokenIds:
        return TokenIds()

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.decoding.slots

    @property
    def max_prefill_length(self) -> int:
        return self.engine.decoding.capacity

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        return self.engine.decoding.mesh


def packed(drawn: DecodeResult) -> engine_api.ResultTokens:
    """A fetched result in JetStream's form: lanes of tokens, lanes of validity, one lane of lengths.

    JetStream ends a completion at the first invalid lane. After the lanes of the n steps comes one more lane, which is
    valid while the slot goes on. So JetStream sees the end in the result that brings the last token. A slot that goes
    on must have no invalid lane. A step in which such a slot drew no token has the token -1, which `unpack` leaves out.
    """
    slots, steps = drawn.tokens.shape
    lanes = 2 * steps + 1
    data = np.zeros((slots, 2 * lanes + 1), np.int32)
    drew = np.arange(steps) < drawn.counts[:, None]
    data[:, : 2 * steps] = pack(np.where(drew, drawn.tokens, -1), drawn.logprobs)
    data[:, lanes : 2 * lanes - 1] = np.repeat(drew | drawn.active[:, None], 2, axis=1)
    data[:, 2 * lanes - 1], data[:, 2 * lanes] = drawn.active, drawn.emitted
    return engine_api.ResultTokens(
        data=data,
        tokens_idx=(0, lanes),
        valid_idx=(lanes, 2 * lanes),
        length_idx=(2 * lanes, 2 * lanes + 1),
        samples_per_slot=1,
    )


def pack(tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """The lanes i32[..., 2n] of n tokens. Lane 2i has the bits of log-probability i, and lane 2i + 1 has token i."""
    return np.stack([logprobs.view(np.int32), tokens], -1).reshape(*tokens.shape[:-1], -1)


def unpack(lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens i32[n] and log-probabilities f32[n] of lanes i32[2m]; m - n pairs of lanes have no token."""
    pairs = lanes.reshape(-1, 2)
    pairs = pairs[pairs[:, 1] >= 0]
    return pairs[:, 1].copy(), np.ascontiguousarray(pairs[:, 0]).view(np.float32)
