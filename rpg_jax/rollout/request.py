"""A request for completions, the environment that answers it, and each completion in the making."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from rpg_jax.rollout.decode_state import MAX_STOP_TOKENS
from rpg_jax.types import Completion, FinishReason, Sampling, Turns

OnGroup = Callable[[int, list[Completion]], None]
"""Receives a group's place in the request and its completions."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn.

    Attributes:
      tokens: i32[m], m >= 1, that the policy reads before its next turn; None ends the conversation.
      reward: the reward of the turn.
      error: the kind of failure, one of `rewards.KINDS`, that ended the conversation.
      out_of_turns: the limit of turns ended the conversation, and the environment would have continued it.
    """

    tokens: np.ndarray | None
    reward: float = 0.0
    error: str | None = None
    out_of_turns: bool = False


class Responder(Protocol):
    """An environment as a rollout sees it: tokens of a turn in, tokens of the next observation out."""

    @property
    def turn_tokens(self) -> int:
        """The most tokens of one turn. A turn that this limit cuts off ends the conversation."""
        ...

    def respond(self, place: int, index: int, tokens: np.ndarray, finish_reason: FinishReason) -> Future[Reply]:
        """Asks for the reply to the next turn i32[n] of completion `index` of the prompt at `place`. Never waits.

        A turn that ended with "length" ends the conversation: its reply has no tokens. The future has no exception: a
        failure of the environment is a `Reply` with its kind.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a prompt's completions begin in a call that draws only a part of them, see `training.partial`.

    Attributes:
      seed, step: counters of the random keys.
      max_tokens: the most tokens of a completion after the call, `drawn` included.
      index: the completion that goes on; its tokens so far are the end of the prompt. None: the whole group begins.
      drawn: the number of these tokens.
    """

    seed: int
    step: int
    max_tokens: int
    index: int | None = None
    drawn: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """`group_size` completions of each prompt.

    Attributes:
      prompts: i32[n] token ids each, n >= 1.
      prompt_ids: stable ids, one per prompt. Two prompts with the same id share their random numbers.
      group_size: completions of each prompt.
      sampling: the sampling parameters of all completions.
      seed, step: counters of the random keys, used modulo 2^32.
      done: places of prompts whose groups the caller already has. These groups are not sampled and come back empty.
        Other prompts run in programs of the same shapes as without `done`.
      on_group: receives each group once, as soon as the group is complete. Other threads wait while `on_group`
        runs, so it should only note the group down.
      expected: tokens of a mean completion of each prompt; None where unknown. The longest completions begin first.
      environment: answers every turn. A completion then is a conversation of at most `sampling.max_tokens` tokens, the
        environment's tokens included. None: a completion is one turn.
      starts: of each prompt; None: all completions begin, and no call goes on with them.

    Raises ValueError for a value out of range, and for a prompt that is no 1-D array of at least one token.
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
        for i, (prompt_id, prompt) in enumerate(zip(self.prompt_ids, self.prompts, strict=True)):
            if np.ndim(prompt) != 1 or len(prompt) == 0:
                raise ValueError(
                    f"prompt {i} (id {prompt_id}) has shape {np.shape(prompt)}; a prompt is a 1-D array of at least "
                    "one token id (encode an empty text as the BOS or another separator token)"
                )

    def check_fits(self, *, capacity: int, vocab_size: int) -> None:
        """Raises ValueError if slots of `capacity` tokens and this vocabulary cannot serve the request as asked."""
        stop, max_tokens = self.sampling.stop_token_ids, self.sampling.max_tokens
        if not all(0 <= token < vocab_size for token in stop):
            raise ValueError(f"stop tokens must be in the vocabulary 0..{vocab_size - 1}, got {stop}")
        for i, (prompt_id, prompt) in enumerate(zip(self.prompt_ids, self.prompts, strict=True)):
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
        """The places in the order in which to begin them: the longest expected completions first, then the longest
        prompts. An unknown expected length counts as the mean of the known lengths."""
        known = self.expected or [None] * len(self.prompts)
        usual = float(np.mean([n for n in known if n is not None] or [0]))
        to_come = [usual if n is None else n for n in known]
        return sorted(range(len(known)), key=lambda i: (-to_come[i], -len(self.prompts[i])))

    def start(self, place: int) -> Start:
        """Where the completions of the prompt at `place` begin."""
        return self.starts[place] if self.starts else Start(self.seed, self.step, self.sampling.max_tokens)

    def indices(self, place: int) -> Sequence[int]:
        """The numbers in their group of the completions of the prompt at `place`."""
        index = self.start(place).index
        return range(self.group_size) if index is None else [index]

    def rows(self, place: int) -> "list[Row]":
        """The completions in the making of the prompt at `place`; none if the caller has them."""
        if place in self.done:
            return []
        start, prompt = self.start(place), self.prompts[place]
        sampling = dataclasses.replace(self.sampling, max_tokens=start.max_tokens)
        return [
            Row(
                prompt,
                (start.seed, start.step, self.prompt_ids[place], index),
                sampling,
                place,
                start.drawn,
                environment=self.environment,
            )
            for index in self.indices(place)
        ]


@dataclasses.dataclass(eq=False, slots=True)
class Transcript:
    """The tokens of a completion so far, in pieces: one for each dispatch and each observation.

    Attributes:
      tokens, logprobs: i32[n] and f32[n]; an observation's log-probabilities are 0.
      experts: [n, L, k], see `types.Completion`; none if they are not recorded.
      versions: for each piece, the version of the weights.
      count: the number of tokens.
      turn_start: the number of tokens before the present turn.
      observations: (first, end) of each observation.
      rewards, error: the rewards of all replies, and the error of the last reply.
      cut: "length" where an observation, with a token to draw after it, did not fit; "turns" at the limit of turns.
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
        """Adds tokens that weights of `version` drew, or read as an observation."""
        if not len(tokens):
            return
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.experts += [] if experts is None else [experts]
        self.versions.append(version)
        self.count += len(tokens)

    def observe(self, tokens: np.ndarray, version: int) -> None:
        """Adds an observation; the next turn begins after it."""
        first = self.count
        self.extend(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), version)
        self.observations.append((first, self.count))
        self.turn_start = self.count


@dataclasses.dataclass(eq=False, slots=True)
class Row:
    """One completion in the making.

    Attributes:
      prompt: i32[n]; the tokens that earlier calls have drawn are its end.
      counters: (seed, step, prompt_id, index), the origin of the completion's random key.
      sampling: the sampling parameters of the whole completion.
      group: the prompt's place in the request.
      drawn: the number of tokens that earlier calls have drawn. `sampling.max_tokens` counts them.
      environment: answers the completion's turns; None for a completion of one turn.
      channel: a driver with threads reports this row here; None for other drivers.
      prompt_row: the row of the prefill that has the tokens so far.
      prompt_experts: the `Prefix.experts` of that prefill, which wait on the device until a completion needs them.
      cancelled: the caller no longer wants the completion; its slot is freed at the next dispatch.
      transcript: the tokens of the policy and of the environment, in order.
      made: the completion, once it has ended.
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
        """The most tokens that the transcript has at the end of its present turn."""
        most = self.sampling.max_tokens - self.drawn
        return (
            most if self.environment is None else min(most, self.transcript.turn_start + self.environment.turn_tokens)
        )

    @property
    def of_turn(self) -> Sampling:
        """`sampling`, with the present turn's limit."""
        return self.sampling if self.environment is None else dataclasses.replace(self.sampling, max_tokens=self.limit)

    @property
    def context(self) -> np.ndarray:
        """i32[length], the prompt and the completion so far."""
        return np.concatenate([self.prompt, *self.transcript.tokens])

    def ask(self) -> Future[Reply]:
        """Asks the environment for its reply to the turn that has just ended."""
        assert self.environment is not None
        turn = np.concatenate(self.transcript.tokens)[self.transcript.turn_start :]
        return self.environment.respond(self.group, self.counters[-1], turn, self._reason(turn))

    def take(self, reply: Reply, version: int) -> bool:
        """Notes a reply, and returns whether the completion goes on. The completion ends if an observation leaves no
        room for a token."""
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
        """The completion of a row that has ended."""
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
