"""An HTTP endpoint by aiohttp: OpenAI's completions, chat and models, the tokenizer, Prometheus's /metrics, /health.

If the server has an API key, every path but /health needs the key. docs/serving.md lists the fields of requests.
"""

import asyncio
import contextlib
import functools
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import prometheus_client
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import choose_encoder

from rpg_jax.rollout.serving import completions, openai
from rpg_jax.rollout.serving.access import STALL_SECONDS, Access, ApiKey, is_loopback
from rpg_jax.rollout.serving.admission import Admission, Refused, count
from rpg_jax.rollout.serving.completions import CompletionRequest
from rpg_jax.rollout.serving.openai import ChatForm, RequestFields, TextForm

_MOST_BYTES = 4 * 2**20  # of a request's body, as in gRPC
_LOAD_UNUSED = {"flush_cache": (True,), "abort_all_requests": (False,)}
_GONE = 499  # the client has closed the connection: nobody reads the answer
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.INTERNAL: (500, "server_error"),
}

Convert = Callable[[Admission, RequestFields], Awaitable[dict[str, Any]]]


async def start(
    admission: Admission, name: str, access: Access, port: int, render: Callable[..., str] | None = None
) -> web.AppRunner:
    """Starts to serve the model `name` over HTTP in the running loop, and returns. The runner's `cleanup` ends the
    service, and waits for no request. `port` 0 takes a free port; `runner.addresses[0][1]` is its number. `render`
    makes the text of a prompt from the messages of a chat, see `ChatForm`; None: chats are refused. Raises OSError if
    the port is taken, and ValueError if TLS is broken."""
    endpoint = _Endpoint(admission, name)
    app = web.Application(middlewares=[_errors, _guard(access.key)], client_max_size=_MOST_BYTES)
    for path, form in (("/v1/completions", TextForm(admission)), ("/v1/chat/completions", ChatForm(admission, render))):
        app.router.add_post(path, functools.partial(endpoint.answer, form))
    for path, convert in (("/tokenize", openai.tokenize), ("/detokenize", openai.detokenize)):
        app.router.add_post(path, functools.partial(endpoint.convert, convert))
    app.router.add_post("/update_weights_from_disk", endpoint.load)
    app.router.add_get("/tokenizer_info", endpoint.tokenizer_info)
    app.router.add_get("/v1/models", endpoint.models)
    app.router.add_get("/v1/models/{name:.+}", endpoint.model)
    app.router.add_get("/metrics", endpoint.metrics)
    app.router.add_get("/health", endpoint.health)
    # aiohttp's timeout begins when a connection opens, and again after an answer. The head of a request ends it.
    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": STALL_SECONDS}
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, **options)
    # Bytes that are no HTTP are answered with 400; aiohttp would also write a traceback for each request.
    broken = HttpProcessingError, web.RequestPayloadError
    logging.getLogger("aiohttp.server").addFilter(lambda r: not (r.exc_info and isinstance(r.exc_info[1], broken)))
    await runner.setup()
    await web.TCPSite(runner, access.host, port, ssl_context=access.tls()).start()
    return runner


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every refusal in OpenAI's form, with its HTTP status. If a client has gone, its request ends silently."""
    try:
        return await handler(request)
    except Refused as refused:
        status, _ = _STATUS[refused.code]
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        return web.json_response(_reason(refused), status=status, headers=headers)
    except web.HTTPException as error:  # no such path or method, or too long a body
        code = (error.reason or "error").lower().replace(" ", "_")
        body = _error(f"{request.method} {request.path}: {error.reason}", "invalid_request_error", code)
        return web.json_response(body, status=error.status)
    except ConnectionResetError:
        return web.Response(status=_GONE)


def _guard(key: ApiKey | None) -> Middleware:
    """Makes a middleware that refuses requests without `key` before their body is read (None: no key is needed), and
    requests that a web page makes a browser send. Such a request names its page as its Origin. A page whose name leads
    here (DNS rebinding) has a foreign Host: a server without a key answers only to names of the loopback interface. The
    body of a POST must be JSON: HTML forms send none."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host", "localhost"), request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise _counted(grpc.StatusCode.PERMISSION_DENIED, f"pages of {origin} may not ask this server")
        if key is None and not is_loopback(re.sub(r":\d+$", "", host)):
            raise _counted(grpc.StatusCode.PERMISSION_DENIED, f"this server is not called {host}: ask localhost")
        if key and request.path != "/health" and not key.opens(request.headers.get("Authorization")):
            needed = "the header Authorization: Bearer KEY is needed, with a valid key"
            raise _counted(grpc.StatusCode.UNAUTHENTICATED, needed)
        if request.method == "POST" and request.content_type != "application/json":
            raise _counted(grpc.StatusCode.INVALID_ARGUMENT, "the header Content-Type: application/json is needed")
        return await handler(request)

    return guard


def _counted(code: grpc.StatusCode, reason: str) -> Refused:
    count(code)
    return Refused(code, reason)


class _Endpoint:
    def __init__(self, admission: Admission, name: str):
        self._admission, self._name = admission, name
        self._model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rpg_jax"}
        self._model["max_model_len"] = admission.capacity

    async def health(self, _: web.Request) -> web.Response:
        """Answers 200, and 503 once the server shuts down. The next request replaces a driver that has failed."""
        if self._admission.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(prometheus_client.REGISTRY), headers={"Content-Type": content_type})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model]})

    async def model(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != self._name:
            raise web.HTTPNotFound(reason=f"{self._name} is served here")
        return web.json_response(self._model)

    async def load(self, request: web.Request) -> web.Response:
        """Replaces the weights by those of the folder in the body's `model_path`; then answers `success`, `message`,
        `weight_version` and the result of `Admission.load`. A load goes on if the client leaves."""
        try:
            body = await _body(request)
            folder, label = body.take("model_path"), body.take("weight_version", "")
            body.end(_LOAD_UNUSED)
            if not isinstance(folder, str) or not isinstance(label, str):
                raise ValueError("model_path and weight_version must be texts")
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        loaded = await self._admission.load(folder, label)
        named = {"success": True, "message": f"loaded {folder}", "weight_version": label}
        return web.json_response(named | loaded)

    async def tokenizer_info(self, _: web.Request) -> web.Response:
        return web.json_response(openai.TOKENIZER_INFO)

    async def convert(self, convert: Convert, request: web.Request) -> web.Response:
        with self._admission.request():
            return web.json_response(await convert(self._admission, await _body(request)))

    async def answer(self, form: TextForm | ChatForm, request: web.Request) -> web.StreamResponse:
        """Answers a request for completions in `form`, whole or as events. A refusal after an event is an event too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            with self._admission.request() as take:
                body = await _body(request)
                if (model := body.take("model", self._name)) != self._name:
                    raise ValueError(f"model {model!r} is not served here, {self._name!r} is")
                asked = await form.read(body)
                body.end(form.unused)
                take(asked.n * len(asked.prompts))
                head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._name}
                if asked.stream:
                    await self._stream(form, asked, head | {"object": form.piece_kind}, request, response)
                    return response
                made = await completions.choices(self._admission, asked)
                drawn = sum(len(choice.token_ids) for choice in made)
                # In a thread: every token is decoded, and with logprobs scored, and up to 20 others beside it. One by
                # one: a client that leaves ends this.
                written = [await asyncio.to_thread(form.choice, asked, choice) for choice in made]
                answer = {"object": form.kind, "choices": written, "usage": completions.usage(asked, drawn)}
                if asked.counters is not None:
                    versions = sorted(made[0].versions)  # there is one completion
                    answer["weights"] = await asyncio.to_thread(lambda: [*map(self._admission.checksum, versions)])
                return web.json_response(head | answer)
        except Refused as refused:
            if not response.prepared:
                raise
            await _send(request, response, _reason(refused))
            return response

    async def _stream(
        self,
        form: TextForm | ChatForm,
        asked: CompletionRequest,
        head: dict[str, Any],
        request: web.Request,
        response: web.StreamResponse,
    ) -> None:
        begun, drawn = set[int](), 0
        async with contextlib.aclosing(completions.pieces(self._admission, asked)) as pieces:
            async for piece in pieces:
                if not response.prepared:  # not before: until the first piece a refusal has its own status
                    await response.prepare(request)
                await _send(request, response, head | {"choices": [form.piece(piece, piece.index not in begun)]})
                begun.add(piece.index)
                drawn += len(piece.token_ids)
        if asked.usage:
            await _send(request, response, head | {"choices": [], "usage": completions.usage(asked, drawn)})
        await _send(request, response, None)


def _reason(refused: Refused) -> dict[str, Any]:
    return _error(str(refused), _STATUS[refused.code][1], refused.code.name.lower())


def _error(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _body(request: web.Request) -> RequestFields:
    try:
        body = json.loads(await asyncio.wait_for(request.read(), STALL_SECONDS))
    except TimeoutError:
        late = f"the body took longer than {STALL_SECONDS:g} s to arrive; send it at once"
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, late) from None
    except web.RequestPayloadError as error:  # its bytes do not have the encoding that the header names
        raise ValueError(f"the request cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the request must be a JSON object, got a {type(body).__name__}")
    return RequestFields(body)


async def _send(request: web.Request, response: web.StreamResponse, event: dict[str, Any] | None) -> None:
    """Sends an event; None ends the stream. Raises ConnectionResetError if the client left or read nothing for 30 s."""
    data = "[DONE]" if event is None else json.dumps(event)
    try:
        await asyncio.wait_for(response.write(f"data: {data}\n\n".encode()), STALL_SECONDS)
    except TimeoutError:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
