"""Plays the conversations of a request: a completion goes to the environment, and its observation becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rpg_jax.data import Problem, Tokenizer
from rpg_jax.environments.stage import Stage
from rpg_jax.rollout.request import Reply
from rpg_jax.types import FinishReason

_ASKED, _SAID = "ask", "0r4cle"  # a turn before the observation; templates that read answers find nothing in it
_BEFORE = ({"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID})


class Player:
    """Answers the turns of a rollout: keeps each conversation's messages, asks the environment, encodes the answers.

    A failed call ends its conversation, and the reply has the kind of error. `check` raises errors that end the run.

    Args:
      stage: asks the environment.
      decode: turns tokens into text, without special tokens.
      observations: turns messages into tokens.
      problems: the problems of the request's prompts, in the order of the prompts.
      max_turns: the most turns of the policy in a conversation; the last turn gets a reward and no observation.
      turn_tokens: the most tokens of a turn, for the rollout, which cuts a longer turn.
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
        # By (place, index): the messages after the prompt, and the number of turns.
        self._said: dict[tuple[int, int], tuple[list[Mapping[str, Any]], int]] = {}
        self._fault: Exception | None = None

    def respond(self, place: int, index: int, tokens: np.ndarray, finish_reason: FinishReason) -> Future[Reply]:
        """Begins the reply to a turn of completion `index` of prompt number `place`, in a thread. Returns at once.
        `tokens`, i32[n], are those of the turn. With `finish_reason` "stop" the last one is a stop token; with "length"
        a limit has cut the turn, which still gets a reward, and the conversation ends. The future never raises. The
        `tokens` of its reply are the observation, or None if the conversation is over, also by an error."""
        return self._stage.submit(self._reply, (place, index), tokens, finish_reason)

    def check(self) -> None:
        """Raises the first exception of the threads, if any: the environment cannot be made, or always fails."""
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
        said, turns = self._said.pop(key, ([], 0))
        verdict = self._stage.step(problem, [*problem.opening, *said], text)
        if verdict.value is None:
            return Reply(None, error=verdict.error)
        observation, reward = verdict.value["observation"], verdict.value["reward"]
        if verdict.value["done"] or finish_reason == "length":
            return Reply(None, reward)
        if turns + 1 >= self._max_turns:
            return Reply(None, reward, out_of_turns=True)
        try:
            read = self._observations.encode(observation)
        except ValueError:  # the template refuses these messages
            return Reply(None, reward, "value")
        self._said[key] = [*said, {"role": "assistant", "content": text}, *observation], turns + 1
        return Reply(read, reward)


class Observations:
    """Encodes the messages that follow a turn of the policy, up to where its next turn begins.

    With a chat template the tokens are the rest of the assistant's message after the stop token, the messages, and the
    generation prompt. Earlier turns are not rendered again, so a template cannot leave out their thoughts, and the
    context only grows. Without a template the contents are joined and encoded as they are. `thinking` is the template's
    `enable_thinking`. Raises ValueError if the chat template refuses or leaves out an assistant's message.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool):
        self._tokenizer, self._thinking = tokenizer, thinking
        self._closing: list[int] = []
        if tokenizer.chat is not None:
            ids = self._after_turn([], add_generation_prompt=False)
            ends = [i for i, token in enumerate(ids) if token in tokenizer.stop_token_ids]
            self._closing = ids[: ends[0] + 1] if ends else []

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns the tokens i32[m], m >= 1. Raises ValueError if the template fails, or there is no token."""
        if self._tokenizer.chat is None:
            ids = self._tokenizer.encode("".join(message["content"] for message in messages))
        else:
            ids = self._after_turn(messages)
            if ids[: len(self._closing)] == self._closing:
                ids = ids[len(self._closing) :]
        if not ids:
            raise ValueError("an observation without a token")
        return np.asarray(ids, np.int32)

    def _after_turn(self, messages: Sequence[Mapping[str, Any]], **how: bool) -> list[int]:
        assert self._tokenizer.chat is not None
        text = self._tokenizer.chat([*_BEFORE, *messages], thinking=self._thinking, **how)
        before, said, after = text.partition(_SAID)
        if not said:
            raise ValueError("the chat template leaves out the assistant's messages: it cannot continue a conversation")
        return self._tokenizer.encode(after)
