"""Draws the completions of a request, side by side. The answer comes whole or in pieces."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.types import Sampling


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request for completions. Raises ValueError if `counters` come with a seed or for several completions,
    if `drawn` comes without `counters` or is not below the prompt's length, or if a stream wants `logprobs`,
    `sampler_logprobs`, `prompt_ids` or `echo`.

    Attributes:
      prompts: token ids, i32[n] each.
      sampling: the sampling parameters of all completions.
      draw: whether to draw completions. Otherwise the answer has the prompts alone, as `echo` and `logprobs` ask.
      n: completions of each prompt.
      seed: of the random numbers. None: every prompt of every request has other random numbers.
      stop: texts that end a completion. The completion's text ends before the stop text.
      logprobs: how many of the most probable tokens are named beside each token; None: no log-probabilities.
      echo: whether the text of the answer begins with the prompt.
      stream: whether the answer comes in pieces.
      usage: whether a stream ends with the numbers of tokens.
      prompt_ids: whether the answer has the token ids of the prompts.
      sampler_logprobs: whether the answer has the log-probabilities with which tokens were drawn, as with `logprobs`.
      counters: (seed, step, prompt_id, index) of a trainer's completion, in place of `seed`.
      drawn: of a trainer's completion, how many of the prompt's last tokens belong to it already, the observations
        between its turns included.
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
        of_whole_answers = self.echo or self.logprobs is not None or self.prompt_ids or self.sampler_logprobs
        if self.stream and of_whole_answers:
            raise ValueError("a stream has no logprobs, sampler_logprobs, echo or return_token_ids: leave stream out")

    def prompt_of(self, index: int) -> np.ndarray:
        """The prompt i32[m] of the completion with this number: p · n + i is completion i of prompt p."""
        return self.prompts[index // self.n]


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens that one dispatch adds to a completion, or a whole completion. `index` is p · n + i for completion i
    of prompt p, if n completions of each prompt are asked for. `token_ids` of a dispatch may be ahead of `text`, which
    lacks an incomplete character and the beginning of a possible stop text until later pieces. `sampler_logprobs` are
    the log-probabilities with which `token_ids` were drawn, in nats, by weights of `versions`. `finish_reason` is
    "stop" or "length" in the last piece, and "length" if the request draws nothing; else None."""

    index: int
    text: str
    token_ids: list[int]
    sampler_logprobs: list[float]
    finish_reason: str | None
    versions: frozenset[int]


async def pieces(admission: Admission, asked: CompletionRequest) -> AsyncGenerator[Piece]:
    """Yields the pieces of all completions as they are drawn: the pieces of a completion in order, between pieces of
    other completions. Close the iterator to free the slots. Raises RolloutError as `Admission.completion`."""
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def feed(index: int, counters: tuple[int, int, int, int]) -> None:
        async with contextlib.aclosing(_completion(admission, asked, index, counters)) as made:
            async for piece in made:
                queue.put_nowait(piece)

    tasks = []
    for place in range(len(asked.prompts)):
        origin = (0, 0, next(admission.arrivals)) if asked.seed is None else (asked.seed, 0, 0)
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


async def choices(admission: Admission, asked: CompletionRequest) -> list[Piece]:
    """Waits for the completions of the whole answer: `asked.n` of each prompt, in the order of the prompts, each as one
    piece; empty pieces if `asked.draw` is False. Raises RolloutError as `Admission.completion`."""
    made: list[list[Piece]] = [[] for _ in range(len(asked.prompts) * asked.n)]
    if asked.draw:
        async with contextlib.aclosing(pieces(admission, asked)) as all_pieces:
            async for piece in all_pieces:
                made[piece.index].append(piece)
    return [_joined(index, own) for index, own in enumerate(made)]


def usage(asked: CompletionRequest, tokens: int) -> dict[str, Any]:
    """The field `usage` of OpenAI's answers: {"prompt_tokens", "completion_tokens", "total_tokens"}. `tokens` is the
    number of sampled tokens. The tokens of a prompt count once, however many completions the prompt has."""
    read = sum(map(len, asked.prompts))
    return {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}


async def _completion(
    admission: Admission, asked: CompletionRequest, index: int, counters: tuple[int, int, int, int]
) -> AsyncGenerator[Piece]:
    sampling, stops, drawn = asked.sampling, StopText(asked.stop), 0
    more, prompt = admission.text(sampling), asked.prompt_of(index)
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
            drawn_with, by = logprobs[:taken].tolist(), frozenset([version])
            yield Piece(index, text, tokens[:taken].tolist(), drawn_with, reason, by)
            if reason is not None:
                return


def _joined(index: int, own: list[Piece]) -> Piece:
    text, tokens = "".join(piece.text for piece in own), [token for piece in own for token in piece.token_ids]
    drawn_with = [logprob for piece in own for logprob in piece.sampler_logprobs]
    reason = own[-1].finish_reason if own else "length"
    return Piece(index, text, tokens, drawn_with, reason, frozenset().union(*(piece.versions for piece in own)))


class StopText:
    """Passes on a growing text until one of the texts `stops` is complete. The last letters are held back, one fewer
    than the longest of `stops` has: a stop text may begin there."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = stops, ""
        self._most = max(map(len, stops), default=1) - 1

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text. Returns the text to pass on now, and whether a stop text has ended the completion. If it
        has, the text to pass on ends before the stop text that was complete first."""
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            _, begin = min(found)
            certain, self._held = self._held[:begin], ""
            return certain, True
        cut = max(0, len(self._held) - self._most)
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain, False

    def flush(self) -> str:
        """The text that was held back, for a completion that has ended without a stop text. A second call gives ""."""
        rest, self._held = self._held, ""
        return rest
