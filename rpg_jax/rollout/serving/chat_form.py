"""OpenAI's form of conversations, /v1/chat/completions, through the model's own chat template."""

import asyncio
from collections.abc import Callable
from typing import Any

from rpg_jax.rollout.engine import TOP_TOKENS
from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.rollout.serving.body import Body
from rpg_jax.rollout.serving.completing import Asked, Choice, Piece
from rpg_jax.rollout.serving.text_form import MOST_CHOICES, UNUSED


class ChatForm:
    """Reads requests and writes answers; has the attributes of `TextForm`.

    Args:
      render: from messages, and `thinking` where the request names it, to the prompt's text; None if the model has no
        chat template, and then every request is refused.
    """

    kind, piece_kind = "chat.completion", "chat.completion.chunk"
    prefix, unused = "chatcmpl", UNUSED | {"response_format": ({"type": "text"},), "tools": ([],)}

    def __init__(self, admission: Admission, render: Callable[..., str] | None):
        self._admission, self._render = admission, render

    async def read(self, body: Body) -> Asked:
        """What a request asks. Raises ValueError if it cannot be served."""
        if self._render is None:
            raise ValueError("this model has no chat template: send its prompt to /v1/completions")
        options = body.flags("chat_template_kwargs", "enable_thinking")
        thinking = {"thinking": options["enable_thinking"]} if options else {}
        text = await asyncio.to_thread(self._render, _messages(body.take("messages")), **thinking)
        prompt = await self._admission.encode(text)
        room = max(1, self._admission.capacity - len(prompt))
        longest = body.whole("max_completion_tokens", body.whole("max_tokens", room, low=1), low=1)
        sampling = body.sampling(self._admission.sampling, longest)
        top = body.whole("top_logprobs", 0, low=0, high=TOP_TOKENS)
        return Asked(
            [self._admission.checked(prompt, sampling)],
            sampling,
            n=body.whole("n", 1, low=1, high=MOST_CHOICES),
            seed=body.whole("seed", None, low=0),
            stop=body.stops(),
            logprobs=top if body.truth("logprobs") else None,
            stream=body.truth("stream"),
            usage=body.flags("stream_options", "include_usage").get("include_usage", False),
        )

    def choice(self, asked: Asked, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text}
        made: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        if choice.scores is not None:
            made["logprobs"] = {"content": self._logprobs(asked, choice)}
            made["sampler_logprobs"] = choice.sampler_logprobs
        return made | {"finish_reason": choice.finish_reason, "token_ids": choice.token_ids}

    def piece(self, piece: Piece, first: bool) -> dict[str, Any]:
        delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        reason, ids = piece.finish_reason, piece.token_ids
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": ids}

    def _logprobs(self, asked: Asked, choice: Choice) -> list[dict[str, Any]]:
        scores, k = choice.scores, asked.logprobs
        assert scores is not None and k is not None

        def named(token: int, logprob: float) -> dict[str, Any]:
            text = self._admission.codec.decode([int(token)])
            return {"token": text, "logprob": float(logprob), "bytes": list(text.encode())}

        return [
            named(token, scores.logprobs[place])
            | {"top_logprobs": list(map(named, scores.top_ids[place, :k], scores.top_logprobs[place, :k]))}
            for place, token in enumerate(choice.token_ids, len(choice.prompt))
        ]


def _messages(messages: Any) -> list[dict[str, Any]]:
    """The messages with their content as text. Raises ValueError, which names the message, for any other form."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one {role, content}")
    made = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{place}] must have a role and a content, both texts")
        made.append({**message, "content": content})
    return made


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
