"""OpenAI's form of text completions and of conversations, and vLLM's form of a tokenizer, as JSON objects."""

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from rpg_jax.data.tokenizer import IncrementalDecoder
from rpg_jax.rollout.engine import TOP_TOKENS
from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.rollout.serving.completions import CompletionRequest, Piece
from rpg_jax.types import Sampling

_MOST_STOPS = 16


class _Kind(NamedTuple):
    """What a field may be: `fits` says whether a value fits, and `what` says in words what fits, for messages."""

    fits: Callable[[Any], bool]
    what: str


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= _MOST_STOPS and all(isinstance(x, str) and x for x in texts)


_NUMBER = _Kind(lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max, "a finite number")
_TRUTH = _Kind(lambda value: isinstance(value, bool), "true or false")
_STOP = _Kind(_is_stop, f"a text or a list of texts, none of them empty, and {_MOST_STOPS} are the most")


def _whole(low: int, high: int = 2**31 - 1) -> _Kind:
    return _Kind(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _wholes(low: int, high: int) -> _Kind:
    one = _whole(low, high)
    return _Kind(
        lambda value: isinstance(value, list) and all(map(one.fits, value)), f"a list whose entries are each {one.what}"
    )


def _flag(known: str) -> _Kind:
    """The kind of an object that has no entry but `known`, true or false, and may be empty."""
    return _Kind(
        lambda value: isinstance(value, dict) and all(key == known and _TRUTH.fits(value[key]) for key in value),
        f'{{"{known}": true or false}}',
    )


class RequestFields:
    """The fields of a request that are not read yet. A field that is null counts as absent. Methods raise ValueError,
    which names the field, for a wrong value. Every method but `end` removes the fields that it reads."""

    def __init__(self, fields: Mapping[str, Any]):
        self._left = {name: value for name, value in fields.items() if value is not None}

    def take(self, name: str, default: Any = None, kind: _Kind | None = None) -> Any:
        """Removes a field and returns its value, which must be of `kind`; `kind` None takes every value. If the field
        is absent, returns `default`, which is not checked."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if kind is not None and not kind.fits(value):
            raise ValueError(f"{name} must be {kind.what}, got {_short(value)}")
        return value

    def sampling(self, defaults: Sampling, max_tokens: int) -> Sampling:
        """Sampling parameters with `max_tokens`, and the fields `temperature`, `top_p`, `top_k` (-1 and 0 are off),
        `min_p` and `stop_token_ids`; for an absent field the value of `defaults`."""
        return Sampling(
            temperature=float(self.take("temperature", defaults.temperature, _NUMBER)),
            top_p=float(self.take("top_p", defaults.top_p, _NUMBER)),
            top_k=max(0, self.take("top_k", defaults.top_k, _whole(-1))),
            min_p=float(self.take("min_p", defaults.min_p, _NUMBER)),
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.take("stop_token_ids", defaults.stop_token_ids, _wholes(0, 2**31 - 1))),
        )

    def shared(self) -> dict[str, Any]:
        """The fields that requests for texts and for conversations share, as arguments of `CompletionRequest`: `seed`
        (None if absent), `stop`, `stream`, and `usage` from the entry `include_usage` of `stream_options`."""
        usage = self.take("stream_options", {}, _flag("include_usage")).get("include_usage", False)
        stop = self.take("stop", [], _STOP)
        own = {"seed": self.take("seed", None, _whole(0)), "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
        return own | {"stream": self.take("stream", False, _TRUTH), "usage": usage}

    def end(self, unused: Mapping[str, Collection[Any] | None]) -> None:
        """Raises ValueError if a field is left that nothing has read. `unused` is {field that may be left: the values
        that it may have, which change nothing; None for every value}."""
        for name in sorted(self._left):
            value, harmless = self._left[name], unused.get(name, ())
            if harmless is not None and value not in harmless:
                raise ValueError(f"{name}={_short(value)} is not supported here: leave {name} out")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}…"


MOST_CHOICES = 256
"""The most completions of one request."""

UNUSED: dict[str, Collection[Any] | None] = {  # for `RequestFields.end`
    "user": None,
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}


class TextForm:
    """Reads requests for text completions, OpenAI's /v1/completions, and writes their answers. `kind` is the value of
    `object` in an answer, `piece_kind` its value in a piece of a stream. The id of an answer begins with `prefix`.
    `unused` is for `RequestFields.end`."""

    kind = piece_kind = "text_completion"
    prefix, unused = "cmpl", UNUSED | {"suffix": ("",)}

    def __init__(self, admission: Admission):
        self._admission = admission

    async def read(self, body: RequestFields) -> CompletionRequest:
        """The request in the fields of `body`. Removes the fields that it reads. `max_tokens` may be 0 if `echo` is
        true: then nothing is drawn. Raises ValueError if a field is wrong, or a prompt does not fit the engine."""
        prompts = await self._prompts(body.take("prompt"))
        n, echo = body.take("n", 1, _whole(1, MOST_CHOICES)), body.take("echo", False, _TRUTH)
        if n * len(prompts) > MOST_CHOICES:
            raise ValueError(f"{len(prompts)} prompts with n={n} are more than {MOST_CHOICES} completions; send fewer")
        room = self._admission.capacity - max(map(len, prompts))
        longest = body.take("max_tokens", max(1, min(16, room)), _whole(0 if echo else 1))
        sampling = body.sampling(self._admission.sampling, max(1, longest))
        counters = body.take("counters", None, _wholes(0, 2**32 - 1))
        if counters is not None and len(counters) != 4:
            raise ValueError(f"counters must be [seed, step, prompt_id, index], got {len(counters)} numbers")
        return CompletionRequest(
            [self._admission.checked(prompt, sampling, draw=longest > 0) for prompt in prompts],
            sampling,
            n=n,
            draw=longest > 0,
            logprobs=body.take("logprobs", None, _whole(0, 5)),
            echo=echo,
            **body.shared(),
            prompt_ids=body.take("return_token_ids", False, _TRUTH),
            sampler_logprobs=body.take("sampler_logprobs", False, _TRUTH),
            counters=None if counters is None else tuple(counters),
            drawn=body.take("drawn", 0, _whole(0)),
        )

    def choice(self, asked: CompletionRequest, choice: Piece) -> dict[str, Any]:
        """An entry of `choices` of the answer to `asked`: `index`, `text`, `logprobs` (None if not asked for),
        `finish_reason` and `token_ids`. If asked for, also `prompt_token_ids` and `sampler_logprobs`, the
        log-probabilities with which the tokens were drawn; the latter with `logprobs` always. `choice` is a whole
        completion. Blocks. Raises RolloutError if scoring fails."""
        prompt = asked.prompt_of(choice.index).tolist()
        echoed = self._admission.codec.decode(prompt) if asked.echo else ""
        made: dict[str, Any] = {"index": choice.index, "text": echoed + choice.text, "logprobs": None}
        if asked.logprobs is not None:
            first = 0 if asked.echo else len(prompt)
            made["logprobs"] = self._logprobs([*prompt, *choice.token_ids], first, asked.logprobs)
        if asked.sampler_logprobs or asked.logprobs is not None:
            made["sampler_logprobs"] = choice.sampler_logprobs
        if asked.prompt_ids:
            made["prompt_token_ids"] = prompt
        return made | {"finish_reason": choice.finish_reason, "token_ids": choice.token_ids}

    def piece(self, piece: Piece, first: bool) -> dict[str, Any]:
        """An entry of `choices` of a piece of a stream: `index`, `text`, `logprobs` (None), `finish_reason` (None
        before the last piece) and `token_ids`. `first` changes nothing."""
        reason, ids = piece.finish_reason, piece.token_ids
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": reason, "token_ids": ids}

    async def _prompts(self, prompt: Any) -> list[list[int]]:
        """The token ids of each prompt in `prompt`: a text, a list of token ids, or a list of texts and such lists.
        Raises ValueError for another value."""
        several = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
        fits = isinstance(several, list) and all(isinstance(one, str) or _is_ids(one) for one in several)
        if not fits or not several:
            raise ValueError("prompt must be a text, a list of token ids, or a list of such prompts")
        if len(several) > MOST_CHOICES:
            raise ValueError(f"prompt has {len(several)} prompts; {MOST_CHOICES} are the most")
        return [await self._admission.encode(one) if isinstance(one, str) else one for one in several]

    def _logprobs(self, ids: list[int], first: int, k: int) -> dict[str, Any]:
        """Four lists over the tokens `ids` from place `first`, as OpenAI names them; `k` alternatives are named beside
        each token. The log-probabilities of token 0, which no token precedes, are null."""
        scores, codec = self._admission.score(np.array(ids, np.int32)), self._admission.codec
        decode, decoder = codec.decode, IncrementalDecoder(codec)
        offsets, offset, tops, logprobs = [], 0, [], []
        for place in range(first, len(ids)):
            offsets.append(offset)
            offset += len(decoder.push(ids[place : place + 1]))
            logprobs.append(float(scores.logprobs[place]) if place else None)
            best = zip(scores.top_ids[place, :k], scores.top_logprobs[place, :k], strict=True)
            named = [(ids[place], scores.logprobs[place]), *best]
            # Several tokens may have one text: the most probable of them is named.
            top = {decode([int(i)]): float(p) for i, p in sorted(named, key=lambda pair: pair[1])}
            tops.append(top if place else None)
        tokens = [decode([i]) for i in ids[first:]]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _is_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        return False
    if not all(abs(token) < 2**31 for token in prompt):
        raise ValueError("prompt has token ids of more than 32 bits")
    return bool(prompt)


class ChatForm:
    """Reads requests for chat completions, OpenAI's /v1/chat/completions, and writes their answers.

    The class attributes are those of `TextForm`.

    Args:
      admission: encodes the prompts and knows the defaults of requests.
      render: makes the prompt's text from a list of {"role", "content"}, and from the keyword `thinking`, true or
        false, if the request has `enable_thinking`. None: the model has no chat template, and `read` raises.
    """

    kind, piece_kind = "chat.completion", "chat.completion.chunk"
    prefix, unused = "chatcmpl", UNUSED | {"response_format": ({"type": "text"},), "tools": ([],)}

    def __init__(self, admission: Admission, render: Callable[..., str] | None):
        self._admission, self._render = admission, render

    async def read(self, body: RequestFields) -> CompletionRequest:
        """The request in the fields of `body`. Removes the fields that it reads. Raises ValueError if a field is wrong,
        the conversation does not fit the engine, or the model has no chat template."""
        if self._render is None:
            raise ValueError("this model has no chat template: send its prompt to /v1/completions")
        options = body.take("chat_template_kwargs", {}, _flag("enable_thinking"))
        thinking = {"thinking": options["enable_thinking"]} if options else {}
        text = await asyncio.to_thread(self._render, _messages(body.take("messages")), **thinking)
        prompt = await self._admission.encode(text)
        room = max(1, self._admission.capacity - len(prompt))
        longest = body.take("max_completion_tokens", body.take("max_tokens", room, _whole(1)), _whole(1))
        sampling = body.sampling(self._admission.sampling, longest)
        top = body.take("top_logprobs", 0, _whole(0, TOP_TOKENS))
        return CompletionRequest(
            [self._admission.checked(prompt, sampling)],
            sampling,
            n=body.take("n", 1, _whole(1, MOST_CHOICES)),
            logprobs=top if body.take("logprobs", False, _TRUTH) else None,
            **body.shared(),
        )

    def choice(self, asked: CompletionRequest, choice: Piece) -> dict[str, Any]:
        """An entry of `choices` of the answer to `asked`: `index`, `message`, `logprobs` (None if not asked for),
        `finish_reason` and `token_ids`. With `logprobs` also `sampler_logprobs`, the log-probabilities with which the
        tokens were drawn. `choice` is a whole completion. Blocks. Raises RolloutError if scoring fails."""
        message = {"role": "assistant", "content": choice.text}
        made: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        if asked.logprobs is not None:
            prompt = asked.prompt_of(choice.index).tolist()
            made["logprobs"] = {"content": self._logprobs(prompt, choice.token_ids, asked.logprobs)}
            made["sampler_logprobs"] = choice.sampler_logprobs
        return made | {"finish_reason": choice.finish_reason, "token_ids": choice.token_ids}

    def piece(self, piece: Piece, first: bool) -> dict[str, Any]:
        """An entry of `choices` of a piece of a stream: `index`, `delta` with the text, and the role in the `first`
        piece of a completion, `logprobs` (None), `finish_reason` (None before the last piece) and `token_ids`."""
        delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        reason, ids = piece.finish_reason, piece.token_ids
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": reason, "token_ids": ids}

    def _logprobs(self, prompt: list[int], tokens: list[int], k: int) -> list[dict[str, Any]]:
        scores = self._admission.score(np.array([*prompt, *tokens], np.int32))

        def named(token: int, logprob: float) -> dict[str, Any]:
            text = self._admission.codec.decode([int(token)])
            return {"token": text, "logprob": float(logprob), "bytes": list(text.encode())}

        return [
            named(token, scores.logprobs[place])
            | {"top_logprobs": list(map(named, scores.top_ids[place, :k], scores.top_logprobs[place, :k]))}
            for place, token in enumerate(tokens, len(prompt))
        ]


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages, in which the `content` is one text: a list of parts of type "text" is joined. Raises
    ValueError, which names the message, if a role or a content has another form."""
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


_TOKENIZER_UNUSED = {"model": None, "add_special_tokens": (False,)}  # `encode` adds none
TOKENIZER_INFO = {"tokenizer_class": "rpg_jax", "bos_token": None, "eos_token": None, "pad_token": None}
"""The answer of /tokenizer_info. It names no special tokens: no text of an answer has them."""


async def tokenize(admission: Admission, body: RequestFields) -> dict[str, Any]:
    """The token ids of the text in field `prompt`: {"tokens": ids, "count": their number, "max_model_len": capacity}.
    The capacity is of prompt and completion together. No special tokens are added. Raises ValueError if `prompt` is no
    text, or for a field that is not supported."""
    text = body.take("prompt")
    if not isinstance(text, str):
        raise ValueError("prompt must be a text")
    body.end(_TOKENIZER_UNUSED)
    tokens = await admission.encode(text)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": admission.capacity}


async def detokenize(admission: Admission, body: RequestFields) -> dict[str, Any]:
    """{"prompt": the text of the token ids in field `tokens`}, without special tokens. Raises ValueError if `tokens` is
    no list of ids of the vocabulary, or for a field that is not supported."""
    ids = body.take("tokens")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < admission.vocab_size for token in ids):
        raise ValueError(f"tokens must be a list of token ids from 0 to {admission.vocab_size - 1}")
    body.end(_TOKENIZER_UNUSED)
    return {"prompt": admission.codec.decode(ids)}
