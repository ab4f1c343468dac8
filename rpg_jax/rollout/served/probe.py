"""What a server must answer if it has the trainer's weights: a greedy continuation, and its log-probabilities."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax.models import Params, QwenConfig
from rpg_jax.rollout.row import Row
from rpg_jax.rollout.served.answers import Question
from rpg_jax.types import Sampling

LIMITS: Mapping[str, tuple[float, float]] = {"float32": (1e-4, 1e-4), "bfloat16": (0.02, 0.2)}
"""By the dtype of the weights: above which mean difference, in nats, a probe is a warning and a fault."""
_PROMPT, _TOKENS, _KNOWN = 64, 8, 8
_MULTIPLE = 128  # of the tokens of a row: every attention kernel takes them


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an answer is from the trainer's numbers: the mean over tokens, and the token that differs most, with its
    log-probability by the server and by the trainer. All in nats."""

    mean: float
    token: int
    server: float
    trainer: float


@dataclasses.dataclass(frozen=True)
class Probe:
    """N greedy tokens after a prompt, as the trainer computes them. The server reads the prompt in one pass, through
    its cache of prefixes, and decodes the others one by one.

    Attributes:
      prompt: i32[P].
      tokens: i32[N, K], the most probable tokens of each place after the most probable ones before it, best first.
      logprobs: f32[N, K], theirs, in nats.
      model: the name under which the server has the model; None for its only one.
      warns, fails: mean differences, in nats, above which a probe is a warning and a fault.
      vocab_size: of the model.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    warns: float
    fails: float
    vocab_size: int
    model: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The request. A stop token ends nothing, so that all tokens are decoded."""
        return {**self._question.body, "ignore_eos": True}

    @property
    def _question(self) -> Question:
        row = Row(self.prompt, (0, 0, 0, 0), Sampling(temperature=0.0, max_tokens=len(self.tokens)))
        return Question(row, self.model)

    def difference(self, answer: Any) -> Difference:
        """Compares an answer, up to the first token that is not the trainer's: what follows has another context.

        The server's token may be another one where two are about equally probable. Then the difference is at least the
        trainer's log-probability of its own token minus that of the server's token. A token that is not among the K
        best counts as the last of the K. Raises Unusable as `Question.completion`.
        """
        made, found = self._question.completion(answer, 0, self.vocab_size), list[tuple[float, int, float, float]]()
        for token, server, tokens, logprobs in zip(made.tokens, made.logprobs, self.tokens, self.logprobs, strict=True):
            places = np.flatnonzero(tokens == token)
            trainer = logprobs[places[0] if len(places) else -1]
            far = max(abs(server - trainer), logprobs[0] - trainer)
            found.append((float(far), int(token), float(server), float(trainer)))
            if token != tokens[0]:
                break
        return Difference(float(np.mean([far for far, *_ in found])), *max(found)[1:])


def prober(
    graphdef: Any,
    config: QwenConfig,
    dtype: str,
    *,
    rows: int,
    replicated: jax.sharding.Sharding,
    prompt: int,
    tokens: int,
    known_ids: int,
    model: str | None = None,
) -> Callable[[Params], Probe]:
    """What makes the probe of weights. Every process calls it, on the trainer's mesh.

    The prompt is 64 tokens, the same for all weights, drawn from the first `known_ids` of the vocabulary: after it no
    token is certain, so that each log-probability depends on all weights. Eight tokens follow.

    Args:
      dtype: in which the model computes.
      rows: equal rows of the program, as many as the mesh divides.
      replicated: the sharding of what every process reads.
      prompt, tokens: the most of each that servers take.
    """
    warns, fails = LIMITS[dtype]
    prompt, tokens = min(_PROMPT, prompt), min(_TOKENS, tokens)
    ids = np.random.default_rng(0).integers(0, known_ids, prompt, np.int32)
    row = np.zeros(-(-(prompt + tokens) // _MULTIPLE) * _MULTIPLE, np.int32)
    row[:prompt] = ids
    known = min(_KNOWN, config.vocab_size)

    @functools.partial(jax.jit, out_shardings=replicated)
    def best(params: Params, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(len(row)), (rows, len(row)))
        module = nnx.merge(graphdef, params)

        def following(row: jax.Array, place: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            hidden = module(jnp.broadcast_to(row, (rows, len(row))), positions, jnp.ones_like(positions))
            logprobs = jax.nn.log_softmax(module.logits(hidden[0, place - 1]))
            values, numbers = jax.lax.top_k(logprobs, known)
            return row.at[place].set(numbers[0]), (numbers, values)

        with module.full_precision():
            return jax.lax.scan(following, row, prompt + jnp.arange(tokens))[1]

    def probe(params: Params) -> Probe:
        found, logprobs = jax.device_get(best(params, row))
        return Probe(ids, found, logprobs, warns, fails, config.vocab_size, model)

    return probe
