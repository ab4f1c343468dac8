"""One completion in the making: what a rollout knows of it from its prompt to its end."""

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np

from rpg_jax.rollout.interface import Reply, Responder
from rpg_jax.types import Completion, FinishReason, Sampling, Turns


@dataclasses.dataclass(eq=False, slots=True)
class Written:
    """The tokens of a completion so far, in pieces, one a dispatch and one an observation.

    Attributes:
      tokens, logprobs: i32[n] and f32[n]; an observation's log-probabilities are 0.
      spans: for each piece, the version of the weights and the number of tokens.
      count: tokens in all.
      turn_start: the number of tokens before the present turn.
      observations: (first, end) of each observation.
      rewards, error: of the replies.
      cut: "length" where an observation, with a token to draw after it, did not fit; "turns" at the limit of turns.
    """

    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    count: int = 0
    turn_start: int = 0
    observations: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None
    cut: FinishReason | None = None

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Adds tokens that weights of `version` drew, or read."""
        if not len(tokens):
            return
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.spans.append((version, len(tokens)))
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
      prompt: i32[n].
      counters: (seed, step, prompt_id, index), the origin of its random key.
      sampling: of the whole completion.
      group: its prompt's place in the request.
      environment: answers its turns; None for a completion of one turn.
      channel: a driver with threads reports this row here; None for other drivers.
      prompt_row: the row of the prefill that has its tokens so far.
      cancelled: the caller no longer wants it; its slot is freed at the next dispatch.
      written: what the policy and the environment have written, in order.
      made: its completion, once it has ended.
    """

    prompt: np.ndarray
    counters: tuple[int, int, int, int]
    sampling: Sampling
    group: int = 0
    environment: Responder | None = None
    channel: Any = None
    prompt_row: int = 0
    cancelled: bool = False
    written: Written = dataclasses.field(default_factory=Written)
    made: Completion | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the completion so far."""
        return len(self.prompt) + self.written.count

    @property
    def limit(self) -> int:
        """The most tokens that the completion has at the end of its present turn."""
        most = self.sampling.max_tokens
        return most if self.environment is None else min(most, self.written.turn_start + self.environment.turn_tokens)

    @property
    def of_turn(self) -> Sampling:
        """`sampling`, with the present turn's limit."""
        return self.sampling if self.environment is None else dataclasses.replace(self.sampling, max_tokens=self.limit)

    @property
    def context(self) -> np.ndarray:
        """i32[length], the prompt and the completion so far."""
        return np.concatenate([self.prompt, *self.written.tokens])

    def ask(self) -> Future[Reply]:
        """Asks the environment for its reply to the turn that has just ended."""
        assert self.environment is not None
        turn = np.concatenate(self.written.tokens)[self.written.turn_start :]
        return self.environment.respond(self.group, self.counters[-1], turn, self._reason(turn))

    def take(self, reply: Reply, version: int) -> bool:
        """Notes a reply; whether the completion goes on. It ends where no token has room after an observation."""
        self.written.rewards.append(reply.reward)
        self.written.error = reply.error
        if reply.out_of_turns:
            self.written.cut = "turns"
        if reply.tokens is None:
            return False
        if self.written.count + len(reply.tokens) >= self.sampling.max_tokens:
            self.written.cut = "length"
            return False
        self.written.observe(reply.tokens, version)
        return True

    def completion(self) -> Completion:
        """The completion of a row that has ended."""
        if self.made is None:
            written = self.written
            tokens, logprobs = np.concatenate(written.tokens), np.concatenate(written.logprobs)
            version, mixed, turns = written.spans[0][0], None, None
            if any(other != version for other, _ in written.spans):
                mixed = np.repeat(*np.array(written.spans, np.int32).T)
            if self.environment is not None:
                turns = Turns.of(written.observations, written.rewards, written.error, length=written.count)
            self.made = Completion(tokens, logprobs, written.cut or self._reason(tokens), version, mixed, turns)
        return self.made

    def _reason(self, tokens: np.ndarray) -> FinishReason:
        return "stop" if int(tokens[-1]) in self.sampling.stop_token_ids else "length"
