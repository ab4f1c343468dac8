"""Requests for a turn of a completion and for the scores of a text, their answers, and the greedy probe of weights.

Every answer is checked before anything is trained on it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rpg_jax.models import DecoderConfig, Params
from rpg_jax.rollout.request import Row
from rpg_jax.types import Completion, Sampling

_ROUNDING = 1e-5  # rounding may put the log of a sum of probabilities this far above 0
_IMPOSSIBLE = -9999.0


class Aborted(Exception):
    """The server has broken off a completion. Another try may succeed."""


class Unusable(Exception):
    """A server's answer does not answer the request. The message says why. The request is not repeated."""


@dataclasses.dataclass(frozen=True)
class TurnRequest:
    """Asks for the next turn of a completion. Without an environment, the whole completion is one turn.

    Attributes:
      row: the completion in the making, with all turns and observations before this turn.
      model: the name under which the server has the model; None for the server's only model.
      counters: whether the server is this project's own: it gets the counters of random numbers, and returns the
        log-probabilities with which it has drawn. Otherwise it gets a seed.
    """

    row: Row
    model: str | None = None
    counters: bool = False

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters of this turn. Their `max_tokens` is the most tokens that the limits of the completion
        and of a turn leave for this turn."""
        return dataclasses.replace(self.row.sampling, max_tokens=self.row.limit - self.row.transcript.count)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object to post to /v1/completions. The prompt is all tokens before the turn, as token ids. Every
        sampling parameter is named: servers have defaults of their own, and models bring some."""
        sampling, transcript, drawn = self.sampling, self.row.transcript, self.row.drawn + self.row.transcript.count
        body: dict[str, Any] = {
            "prompt": self.row.context.tolist(),
            "n": 1,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "return_token_ids": True,
        }
        if self.model is not None:
            body["model"] = self.model
        if self.counters:
            counters = [count % 2**32 for count in self.row.counters]
            return {**body, "counters": counters, "drawn": drawn, "sampler_logprobs": True}
        seed = seed_of(*self.row.counters, turn=self.row.drawn + len(transcript.observations))
        return {**body, "seed": seed, "logprobs": 0}

    def completion(self, answer: Any, version: int, vocab_size: int) -> Completion:
        """The turn in `answer`, the JSON of a server's answer to `body`, as a completion by weights of `version`.
        Log-probabilities up to 1e-5 above 0 are taken as 0. Raises Aborted if the server broke the turn off; Unusable
        if the answer has no token ids or no log-probabilities, is of another prompt, or is for another reason no turn
        that `sampling` draws from `vocab_size` token ids, see `fault_of`."""
        try:
            [choice] = answer["choices"]
            reason, ids, prompt = choice["finish_reason"], choice.get("token_ids"), choice.get("prompt_token_ids")
            logprobs = choice.get("sampler_logprobs" if self.counters else "logprobs")
            if isinstance(logprobs, Mapping):
                logprobs = logprobs["token_logprobs"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Unusable(f"an answer of another form: {str(answer)[:100]}") from None
        if reason == "abort":
            raise Aborted("the server has aborted a completion")
        if ids is None or not isinstance(prompt, list):
            raise Unusable("no token_ids or no prompt_token_ids: the server must know return_token_ids")
        if prompt != (context := self.row.context.tolist()):
            raise Unusable(f"it has read another prompt, of {len(prompt)} tokens in place of {len(context)}")
        if logprobs is None:
            raise Unusable("no log-probs of the sampled tokens")
        made = Completion(_tokens(ids), _logprobs(logprobs), reason, version)
        if fault := fault_of(made, self.sampling, vocab_size):
            raise Unusable(
                f"{fault}. It must stop at the tokens {list(self.sampling.stop_token_ids)} and no other, have room for "
                f"{self.sampling.max_tokens} tokens, and return the log-probs of what it samples"
            )
        return made


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Asks for the log-probabilities of given tokens, by the fields `echo` and `logprobs` of OpenAI's completions.

    Attributes:
      tokens: i32[T].
      first: the index of the first token whose log-probability is wanted, at least 1; not used with `names`. The tokens
        before `first` are context.
      model: the name under which the server has the model; None for the server's only model.
      names: whether the texts of all T tokens are wanted, in place of log-probabilities.
      drawn: 0 or 1 tokens that the server draws after the text; they are not read. `logprobs` has this number too.
    """

    tokens: np.ndarray
    first: int
    model: str | None = None
    names: bool = False
    drawn: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object to post to /v1/completions."""
        named = {} if self.model is None else {"model": self.model}
        asked = {"max_tokens": self.drawn, "echo": True, "logprobs": self.drawn, "temperature": 1.0, "n": 1}
        return {"prompt": self.tokens.tolist(), **asked, **named}

    def read(self, answer: Any) -> Any:
        """Returns from `answer`, the JSON of a server's answer to `body`, the log-probabilities f32[T - first], in
        nats; with `names` a list of T texts. Raises Unusable unless the answer has an entry for each of the T tokens,
        and, without `names`, each wanted log-probability is above -9999 and at most 0; up to 1e-5 counts as 0."""
        try:
            [choice] = answer["choices"]
            names, found = choice["logprobs"]["tokens"], list(choice["logprobs"]["token_logprobs"])
            sizes = len(names) - self.drawn, len(found) - self.drawn
        except (KeyError, TypeError, ValueError):
            raise Unusable(f"no log-probs of the prompt: {str(answer)[:100]}") from None
        if sizes != (len(self.tokens),) * 2:
            raise Unusable(f"{sizes[1]} log-probs and {sizes[0]} texts of {len(self.tokens)} tokens")
        if self.names:
            return [str(name) for name in names[: len(self.tokens)]]
        logprobs = _logprobs(found[self.first : len(self.tokens)])
        if not ((logprobs <= 0) & (logprobs > _IMPOSSIBLE)).all():
            raise Unusable("a log-probability that is positive, not finite or -9999 (vLLM's word for probability 0)")
        return logprobs


def fault_of(one: Completion, sampling: Sampling, vocab_size: int) -> str:
    """The reason why the completion `one` cannot be a turn drawn by `sampling` from `vocab_size` token ids; "" if it
    can. A turn has finite log-probabilities of at most 0, and ends at its first stop token or after
    `sampling.max_tokens` tokens. Its `finish_reason` is "stop" after a stop token, else "length"."""
    tokens, logprobs = one.tokens, one.logprobs
    if not 1 <= len(tokens) <= sampling.max_tokens or len(logprobs) != len(tokens):
        return f"a completion of {len(tokens)} tokens; the limit is {sampling.max_tokens}"
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return f"tokens from {tokens.min()} to {tokens.max()}; the vocabulary has {vocab_size}"
    if not (logprobs <= 0).all() or not (logprobs > float("-inf")).all():
        return "log-probabilities that are positive or not finite"
    stops = np.isin(tokens, sampling.stop_token_ids)
    ended = stops[-1] if one.finish_reason == "stop" else len(tokens) == sampling.max_tokens and not stops[-1]
    if not ended or stops[:-1].any() or one.finish_reason not in ("stop", "length"):
        return f"a completion of {len(tokens)} tokens that ends with {one.finish_reason!r} and did not"
    return ""


def seed_of(seed: int, step: int, prompt_id: int, index: int, *, turn: int = 0) -> int:
    """The seed of a turn of completion `index` in the group of a prompt: a number from 0 to 2^31 - 1, as every server
    takes. `turn` is 0 for the first turn, and another number for each later turn. The seeds of a group are consecutive
    modulo 2^31, so all differ. Equal arguments give equal seeds."""
    digest = hashlib.sha256(f"{seed % 2**32}/{step}/{prompt_id}{f'/{turn}' if turn else ''}".encode()).digest()
    return (int.from_bytes(digest[:4], "little") + index) % 2**31


def _tokens(ids: Any) -> np.ndarray:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and -(2**31) <= i < 2**31 for i in ids):
        raise Unusable(f"token_ids are no token ids: {str(ids)[:60]}")
    return np.array(ids, np.int32)


def _logprobs(values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(type(x) is float or type(x) is int and abs(x) < 2**63 for x in values):
        raise Unusable(f"the log-probs are no numbers: {str(values)[:60]}")
    found = np.array(values, np.float32)
    return np.where((found > 0) & (found <= _ROUNDING), np.float32(0), found)


LIMITS: Mapping[str, tuple[float, float]] = {"float32": (1e-4, 1e-4), "bfloat16": (0.02, 0.2)}
"""By the dtype in which a model computes: the mean differences, in nats, above which a probe warns and fails."""
_PROMPT, _TOKENS, _KNOWN = 64, 8, 8
_MULTIPLE = 128  # of the tokens of a row: every attention kernel takes them


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an answer is from the trainer's numbers, in nats: the mean over tokens, and the id of the token that
    differs most, with its log-probability by the `server` and by the `trainer`."""

    mean: float
    token: int
    server: float
    trainer: float


@dataclasses.dataclass(frozen=True)
class Probe:
    """N greedy tokens after a prompt, as the trainer computes them: a test of the weights that a server has.
    The server reads the prompt in one pass, through its cache of prefixes, and decodes the N tokens one by one.

    Attributes:
      prompt: i32[P].
      tokens: i32[N, K], the K most probable tokens of each of N places, best first. The best token of a place is the
        context of the places after it.
      logprobs: f32[N, K], the log-probabilities of `tokens`, in nats.
      warns, fails: the values of `Difference.mean` above which the caller warns and fails.
      vocab_size: the number of token ids of the model.
      model: the name under which the server has the model; None for the server's only model.
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
        """The JSON object to post to /v1/completions. No stop token ends the completion: all N tokens are decoded."""
        return {**self._question.body, "ignore_eos": True}

    @property
    def _question(self) -> TurnRequest:
        row = Row(self.prompt, (0, 0, 0, 0), Sampling(temperature=0.0, max_tokens=len(self.tokens)))
        return TurnRequest(row, self.model)

    def difference(self, answer: Any) -> Difference:
        """Compares the JSON of an answer to `body` with the trainer's numbers, up to the first token that is not the
        trainer's, which counts too: later tokens have another context. If two tokens are about equally probable, the
        server may choose the other token. The difference then is at least log π(trainer's token) − log π(server's
        token), by the trainer's π. A token that is not among the K best counts as the last of the K. Raises Unusable if
        the answer has no completion of N tokens with log-probabilities, Aborted if the server broke it off."""
        made, found = self._question.completion(answer, 0, self.vocab_size), list[tuple[float, int, float, float]]()
        for token, server, tokens, logprobs in zip(made.tokens, made.logprobs, self.tokens, self.logprobs, strict=True):
            places = np.flatnonzero(tokens == token)
            trainer = logprobs[places[0] if len(places) else -1]
            far = max(abs(server - trainer), logprobs[0] - trainer)
            found.append((float(far), int(token), float(server), float(trainer)))
            if token != tokens[0]:
                break
        return Difference(float(np.mean([far for far, *_ in found])), *max(found)[1:])


@dataclasses.dataclass(frozen=True)
class Loadable:
    """Weights that servers load.

    Attributes:
      folder: the path of the folder that servers read.
      label: a name for the folder's contents; "" if servers have the weights already and load nothing.
      checksum: the 64-bit checksum of the weights, which answers of this project's own servers must name.
      probe: a question, and its answer by these weights, which tests a server after each load; None: no test.
    """

    folder: str
    label: str
    checksum: int
    probe: Probe | None = None


def prober(
    graphdef: Any,
    config: DecoderConfig,
    dtype: str,
    *,
    rows: int,
    replicated: jax.sharding.Sharding,
    prompt: int,
    tokens: int,
    known_ids: int,
    model: str | None = None,
) -> Callable[[Params], Probe]:
    """Makes a function from weights to their `Probe`. All processes call the function together, on the trainer's mesh.

    The prompt is the same for all weights. Its tokens are drawn from the first `known_ids` token ids: after such a
    prompt no token is certain, so that each log-probability depends on all weights.

    Args:
      graphdef, config: of the model; `nnx.merge(graphdef, params)` gives the module.
      dtype: the dtype in which the model computes, a key of `LIMITS`.
      rows: the number of equal rows that the program computes, a multiple of the size of the mesh.
      replicated: a sharding that gives every process a whole copy of the program's results.
      prompt, tokens: the most tokens of a prompt and of a completion. The probe has at most 64 and 8.
      known_ids: the number of token ids that the tokenizer uses.
      model: the name under which servers have the model; None for the only model of a server.
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
