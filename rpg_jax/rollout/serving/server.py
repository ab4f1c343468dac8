"""JetStream's gRPC service and an HTTP service, both on our engine. No request can end the driver."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from rpg_jax.data.tokenizer import Codec
from rpg_jax.rewards.callables import Background
from rpg_jax.rollout.jetstream.adapter import jetstream_pb2, jetstream_pb2_grpc, orchestrator
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving import completions
from rpg_jax.rollout.serving.access import STALL_SECONDS, Access, ApiKey
from rpg_jax.rollout.serving.admission import Admission, Disk, Refused, count
from rpg_jax.rollout.serving.completions import CompletionRequest
from rpg_jax.types import Sampling

_IDLE_MS = 300_000


class Service(orchestrator.LLMOrchestrator):
    """JetStream's gRPC service: the calls Decode and HealthCheck. A request of JetStream's has a prompt and
    `max_tokens`. All other sampling parameters are the server's defaults."""

    def __init__(self, admission: Admission):
        self._admission = admission

    async def Decode(self, request, context) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
        """Streams one completion, a response for each dispatch: texts if the prompt is a text, else token ids. Stop
        tokens are left out. A refused request ends with its status code, such as INVALID_ARGUMENT."""
        try:
            with self._admission.request() as take:
                take(1)
                sampling = dataclasses.replace(self._admission.sampling, max_tokens=request.max_tokens)
                prompt = self._admission.checked(await self._read(request), sampling)
                is_text = request.WhichOneof("content") == "text_content"
                made = completions.pieces(self._admission, CompletionRequest([prompt], sampling))
                async with contextlib.aclosing(made) as pieces:
                    async for piece in pieces:
                        ids = [token for token in piece.token_ids if token not in sampling.stop_token_ids]
                        sample = {"text": piece.text} if is_text else {"token_ids": ids}
                        content = jetstream_pb2.DecodeResponse.StreamContent
                        yield jetstream_pb2.DecodeResponse(stream_content=content(samples=[content.Sample(**sample)]))
        except Refused as refused:
            await context.abort(refused.code, str(refused))

    async def HealthCheck(self, request, context=None):
        """Answers `is_live`, True until the server shuts down. The next request replaces a driver that has failed."""
        return jetstream_pb2.HealthCheckResponse(is_live=not self._admission.draining)

    async def _read(self, request) -> list[int]:
        """The token ids of a request's text or tokens. Raises ValueError if it has neither."""
        content = request.WhichOneof("content")
        if content is None:
            raise ValueError("the request has neither text_content nor token_content")
        if content == "text_content":
            return await self._admission.encode(request.text_content.text)
        return list(request.token_content.token_ids)


class KeyGuard(grpc.aio.ServerInterceptor):
    """Ends every call without `key` as UNAUTHENTICATED, before its message is read. HealthCheck needs no key."""

    def __init__(self, key: ApiKey):
        self._key = key

    async def intercept_service(self, continuation, details):
        """The handler of a call: gRPC's own, `continuation(details)`, or, without the key, a handler that refuses."""
        authorization = dict(details.invocation_metadata or ()).get("authorization")
        if details.method.endswith("/HealthCheck") or self._key.opens(authorization):
            return await continuation(details)
        # Whatever the method is, a handler of this kind answers without waiting for a message.
        return grpc.stream_stream_rpc_method_handler(_refuse_key)


async def _refuse_key(_, context) -> None:
    count(grpc.StatusCode.UNAUTHENTICATED)
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the metadata needs authorization: Bearer KEY, a valid one")


def _credentials(access: Access) -> grpc.ServerCredentials | None:
    """TLS of a gRPC server; None without a certificate. Raises OSError if a file cannot be read."""
    if access.certificate is None or access.private_key is None:
        return None
    return grpc.ssl_server_credentials([(Path(access.private_key).read_bytes(), Path(access.certificate).read_bytes())])


class Server:
    """A gRPC and an HTTP service of one rollout. The constructor starts them in an event loop of a thread of their own.
    The attribute `decoding` has the number of slots, and their capacity: the tokens of prompt and completion together.
    Raises ValueError if a port is taken, TLS is broken, or HTTP is wanted and aiohttp is not installed. If a port is
    taken or aiohttp is missing, `rollout` is closed.

    Args:
      rollout, codec: the rollout decodes, and `stop` closes it; the codec turns text into token ids and back.
      sampling: the default of each parameter that a request does not set; its `max_tokens` is not used.
      access: the host, TLS and the API key of both services; None for 127.0.0.1 without TLS and key.
      port: the port of gRPC. 0 takes a free port; the attribute `port` has the number.
      max_active: the most completions, and the most requests, at once. Further requests are refused.
      http_port: the port of HTTP, and with HTTP an attribute like `port`; None: no HTTP, and no such attribute.
      name: the name of the model, for HTTP clients.
      render: makes a prompt's text from the messages of a chat, see `openai.ChatForm`; None: chats are refused.
      disk: reads the folders of weights that HTTP clients name; None if they may not replace the weights.
    """

    def __init__(
        self,
        rollout: JetStreamRollout,
        codec: Codec,
        sampling: Sampling,
        *,
        access: Access | None = None,
        port: int = 0,
        max_active: int = 1024,
        http_port: int | None = None,
        name: str = "policy",
        render: Callable[..., str] | None = None,
        disk: Disk | None = None,
    ):
        self._rollout, self._name, self._access = rollout, name, access or Access()
        self._access.tls()  # before anything starts
        self._admission = Admission(rollout, codec, sampling, max_active, disk)
        self._background = Background("rpg-server")
        self._http: Any = None
        try:
            self._call(self._start(port, http_port, render))
        except (RuntimeError, OSError) as error:
            self.stop(grace=0)
            raise ValueError(f"cannot serve on {self._access.host}: {error}") from error
        self.decoding = rollout.engine.decoding

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request or load ended, or since the start; 0 while a request or a load goes on."""
        return self._admission.idle_seconds

    def stop(self, grace: float = 30.0) -> None:
        """Refuses new requests and loads, waits at most `grace` seconds until all under way have ended, breaks off the
        rest, and closes the ports and the rollout. Blocks until all has ended. May be called once."""
        self._admission.draining = True
        self._call(self._stop(grace))
        self._background.close()
        self._rollout.close()

    async def _start(self, port: int, http_port: int | None, render: Callable[..., str] | None) -> None:
        stall, key = int(1000 * STALL_SECONDS), self._access.key
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", stall),  # until TLS and the first frame of HTTP/2 have come
            ("grpc.max_connection_idle_ms", _IDLE_MS),  # without a call; a client then connects again by itself
        ]
        self._grpc = grpc.aio.server(options=options, interceptors=[] if key is None else [KeyGuard(key)])
        jetstream_pb2_grpc.add_OrchestratorServicer_to_server(Service(self._admission), self._grpc)
        host, credentials = self._access.host, _credentials(self._access)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            self.port = self._grpc.add_insecure_port(address)
        else:
            self.port = self._grpc.add_secure_port(address, credentials)
        await self._grpc.start()
        if http_port is None:
            return
        try:
            from rpg_jax.rollout.serving import http
        except ModuleNotFoundError as error:
            raise RuntimeError("HTTP needs aiohttp: pip install 'rpg_jax[serve]'") from error
        self._http = await http.start(self._admission, self._name, self._access, http_port, render)
        self.http_port = self._http.addresses[0][1]

    async def _stop(self, grace: float) -> None:
        async def idle():
            while not self._admission.idle:
                await asyncio.sleep(0.02)

        await asyncio.gather(self._grpc.stop(grace), asyncio.wait([asyncio.create_task(idle())], timeout=grace))
        if self._http is not None:
            await self._http.cleanup()

    def _call(self, coroutine):
        return self._background.begin(coroutine).result()
