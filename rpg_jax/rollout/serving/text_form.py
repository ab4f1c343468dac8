"""OpenAI's form of text completions, /v1/completions."""

from collections.abc import Collection
from typing import Any

from rpg_jax.data.tokenizer import IncrementalDecoder
from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.rollout.serving.body import Body
from rpg_jax.rollout.serving.completing import Asked, Choice, Piece

MOST_CHOICES = 256
"""Completions of one request."""

UNUSED: dict[str, Collection[Any] | None] = {
    "user": None,
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}


class TextForm:
    """Reads requests and writes answers.

    `kind` and `piece_kind` name their JSON objects, `prefix` begins an answer's id, and `unused` are the fields that
    change nothing; see `Body.end`.
    """

    kind = piece_kind = "text_completion"
    prefix, unused = "cmpl", UNUSED | {"suffix": ("",)}

    def __init__(self, admission: Admission):
        self._admission = admission

    async def read(self, body: Body) -> Asked:
        """What a request asks. Raises ValueError if it cannot be served."""
        prompts = await self._prompts(body.take("prompt"))
        n, echo = body.whole("n", 1, low=1, high=MOST_CHOICES), body.truth("echo")
        if n * len(prompts) > MOST_CHOICES:
            raise ValueError(f"{len(prompts)} prompts with n={n} are more than {MOST_CHOICES} completions; send fewer")
        room = self._admission.capacity - max(map(len, prompts))
        longest = body.whole("max_tokens", max(1, min(16, room)), low=0 if echo else 1)
        sampling = body.sampling(self._admission.sampling, max(1, longest))
        counters = body.wholes("counters", 0, 2**32 - 1)
        if counters is not None and len(counters) != 4:
            raise ValueError(f"counters must be [seed, step, prompt_id, index], got {len(counters)} numbers")
        return Asked(
            [self._admission.checked(prompt, sampling) for prompt in prompts],
            sampling,
            n=n,
            seed=body.whole("seed", None, low=0),
            stop=body.stops(),
            draw=longest > 0,
            logprobs=body.whole("logprobs", None, low=0, high=5),
            echo=echo,
            stream=body.truth("stream"),
            usage=body.flags("stream_options", "include_usage").get("include_usage", False),
            prompt_ids=body.truth("return_token_ids"),
            sampler_logprobs=body.truth("sampler_logprobs"),
            counters=None if counters is None else (counters[0], counters[1], counters[2], counters[3]),
            drawn=body.whole("drawn", 0, low=0),
        )

    def choice(self, asked: Asked, choice: Choice) -> dict[str, Any]:
        decode = self._admission.codec.decode
        echoed = decode(choice.prompt.tolist()) if asked.echo else ""
        made: dict[str, Any] = {"index": choice.index, "text": echoed + choice.text, "logprobs": None}
        if choice.scores is not None:
            first = 0 if asked.echo else len(choice.prompt)
            made["logprobs"] = self._logprobs(asked, choice, [*choice.prompt.tolist(), *choice.token_ids], first)
        if asked.sampler_logprobs or choice.scores is not None:
            made["sampler_logprobs"] = choice.sampler_logprobs
        if asked.prompt_ids:
            made["prompt_token_ids"] = choice.prompt.tolist()
        return made | {"finish_reason": choice.finish_reason, "token_ids": choice.token_ids}

    def piece(self, piece: Piece, first: bool) -> dict[str, Any]:
        reason, ids = piece.finish_reason, piece.token_ids
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": reason, "token_ids": ids}

    async def _prompts(self, prompt: Any) -> list[list[int]]:
        """Token ids of `prompt`, which is a text, a list of token ids, or a list of such."""
        several = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
        if (
            not isinstance(several, list)
            or not several
            or not all(isinstance(one, str) or _is_ids(one) for one in several)
        ):
            raise ValueError("prompt must be a text, a list of token ids, or a list of such prompts")
        if len(several) > MOST_CHOICES:
            raise ValueError(f"prompt has {len(several)} prompts; {MOST_CHOICES} are the most")
        return [await self._admission.encode(one) if isinstance(one, str) else one for one in several]

    def _logprobs(self, asked: Asked, choice: Choice, ids: list[int], first: int) -> dict[str, Any]:
        """Four lists over the tokens from place `first`; nothing comes before token 0, so its entries are null."""
        scores, decode, decoder = choice.scores, self._admission.codec.decode, IncrementalDecoder(self._admission.codec)
        assert scores is not None and asked.logprobs is not None
        offsets, offset, tops, logprobs = [], 0, [], []
        for place in range(first, len(ids)):
            offsets.append(offset)
            offset += len(decoder.push(ids[place : place + 1]))
            logprobs.append(float(scores.logprobs[place]) if place else None)
            best = zip(
                scores.top_ids[place, : asked.logprobs], scores.top_logprobs[place, : asked.logprobs], strict=True
            )
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
