"""Observations as tokens: what the policy reads after its own turn, in the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax.data import Tokenizer

_ASKED, _SAID = "ask", "0r4cle"  # a turn before the observation; templates that read answers find nothing in it
_BEFORE = ({"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID})


class Observations:
    """Encodes the messages that follow a turn of the policy, up to where its next turn begins.

    With a chat template the tokens are those between the policy's stop token and its next turn: the end of the
    assistant's message as far as the stop token does not have it, the messages, and the generation prompt. Earlier
    turns are not rendered again, so that the context only grows: a template that would leave out the thoughts of
    earlier turns does not do so here. Without a template the contents are encoded as they are.

    Raises:
      ValueError: the chat template does not take an assistant's message.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool):
        self._tokenizer, self._thinking = tokenizer, thinking
        self._closing: list[int] = []
        if tokenizer.chat is not None:
            ids = self._after_turn([], add_generation_prompt=False)
            ends = [i for i, token in enumerate(ids) if token in tokenizer.stop_token_ids]
            self._closing = ids[: ends[0] + 1] if ends else []

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """i32[m], m >= 1. Raises ValueError if the template refuses the messages, or they have no token."""
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
