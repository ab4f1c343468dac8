"""Plays the conversations of one request: it is the `Responder` of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rpg_jax.data import Problem
from rpg_jax.environments.observations import Observations
from rpg_jax.environments.stage import Stage
from rpg_jax.rollout.request import Reply
from rpg_jax.types import FinishReason


class Player:
    """Keeps each conversation's messages, asks the environment, and encodes what it says.

    A failure of the environment ends its conversation, with the kind of error. `check` raises what is no failure of a
    single conversation.

    Args:
      stage: asks the environment.
      decode: tokens to text, without special tokens.
      observations: messages to tokens.
      problems: of the request's prompts, in their order.
      max_turns: turns of the policy in a conversation; the last one gets its reward and no observation.
      turn_tokens: tokens of a turn.
    """

    def __init__(
        self,
        stage: Stage,
        decode: Callable[[Sequence[int]], str],
        observations: Observations,
        problems: Sequence[Problem],
        *,
        max_turns: int,
        turn_tokens: int,
    ):
        self._stage, self._problems, self._decode, self._observations = stage, problems, decode, observations
        self._max_turns, self.turn_tokens = max_turns, turn_tokens
        self._said: dict[tuple[int, int], list[Mapping[str, Any]]] = {}  # by (place, index), after the prompt
        self._turns: dict[tuple[int, int], int] = {}
        self._fault: Exception | None = None

    def respond(self, place: int, index: int, tokens: np.ndarray, finish_reason: FinishReason) -> Future[Reply]:
        """As `Responder.respond`; the environment sees a turn that is cut off, too, and pays for it."""
        return self._stage.submit(self._reply, (place, index), tokens, finish_reason)

    def check(self) -> None:
        """Raises a fault that concerns all conversations, see `Stage.step`."""
        if self._fault is not None:
            raise self._fault

    def _reply(self, key: tuple[int, int], tokens: np.ndarray, finish_reason: FinishReason) -> Reply:
        try:
            return self._answer(key, tokens, finish_reason)
        except Exception as error:
            self._fault = self._fault or error
            return Reply(None, error="error")

    def _answer(self, key: tuple[int, int], tokens: np.ndarray, finish_reason: FinishReason) -> Reply:
        spoken = tokens[:-1] if finish_reason == "stop" else tokens
        problem, text = self._problems[key[0]], self._decode(spoken.tolist())
        said, turn = self._said.pop(key, []), self._turns.pop(key, 0) + 1
        verdict = self._stage.step(problem, [*problem.opening, *said], text)
        if verdict.value is None:
            return Reply(None, error=verdict.error)
        observation, reward = verdict.value["observation"], verdict.value["reward"]
        if verdict.value["done"] or finish_reason == "length":
            return Reply(None, reward)
        if turn >= self._max_turns:
            return Reply(None, reward, out_of_turns=True)
        try:
            read = self._observations.encode(observation)
        except ValueError:  # the template refuses these messages
            return Reply(None, reward, "value")
        self._said[key] = [*said, {"role": "assistant", "content": text}, *observation]
        self._turns[key] = turn
        return Reply(read, reward)
