"""A request for completions, the environment that answers the completions, and each completion in the making."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rpg_jax.rollout.decode_state import MAX_STOP_TOKENS
from rpg_jax.types import Completion, FinishReason, Sampling, Turns

OnGroup = Callable[[int, list[Completion]], None]
"""Receives the place of a prompt in its request, and all completions of the prompt, in the order of their numbers."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn, which is what the policy writes between two observations.

    Attributes:
      tokens: i32[m], m >= 1, the observation, which the policy reads before its next turn; None ends the conversation.
      reward: the reward of the turn that the reply answers.
      error: the kind of failure, one of `rewards.KINDS`, that ended the conversation; None without a failure.
      out_of_turns: whether the limit of turns ended a conversation that the environment would have continued.
    """

    tokens: np.ndarray | None
    reward: float = 0.0
    error: str | None = None
    out_of_turns: bool = False


class Responder(Protocol):
    """An environment as a rollout sees it: it takes a turn of the policy as tokens, and gives the next observation."""

    @property
    def turn_tokens(self) -> int:
        """The most tokens of one turn. A turn that this limit cuts off ends the conversation."""
        ...

    def respond(self, place: int, index: int, tokens: np.ndarray, finish_reason: FinishReason) -> Future[Reply]:
        """Asks for the reply to a turn, and returns the reply's future at once. The turn is the next turn of completion
        `index` of the group at `place` in the request; `tokens` i32[n] are the turn's, a stop token included. After the
        `finish_reason` "length" the reply has no tokens: the conversation ends. The future does not raise: a failure of
        the environment is a `Reply` with an `error`."""
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """How a prompt's completions begin, in a request that may draw only a part of each completion.

    Attributes:
      seed, step: counters of the random keys, in place of the request's.
      max_tokens: the most tokens that a completion has after this request; its `drawn` tokens count.
      index: only the completion with this number in its group goes on. Its `drawn` tokens are the end of the prompt.
        None: all completions of the group begin.
      drawn: the number of the completion's tokens that earlier requests drew.
    """

    seed: int
    step: int
    max_tokens: int
    index: int | None = None
    drawn: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """Asks a rollout for `group_size` completions of each prompt. A place is the index of a prompt in `prompts`.

    Attributes:
      prompts: i32[n] token ids each, n >= 1.
      prompt_ids: stable ids, one per prompt. Two prompts with the same id share their random numbers.
      group_size: completions of each prompt.
      sampling: the sampling parameters of all completions.
      seed, step: counters of the random keys, used modulo 2^32.
      done: places of prompts whose groups the caller already has. These groups are not sampled and come back empty.
        Other prompts run in programs of the same shapes as without `done`.
      on_group: receives each group once, as soon as the group is complete, perhaps in another thread. Other threads
        wait while `on_group` runs, so it should only note the group down. If it raises, sampling fails.
      expected: for each prompt the tokens of a mean completion, None if not known. The longest completions begin first.
      environment: answers every turn. A completion then is a conversation of at most `sampling.max_tokens` tokens, the
        environment's tokens included. None: a completion is one turn.
      starts: how the completions of each prompt begin; None: all begin anew, with this request's counters and limit.
      places: only the prompts at these places are read; programs have the shapes that these prompts alone need. All
        other places must be in `done`. None: all prompts.

    Raises ValueError unless there is one id per prompt, `group_size` is at least 1, there are at most `MAX_STOP_TOKENS`
    stop tokens, `top_k` is below 2^31, each prompt that is read is a 1-D array of at least one token, and with an
    environment no start has drawn tokens.
    """

    prompts: Sequence[np.ndarray]
    prompt_ids: Sequence[int]
    group_size: int
    sampling: Sampling
    seed: int
    step: int
    done: frozenset[int] = frozenset()
    on_group: OnGroup | None = None
    expected: Sequence[float | None] | None = None
    environment: Responder | None = None
    starts: Sequence[Start] | None = None
    places: Sequence[int] | None = None

    def __post_init__(self):
        stop, prompts = self.sampling.stop_token_ids, len(self.prompts)
        if len(self.prompt_ids) != prompts:
            raise ValueError(f"{prompts} prompts but {len(self.prompt_ids)} prompt_ids; give one id per prompt")
        if self.group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {self.group_size}")
        if len(stop) > MAX_STOP_TOKENS:
            raise ValueError(f"at most {MAX_STOP_TOKENS} stop tokens are supported, got {stop}")
        if self.sampling.top_k >= 2**31:
            raise ValueError(f"top_k must be below 2^31 (0 switches it off), got {self.sampling.top_k}")
        if self.environment is not None and any(start.drawn for start in self.starts or ()):
            raise ValueError("starts has drawn tokens: a conversation with an environment is drawn in one request")
        for i in self._read:
            prompt_id, prompt = self.prompt_ids[i], self.prompts[i]
            if np.ndim(prompt) != 1 or len(prompt) == 0:
                raise ValueError(
                    f"prompt {i} (id {prompt_id}) has shape {np.shape(prompt)}; a prompt is a 1-D array of at least "
                    "one token id (encode an empty text as the BOS or another separator token)"
                )

    def check_fits(self, *, capacity: int, vocab_size: int) -> None:
        """Raises ValueError if a stop token or a prompt's token is not below `vocab_size` or is negative, or if a
        prompt, without its `drawn` tokens, and `sampling.max_tokens` exceed `capacity`, the tokens of a slot."""
        stop, max_tokens = self.sampling.stop_token_ids, self.sampling.max_tokens
        if not all(0 <= token < vocab_size for token in stop):
            raise ValueError(f"stop tokens must be in the vocabulary 0..{vocab_size - 1}, got {stop}")
        for i in self._read:
            prompt_id, prompt = self.prompt_ids[i], self.prompts[i]
            if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
                raise ValueError(
                    f"prompt {i} (id {prompt_id}) has token ids from {np.min(prompt)} to {np.max(prompt)}; the model's "
                    f"vocabulary is 0..{vocab_size - 1}"
                )
            drawn = self.start(i).drawn
            if len(prompt) - drawn + max_tokens > capacity:
                raise ValueError(
                    f"prompt {i} (id {prompt_id}) has {len(prompt) - drawn} tokens, and with max_tokens {max_tokens} "
                    f"does not fit a slot of {capacity} tokens; raise the rollout's capacity, or filter long prompts"
                )

    @property
    def order(self) -> list[int]:
        """The places whose prompts are read, in the order in which to begin their completions: the longest expected
        first; among equals, the longest prompts first. An unknown expected length counts as the mean of the known."""
        known = self.expected or [None] * len(self.prompts)
        usual = float(np.mean([n for n in known if n is not None] or [0]))
        to_come = [usual if n is None else n for n in known]
        return sorted(self._read, key=lambda i: (-to_come[i], -len(self.prompts[i])))

    @property
    def _read(self) -> Sequence[int]:
        return range(len(self.prompts)) if self.places is None else self.places

    def start(self, place: int) -> Start:
        """How the completions of the prompt at `place` begin; without `starts`, with the request's own values."""
        return self.starts[place] if self.starts else Start(self.seed, self.step, self.sampling.max_tokens)

    def indices(self, place: int) -> Sequence[int]:
        """The numbers in their group of the completions that the request draws for the prompt at `place`: from 0 to
        `group_size` - 1, or only `Start.index`. `done` does not count here."""
        index = self.start(place).index
        return range(self.group_size) if index is None else [index]

    def rows(self, place: int) -> "list[Row]":
        """New completions in the making, in the order of `indices(place)`; [] if `place` is in `done`."""
        if place in self.done:
            return []
        start, prompt, prompt_id = self.start(place), self.prompts[place], self.prompt_ids[place]
        sampling = dataclasses.replace(self.sampling, max_tokens=start.max_tokens)
        origins = [(start.seed, start.step, prompt_id, index) for index in self.indices(place)]
        return [Row(prompt, origin, sampling, place, start.drawn, self.environment) for origin in origins]


@dataclasses.dataclass(eq=False, slots=True)
class Transcript:
    """The tokens of a completion so far, in pieces: one for each dispatch and each observation of an environment.
    Tokens that earlier requests drew are in the prompt instead.

    Attributes:
      tokens, logprobs: i32[n] and f32[n] of each piece; an observation's log-probabilities are 0.
      experts: [n, L, k] of each dispatch's piece, the k experts of each token in each of L layers; [] if not recorded.
      versions: for each piece, the version of the weights that drew or read the piece.
      count: the number of tokens of all pieces.
      turn_start: the number of tokens of the completion before the present turn.
      observations: (first, end) of each observation: the index of its first token, and the index after its last token.
      rewards, error: the rewards of all replies, and the error of the last reply, None without an error.
      cut: "length" if an observation and a token after it did not fit; "turns" at the limit of turns; else None.
    """

    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    count: int = 0
    turn_start: int = 0
    observations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None
    cut: FinishReason | None = None

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, version: int, experts: np.ndarray | None = None) -> None:
        """Adds a piece, unless the piece is empty: tokens i32[n] that weights of `version` drew or read, their
        log-probabilities f32[n], and their experts [n, L, k] (None: not recorded)."""
        if not len(tokens):
            return
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.experts += [] if experts is None else [experts]
        self.versions.append(version)
        self.count += len(tokens)

    def observe(self, tokens: np.ndarray, version: int) -> None:
        """Adds an observation i32[n], which weights of `version` read; the next turn begins after it."""
        first = self.count
        self.extend(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), version)
        self.observations.append((first, self.count))
        self.turn_start = self.count


@dataclasses.dataclass(eq=False, slots=True)
class Row:
    """One completion in the making.

    Attributes:
      prompt: i32[n]; the tokens of the completion that earlier requests have drawn are its end.
      counters: (seed, step, prompt_id, index), the origin of the completion's random key.
      sampling: the sampling parameters of the whole completion.
      group: the prompt's place in the request.
      drawn: the number of tokens that earlier requests have drawn. `sampling.max_tokens` counts them.
      environment: answers the completion's turns; None for a completion of one turn.
      channel: the `Channel` to which JetStream's driver reports this row; None for other drivers.
      prompt_row: the row of the `Prefix` that has the tokens so far.
      prompt_experts: `Prefix.experts` of that `Prefix`, which stay on the device until `completion` reads them.
      cancelled: the caller no longer wants the completion; its slot is freed at the next dispatch.
      transcript: the tokens of the policy and of the environment, in order.
      made: the result of `completion`, after its first call; None before.
    """

    prompt: np.ndarray
    counters: tuple[int, int, int, int]
    sampling: Sampling
    group: int = 0
    drawn: int = 0
    environment: Responder | None = None
    channel: Any = None
    prompt_row: int = 0
    prompt_experts: Any = None
    cancelled: bool = False
    transcript: Transcript = dataclasses.field(default_factory=Transcript)
    made: Completion | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.prompt) + self.transcript.count

    @property
    def limit(self) -> int:
        """The most tokens that `transcript` may have at the end of the present turn, by the limit of the completion and
        the environment's limit of a turn. Tokens of earlier requests do not count."""
        most = self.sampling.max_tokens - self.drawn
        return (
            most if self.environment is None else min(most, self.transcript.turn_start + self.environment.turn_tokens)
        )

    @property
    def of_turn(self) -> Sampling:
        """`sampling`; with an environment a copy, whose `max_tokens` is `limit`."""
        return self.sampling if self.environment is None else dataclasses.replace(self.sampling, max_tokens=self.limit)

    @property
    def context(self) -> np.ndarray:
        """i32[`length`], the tokens of the prompt and of the completion so far."""
        return np.concatenate([self.prompt, *self.transcript.tokens])

    def ask(self) -> Future[Reply]:
        """Asks the environment, which must not be None, for its reply to the turn that has just ended. Returns the
        future of the reply at once."""
        assert self.environment is not None
        turn = np.concatenate(self.transcript.tokens)[self.transcript.turn_start :]
        return self.environment.respond(self.group, self.counters[-1], turn, self._reason(turn))

    def take(self, reply: Reply, version: int) -> bool:
        """Notes a reply in `transcript`, and returns whether the completion goes on: the reply has an observation, and
        the observation leaves room for a token. Only then is the observation noted, as read by weights of `version`."""
        self.transcript.rewards.append(reply.reward)
        self.transcript.error = reply.error
        if reply.out_of_turns:
            self.transcript.cut = "turns"
        if reply.tokens is None:
            return False
        if self.transcript.count + len(reply.tokens) >= self.sampling.max_tokens:
            self.transcript.cut = "length"
            return False
        self.transcript.observe(reply.tokens, version)
        return True

    def completion(self) -> Completion:
        """The completion of a row that has ended, with at least one token. Later calls return the same object."""
        if self.made is None:
            transcript = self.transcript
            tokens, logprobs = np.concatenate(transcript.tokens), np.concatenate(transcript.logprobs)
            version, turns, experts = transcript.versions[0], None, None
            if self.environment is not None:
                turns = Turns.of(transcript.observations, transcript.rewards, transcript.error, length=transcript.count)
            if transcript.experts:
                prompt = np.asarray(self.prompt_experts)[self.prompt_row, : len(self.prompt)]
                experts = np.concatenate([prompt, *transcript.experts])
            reason = transcript.cut or self._reason(tokens)
            self.made = Completion(tokens, logprobs, reason, version, turns, experts)
        return self.made

    def _reason(self, tokens: np.ndarray) -> FinishReason:
        return "stop" if int(tokens[-1]) in self.sampling.stop_token_ids else "length"
