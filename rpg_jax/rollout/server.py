"""JetStream's gRPC service on our engine: requests are validated before they reach the driver, and never end it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc
import numpy as np
import prometheus_client

from rpg_jax.rollout import wire
from rpg_jax.rollout.jetstream_compat import jetstream_pb2, jetstream_pb2_grpc, orchestrator
from rpg_jax.rollout.orchestrator import JetStreamRollout
from rpg_jax.rollout.requests import Chunk, Row, check
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Sampling

_REQUESTS = prometheus_client.Counter("rpg_requests", "Decode requests by gRPC status code", ["code"])
_TOKENS = prometheus_client.Counter("rpg_tokens", "Tokens generated for clients")
_ACTIVE = prometheus_client.Gauge("rpg_requests_active", "Decode requests being served")


class Codec(Protocol):
    """What the server needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class _Stream:
    """The channel of one request: the driver's threads write, the event loop reads."""

    def __init__(self):
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue()

    def _put(self, item) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def add_result(self, result: tuple[np.ndarray, np.ndarray]) -> None:
        self._put(result)

    def close(self, row: Row) -> None:
        self._put(None)

    def set_exception(self, exception: BaseException) -> None:
        self._put(exception)

    async def results(self) -> AsyncIterator[tuple[np.ndarray, np.ndarray]]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class Service(orchestrator.LLMOrchestrator):
    """JetStream's Decode and HealthCheck.

    Args:
      rollout: whose driver serves.
      codec: for requests that bring text.
      sampling: what requests that do not say otherwise are sampled by; its `max_tokens` is not used.
      max_active: requests served or queued at once; more are refused with RESOURCE_EXHAUSTED.
    """

    def __init__(self, rollout: JetStreamRollout, codec: Codec, sampling: Sampling, max_active: int):
        self._rollout, self._codec, self._sampling, self._max_active = rollout, codec, sampling, max_active
        self._active, self._arrivals, self.draining = 0, itertools.count(), False

    async def Decode(self, request, context) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        status = grpc.StatusCode.CANCELLED
        self._active += 1
        _ACTIVE.inc()
        try:
            async for response in self._decode(request, context):
                yield response
            status = grpc.StatusCode.OK
        except _Refused as refused:
            status = refused.code
            await context.abort(refused.code, str(refused))
        finally:
            self._active -= 1
            _ACTIVE.dec()
            _REQUESTS.labels(code=status.name).inc()

    async def HealthCheck(self, request, context=None):
        """Live until drained; a driver that failed is replaced by the next request."""
        return jetstream_pb2.HealthCheckResponse(is_live=not self.draining)

    async def _decode(self, request, context) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        if self.draining:
            raise _Refused(grpc.StatusCode.UNAVAILABLE, "the server is shutting down; ask another")
        if self._active > self._max_active:
            raise _Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_active} requests are being served; retry later"
            )
        text = request.WhichOneof("content") == "text_content"
        try:
            prompt, terms = self._admit(request, context.invocation_metadata() or ())
        except ValueError as error:
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        stream = _Stream()
        row = Row(0, len(prompt), terms.counters, terms.sampling, channel=stream)
        answer = self._text(terms) if text else self._token_ids(terms)
        try:
            driver = await asyncio.to_thread(self._rollout.driver)
            driver.submit([self._chunk(prompt, row)], stream)
            try:
                async for tokens, logprobs in stream.results():
                    _TOKENS.inc(len(tokens))
                    yield _response(answer(tokens, logprobs))
            finally:
                row.cancelled = True
                driver.retire(stream)
        except RolloutError as fault:
            raise _Refused(grpc.StatusCode.INTERNAL, str(fault)) from fault

    def _admit(self, request, metadata) -> tuple[np.ndarray, wire.Terms]:
        """Prompt and terms of a request that the engine can serve, or ValueError."""
        content = request.WhichOneof("content")
        if content is None:
            raise ValueError("the request has neither text_content nor token_content")
        if content == "text_content":
            ids = self._codec.encode(request.text_content.text)
        else:
            ids = list(request.token_content.token_ids)
        defaults = wire.Terms((0, 0, next(self._arrivals), 0), self._sampling, False)
        terms = wire.decode(metadata, request.max_tokens, defaults)
        if terms.lanes and content == "text_content":
            raise ValueError("rpg-lanes answers token_content only: log-probs belong to token ids")
        prompt, engine = np.array(ids, np.int64), self._rollout.engine
        limits = {"capacity": engine.capacity, "vocab_size": engine.config.vocab_size}
        check([prompt], [terms.counters[2]], 1, terms.sampling, **limits)
        return prompt.astype(np.int32), terms

    def _chunk(self, prompt: np.ndarray, row: Row) -> Chunk:
        tokens = np.zeros((1, self._rollout.engine.prompt_bucket(len(prompt))), np.int32)
        tokens[0, : len(prompt)] = prompt
        return Chunk(tokens, np.array([len(prompt)], np.int32), [row])

    def _token_ids(self, terms: wire.Terms) -> Callable:
        def answer(tokens, logprobs):
            if terms.lanes:
                return {"token_ids": wire.pack(tokens, logprobs)}
            return {"token_ids": [t for t in tokens.tolist() if t not in terms.sampling.stop_token_ids]}

        return answer

    def _text(self, terms: wire.Terms) -> Callable:
        """Text in whole characters: what ends in half of one waits for the rest."""
        ids: list[int] = []
        sent = 0

        def answer(tokens, _):
            nonlocal sent
            fresh = tokens.tolist()
            ids.extend(t for t in fresh if t not in terms.sampling.stop_token_ids)
            text = self._codec.decode(ids)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                text = text[:sent]
            fresh_text, sent = text[sent:], max(sent, len(text))
            return {"text": fresh_text}

        return answer


class Server:
    """The service on a port, with an event loop of its own.

    Args:
      rollout: whose driver serves.
      codec: for requests that bring text.
      sampling: the default terms of a request.
      host, port: where to listen; port 0 takes a free one, see `port`.
      credentials: TLS; without, only loopback addresses are allowed.
      max_active: requests served or queued at once.
      metrics_port: of the Prometheus endpoint, on `host`; None for none.

    Raises:
      ValueError: a host that is not loopback without credentials, or a port that is taken.
    """

    def __init__(
        self,
        rollout: JetStreamRollout,
        codec: Codec,
        sampling: Sampling,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        max_active: int = 1024,
        metrics_port: int | None = None,
    ):
        if credentials is None and not _is_loopback(host):
            raise ValueError(f"host {host} is not loopback: serving others needs TLS, a certificate and its key")
        self._rollout, self._service = rollout, Service(rollout, codec, sampling, max_active)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rpg-server", daemon=True)
        self._thread.start()
        self._metrics = None
        try:
            self.port = self._call(self._start(f"{host}:{port}", credentials))
            if metrics_port is not None:
                self._metrics = prometheus_client.start_http_server(metrics_port, addr=host)
                self.metrics_port = self._metrics[0].server_port
        except (RuntimeError, OSError) as error:
            self.stop(grace=0)
            raise ValueError(f"cannot serve on {host}:{port}: {error}") from error

    def stop(self, grace: float = 30.0) -> None:
        """Refuses new requests, lets running ones end within `grace` seconds, then stops the driver."""
        self._service.draining = True
        self._call(self._grpc.stop(grace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._metrics is not None:
            self._metrics[0].shutdown()
        self._rollout.close()

    async def _start(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        self._grpc = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(self._service, self._grpc)
        add = self._grpc.add_insecure_port if credentials is None else self._grpc.add_secure_port
        port = add(address) if credentials is None else add(address, credentials)
        await self._grpc.start()
        return port

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


def _response(sample: dict) -> jetstream_pb2.DecodeResponse:
    content = jetstream_pb2.DecodeResponse.StreamContent
    return jetstream_pb2.DecodeResponse(stream_content=content(samples=[content.Sample(**sample)]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
