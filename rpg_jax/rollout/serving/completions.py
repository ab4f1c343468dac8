"""From a request's fields to its completions, for all of OpenAI's forms: side by side, whole or in pieces."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from rpg_jax.rollout.engine import Scores
from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.types import Sampling


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request for completions, with its fields checked.

    Attributes:
      prompts: i32[n] each.
      sampling: of all completions; with `draw` False there are none.
      n: completions of each prompt.
      seed: of their random numbers; None draws other ones for every request.
      stop: texts that end a completion and are left out of it.
      logprobs: how many of the most probable tokens are named beside each token; None for no log-probabilities.
      echo: the prompt is part of the answer.
      stream, usage: the answer comes in pieces, and ends with the numbers of tokens.
      prompt_ids: the answer has the token ids of the prompts.
      sampler_logprobs: it has the log-probabilities with which tokens were drawn; with `logprobs` it always has.
      counters: (seed, step, prompt_id, index) of a trainer's completion, in place of `seed`.
      drawn: how many of the prompt's last tokens that completion has already, with the observations between its turns.
    """

    prompts: list[np.ndarray]
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    draw: bool = True
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    usage: bool = False
    prompt_ids: bool = False
    sampler_logprobs: bool = False
    counters: tuple[int, int, int, int] | None = None
    drawn: int = 0

    def __post_init__(self):
        if self.counters is not None and (self.n * len(self.prompts) > 1 or self.seed is not None):
            raise ValueError("counters are those of one completion: leave n and seed out, and send one prompt")
        if self.drawn and (self.counters is None or self.drawn >= len(self.prompts[0])):
            raise ValueError(f"drawn={self.drawn} tokens of a completion need its counters, and a longer prompt")
        if self.stream and (self.echo or self.logprobs is not None):
            raise ValueError("a stream has no logprobs and no echo: leave stream out, or these")


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens that one dispatch, with weights of `version`, adds to choice `index`.

    The last piece has a finish_reason, "stop" or "length". `token_ids` may be ahead of `text`, which waits for whole
    characters and for what may become a stop text.
    """

    index: int
    text: str
    token_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: str | None
    version: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """A whole completion, and the `versions` of the weights that drew it.

    `scores` are those of its prompt and its tokens together, if the request wants them.
    """

    index: int
    prompt: np.ndarray
    text: str
    token_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: str
    scores: Scores | None
    versions: frozenset[int]


async def pieces(admission: Admission, asked: CompletionRequest) -> AsyncGenerator[Piece]:
    """The pieces of all choices as they come. Closing the iterator frees their slots."""
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def feed(index: int, counters: tuple[int, int, int, int]) -> None:
        async with contextlib.aclosing(_completion(admission, asked, index, counters)) as made:
            async for piece in made:
                queue.put_nowait(piece)

    tasks = []
    for place in range(len(asked.prompts)):
        origin = (0, 0, admission.arrival()) if asked.seed is None else (asked.seed, 0, 0)
        for i in range(asked.n):
            counters = (*origin, i) if asked.counters is None else asked.counters
            tasks.append(asyncio.create_task(feed(place * asked.n + i, counters)))
    everything = asyncio.gather(*tasks)
    everything.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (piece := await queue.get()) is not None:
            yield piece
        await everything
    finally:
        everything.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(everything, *tasks, return_exceptions=True)


async def choices(admission: Admission, asked: CompletionRequest) -> list[Choice]:
    """The whole answer, in the order of the prompts."""
    made: list[list[Piece]] = [[] for _ in range(len(asked.prompts) * asked.n)]
    if asked.draw:
        async with contextlib.aclosing(pieces(admission, asked)) as all_pieces:
            async for piece in all_pieces:
                made[piece.index].append(piece)
    return [await _joined(admission, asked, index, own) for index, own in enumerate(made)]


def usage(asked: CompletionRequest, tokens: int) -> dict[str, Any]:
    """OpenAI's count of the tokens that were read and drawn."""
    read = sum(map(len, asked.prompts))
    return {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}


async def _completion(
    admission: Admission, asked: CompletionRequest, index: int, counters: tuple[int, int, int, int]
) -> AsyncGenerator[Piece]:
    sampling, stops, drawn = asked.sampling, StopText(asked.stop), 0
    more, prompt = admission.text(sampling), asked.prompts[index // asked.n]
    async with contextlib.aclosing(admission.completion(prompt, counters, sampling, asked.drawn)) as results:
        async for tokens, logprobs, version in results:
            text, taken, reason = "", 0, None
            # One by one, a completion ends with the token that completes a stop text, whatever the dispatches are.
            for some in np.split(tokens, len(tokens)) if asked.stop else [tokens]:
                new, stopped = stops.push(more(some))
                text, taken = text + new, taken + len(some)
                if stopped:
                    reason = "stop"
                    break
            drawn += taken
            if reason is None and (taken and tokens[-1] in sampling.stop_token_ids or drawn == sampling.max_tokens):
                reason = "stop" if tokens[-1] in sampling.stop_token_ids else "length"
                text += stops.flush()
            yield Piece(index, text, tokens[:taken].tolist(), logprobs[:taken].tolist(), reason, version)
            if reason is not None:
                return


async def _joined(admission: Admission, asked: CompletionRequest, index: int, own: list[Piece]) -> Choice:
    prompt, tokens = asked.prompts[index // asked.n], [token for piece in own for token in piece.token_ids]
    scores = None
    if asked.logprobs is not None:
        scores = await asyncio.to_thread(admission.score, np.array([*prompt, *tokens], np.int32))
    text, drawn_with = "".join(piece.text for piece in own), [x for piece in own for x in piece.sampler_logprobs]
    reason = own[-1].finish_reason if own else "length"
    assert reason is not None
    versions = frozenset(piece.version for piece in own)
    return Choice(index, prompt, text, tokens, drawn_with, reason, scores, versions)


class StopText:
    """Passes a growing text on, up to the stop text that is complete first; holds back what may be one's beginning."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop text has ended it."""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, begin = min(found)
            certain, self._held = self._held[:begin], ""
            return certain, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, False

    def flush(self) -> str:
        """The rest, where the completion has ended without a stop text."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper beginning of `stop` at the end of `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
