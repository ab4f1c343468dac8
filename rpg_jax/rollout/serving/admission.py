"""Admits the requests of every protocol to the driver: checks them, limits and counts them, and loads new weights."""

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc
import numpy as np
import prometheus_client

from rpg_jax.data.tokenizer import Codec, IncrementalDecoder, check_unicode
from rpg_jax.rollout.decoding import prompt_bucket
from rpg_jax.rollout.engine import Scores
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.request import Request
from rpg_jax.rollout.schedule import Chunk, Row
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Sampling

_REQUESTS = prometheus_client.Counter("rpg_requests", "Decode requests by gRPC status code", ["code"])
_TOKENS = prometheus_client.Counter("rpg_tokens", "Tokens generated for clients")
_ACTIVE = prometheus_client.Gauge("rpg_requests_active", "Decode requests being served")

_LOOK = 0.01  # seconds
_ENDS = "the server is shutting down; ask another"
_NO_POLICY = "the weights give logits that are not finite: they are no policy"


def count(code: grpc.StatusCode) -> None:
    """Counts a request that ended with `code`, in Prometheus's metric `rpg_requests`."""
    _REQUESTS.labels(code=code.name).inc()


class Refused(Exception):
    """The server does not serve a request, or not to its end. `code` and the message are for the client."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


class Disk(Protocol):
    """Reads weights and puts them on the devices. Any thread may call the methods, but only one thread at a time."""

    def read(self, folder: str) -> Any:
        """The weights in a folder, in host memory. Their attribute `nbytes` is their size. Raises ValueError if the
        folder has no weights of this model, OSError if it cannot be read."""

    def swap(self, weights: Any) -> int:
        """Replaces the present weights by `weights`, the result of `read`, and returns the checksum of the new weights.
        Nothing may be sampled meanwhile."""


class Admission:
    """Admits requests to the driver of a rollout, in one event loop. `score` and `checksum` may run in other threads.

    The attribute `active` is the number of requests that are served. The server sets `draining` when it shuts down:
    then no request and no load is admitted. A prompt without a seed has its random numbers from the next number of
    `arrivals`, which begins at a random number, different on each server. `codec` and `sampling` are attributes too.

    Args:
      rollout: its driver serves the requests.
      codec: encodes and decodes text.
      sampling: the default of each parameter that a request does not set; its `max_tokens` is not used.
      max_active: the most completions, and the most requests, at once. Further requests are refused.
      disk: reads the folders of weights that clients name; None if clients may not replace the weights.
    """

    def __init__(
        self, rollout: JetStreamRollout, codec: Codec, sampling: Sampling, max_active: int, disk: Disk | None = None
    ):
        self.codec, self.sampling = codec, sampling
        self._rollout, self._max_active = rollout, max_active
        self.arrivals = itertools.count(secrets.randbits(31))  # random counters have 32 bits
        self.active, self.draining = 0, False
        self._completions = 0  # the number of completions of the active requests
        self._ended = time.monotonic()  # the last request or load
        self._disk, self._load_turn = disk, asyncio.Lock()
        self._present: tuple[tuple[str, str], int, dict[str, Any]] | None = None  # folder and label, version, answer
        self._loading, self._swapping = set[asyncio.Task[dict[str, Any]]](), False
        self._checksums: dict[int, int] = {}  # by version of the weights that have sampled

    @property
    def capacity(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self._rollout.engine.decoding.capacity

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self._rollout.engine.config.vocab_size

    @property
    def idle(self) -> bool:
        """Whether no request is served, and no load of weights goes on."""
        return not self.active and not self._loading

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request or load ended, or since the start; 0 while a request or a load goes on."""
        return time.monotonic() - self._ended if self.idle else 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Counts one request while the block answers the request. The block gets a function, which it may call once
        with the number of completions that the request takes. Raises Refused: UNAVAILABLE if the server shuts down or
        puts other weights in place; RESOURCE_EXHAUSTED above `max_active` requests, and from the function above
        `max_active` completions; INVALID_ARGUMENT in place of a ValueError of the block, and INTERNAL in place of a
        RolloutError."""
        status, taken = grpc.StatusCode.CANCELLED, 0

        def take(count: int) -> None:
            nonlocal taken
            self._completions, taken = self._completions + count, count
            self._check_room(self._completions)

        self.active += 1
        _ACTIVE.inc()
        try:
            if self.draining:
                raise Refused(grpc.StatusCode.UNAVAILABLE, _ENDS)
            if self._swapping:
                raise Refused(grpc.StatusCode.UNAVAILABLE, "the server loads other weights; retry later")
            self._check_room(self.active)
            yield take
            status = grpc.StatusCode.OK
        except Refused as refused:
            status = refused.code
            raise
        except ValueError as error:
            status = grpc.StatusCode.INVALID_ARGUMENT
            raise Refused(status, str(error)) from None
        except RolloutError as fault:
            status = grpc.StatusCode.INTERNAL
            raise Refused(status, str(fault)) from fault
        finally:
            self.active, self._completions = self.active - 1, self._completions - taken
            self._ended = time.monotonic()
            _ACTIVE.dec()
            count(status)

    def _check_room(self, wanted: int) -> None:
        if wanted > self._max_active:
            full = f"{self._max_active} completions are the most at once (--max_active); retry later, or ask for fewer"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, full)

    async def load(self, folder: str, label: str) -> dict[str, Any]:
        """Replaces the weights by the weights of a folder, and returns then. Loads run one after the other. The result
        has `weights`, their checksum as 16 hexadecimal digits; `bytes`, their size in host memory; and `seconds`, a
        dict: to `read` the weights, to `drain`, which is to wait for the requests under way, and to `swap`, which is to
        copy the weights to the devices and to compute their checksum.

        `label` names the contents of the folder: if the weights in use are of this folder and label, nothing is read,
        and the result is that of their load. With label "", every load reads. The server serves while it reads. After
        that it refuses new requests to the end of the load, and waits for the requests under way. A load that has begun
        goes on to its end even if the caller is cancelled.

        Raises Refused: INVALID_ARGUMENT if there is no `disk` or the folder has no weights of this model, INTERNAL if
        the folder cannot be read, UNAVAILABLE if the server shuts down.
        """
        if self._disk is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "start the server with --weights_from=FOLDER")
        if self.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, _ENDS)
        task = asyncio.create_task(self._loaded(self._disk, folder, label))
        self._loading.add(task)
        task.add_done_callback(self._note_end)
        try:
            return await asyncio.shield(task)
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except OSError as error:
            raise Refused(grpc.StatusCode.INTERNAL, f"{folder} was not read: {error}") from error

    async def _loaded(self, disk: Disk, folder: str, label: str) -> dict[str, Any]:
        key, weights = (folder, label), self._rollout.weights
        async with self._load_turn:
            # Another version says that something else has replaced the weights.
            if label and self._present is not None and self._present[:2] == (key, weights.version):
                return self._present[2]
            began = time.perf_counter()
            read = await asyncio.to_thread(disk.read, folder)
            if self.draining:
                raise Refused(grpc.StatusCode.UNAVAILABLE, _ENDS)
            drains, self._swapping = time.perf_counter(), True
            try:
                while self.active:
                    await asyncio.sleep(_LOOK)
                swaps = time.perf_counter()
                checksum = await asyncio.to_thread(disk.swap, read)
            finally:
                self._swapping = False
            seconds = {"read": drains - began, "drain": swaps - drains, "swap": time.perf_counter() - swaps}
            loaded = {"weights": f"{checksum:016x}", "bytes": read.nbytes, "seconds": seconds}
            self._present = key, weights.version, loaded
            return loaded

    def _note_end(self, load: asyncio.Task[dict[str, Any]]) -> None:
        self._loading.discard(load)
        self._ended = time.monotonic()
        if not load.cancelled():
            load.exception()  # heard also where its caller has gone

    def checksum(self, version: int) -> str:
        """A name for the weights of `version`: their checksum as 16 hexadecimal digits, or "version N" if the checksum
        is not known. A version that was replaced is known if it was asked for while it was in use, and no newer version
        has been asked for since. May wait for the devices."""
        weights = self._rollout.weights
        if version == weights.version:
            self._checksums = {version: weights.checksum()}
        found = self._checksums.get(version)
        return f"version {version}" if found is None else f"{found:016x}"

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text; no special tokens are added. A thread encodes, so a long text does not delay other
        requests. Raises ValueError if the text has half of a character, a lone surrogate."""
        check_unicode(text, "the text")
        return await asyncio.to_thread(self.codec.encode, text)

    def checked(self, ids: Sequence[int], sampling: Sampling, *, draw: bool = True) -> np.ndarray:
        """The token ids of a prompt as an array i32[n]. Raises ValueError if the prompt is empty, has an id outside the
        vocabulary, or has no room in a slot with `sampling.max_tokens` more, without `draw` with one less than these,
        or if `sampling` does not fit the engine."""
        prompt, engine = np.array(ids, np.int64), self._rollout.engine
        request = Request([prompt], [0], group_size=1, sampling=sampling, seed=0, step=0)
        request.check_fits(capacity=engine.decoding.capacity + (not draw), vocab_size=engine.config.vocab_size)
        return prompt.astype(np.int32)

    async def completion(
        self, prompt: np.ndarray, counters: tuple[int, int, int, int], sampling: Sampling, drawn: int = 0
    ) -> AsyncGenerator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields (tokens i32[n], their log-probabilities f32[n] in nats, version of the weights) as they are drawn.

        `prompt` is from `checked`. `counters` are (seed, step, prompt_id, index), the origin of the random numbers. The
        last `drawn` tokens of the prompt belong to the completion already: the next token uses the random number of
        position `drawn`, and `sampling.max_tokens` counts the tokens after it. n is at least 1. Close the iterator to
        free its slot. Raises RolloutError if the driver fails or a log-probability is not finite.
        """
        stream, whole = _Stream(), dataclasses.replace(sampling, max_tokens=drawn + sampling.max_tokens)
        row = Row(prompt, counters, whole, drawn=drawn, channel=stream)
        padded = np.zeros((1, prompt_bucket(len(prompt), self._rollout.engine.decoding.capacity)), np.int32)
        padded[0, : len(prompt)] = prompt
        made, piece = row.transcript, 0
        driver = await asyncio.to_thread(self._rollout.driver)
        driver.submit([Chunk(padded, np.array([len(prompt)], np.int32), [row])], stream)
        try:
            async for _ in stream.dispatches():
                while piece < len(made.versions):
                    if not np.isfinite(made.logprobs[piece]).all():
                        raise RolloutError(_NO_POLICY)
                    _TOKENS.inc(len(made.tokens[piece]))
                    yield made.tokens[piece], made.logprobs[piece], made.versions[piece]
                    piece += 1
        finally:
            row.cancelled = True
            driver.retire(stream)

    def score(self, tokens: np.ndarray) -> Scores:
        """The model's own log-probabilities of the tokens i32[T] of a text. Blocks its thread. Raises RolloutError if
        the text is longer than `capacity`, scoring fails, or a log-probability is not finite."""
        try:
            scores = self._rollout.engine.score(tokens)
        except Exception as fault:
            raise RolloutError(f"scoring failed: {type(fault).__name__}: {fault}") from fault
        if not np.isfinite(scores.top_logprobs).all():
            raise RolloutError(_NO_POLICY)
        return scores

    def text(self, sampling: Sampling) -> Callable[[np.ndarray], str]:
        """Makes the decoder of one completion: a function from its next tokens to the text that they add. The decoder
        leaves out the stop tokens of `sampling`. It holds back the bytes of an incomplete character until later tokens
        complete the character, or until a stop token or `sampling.max_tokens` ends the completion."""
        decoder, drawn = IncrementalDecoder(self.codec), 0

        def more(tokens: np.ndarray) -> str:
            nonlocal drawn
            drawn += len(tokens)
            ids = [t for t in tokens.tolist() if t not in sampling.stop_token_ids]
            text = decoder.push(ids)
            return text + decoder.flush() if len(ids) < len(tokens) or drawn == sampling.max_tokens else text

        return more


class _Stream:
    """The `Channel` of one completion. The driver's threads tell it of each dispatch; the event loop listens."""

    def __init__(self):
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue()

    def _put(self, item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def note(self, row: Row, ended: bool) -> None:
        self._put(row)
        if ended:
            self._put(None)

    def set_exception(self, exception: BaseException) -> None:
        self._put(exception)

    async def dispatches(self) -> AsyncIterator[Row]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
