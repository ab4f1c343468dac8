"""An HTTP endpoint by aiohttp: OpenAI's /v1/completions and /v1/models, Prometheus's /metrics, and /health.

All but /health asks for the API key, where the server has one.

A request has prompt (text or token ids) and may have model, max_tokens, temperature, top_p, top_k, min_p, n, seed,
logprobs (0: of the drawn tokens), stream and user. Every other field is refused. With a seed, the same request draws
with the same random numbers; in float32 that gives the same answer. Choices have token_ids beside the text; these
include the stop token.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import prometheus_client
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client.exposition import choose_encoder

from rpg_jax.rollout.serving.access import STALL_SECONDS, Access, ApiKey
from rpg_jax.rollout.serving.admission import Admission, Refused, count
from rpg_jax.types import Sampling

_GONE = 499  # the client has closed the connection: nobody reads the answer
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.INTERNAL: (500, "server_error"),
}


@dataclasses.dataclass(frozen=True)
class _Asked:
    prompt: np.ndarray
    sampling: Sampling
    n: int
    origin: tuple[int, int, int]
    logprobs: bool
    stream: bool


async def start(admission: Admission, name: str, access: Access, port: int) -> web.AppRunner:
    """Serves the model `name` in the running loop until the runner is cleaned up; the cleanup waits for no request."""
    endpoint = _Endpoint(admission, name)
    app = web.Application(middlewares=[_errors, _guard(access.key)])
    app.router.add_post("/v1/completions", endpoint.completions)
    app.router.add_get("/v1/models", endpoint.models)
    app.router.add_get("/metrics", endpoint.metrics)
    app.router.add_get("/health", endpoint.health)
    # aiohttp's timeout of a connection begins when it opens, and again after an answer; it ends with a request's head.
    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": STALL_SECONDS}
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, **options)
    await runner.setup()
    await web.TCPSite(runner, access.host, port, ssl_context=access.tls()).start()
    return runner


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every refusal OpenAI's form, and ends a request quietly whose client has gone."""
    try:
        return await handler(request)
    except Refused as refused:
        return _refusal(refused)
    except web.HTTPException as error:  # no such path or method, or too long a body
        code = (error.reason or "error").lower().replace(" ", "_")
        body = _error(f"{request.method} {request.path}: {error.reason}", "invalid_request_error", code)
        return web.json_response(body, status=error.status)
    except ConnectionResetError:
        return web.Response(status=_GONE)


def _guard(key: ApiKey | None) -> Middleware:
    """Refuses requests without the key before their body is read."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if key is None or request.path == "/health" or key.opens(request.headers.get("Authorization")):
            return await handler(request)
        count(grpc.StatusCode.UNAUTHENTICATED)
        raise Refused(
            grpc.StatusCode.UNAUTHENTICATED, "the header Authorization: Bearer KEY is needed, with a valid key"
        )

    return guard


class _Endpoint:
    def __init__(self, admission: Admission, name: str):
        self._admission, self._name = admission, name

    async def health(self, _: web.Request) -> web.Response:
        """200 while requests are admitted. A driver that has failed is replaced by the next request."""
        if self._admission.draining:
            return web.json_response({"status": "draining"}, status=503)
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(prometheus_client.REGISTRY), headers={"Content-Type": content_type})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        try:
            with self._admission.request():
                asked = await self._read(await _body(request))
                head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
                head["model"] = self._name
                if not asked.stream:
                    return web.json_response(head | await self._whole(asked))
                async with contextlib.aclosing(self._pieces(asked, 0)) as pieces:
                    async for piece in pieces:
                        if response is None:
                            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                            await response.prepare(request)
                        await _send(request, response, json.dumps(head | {"choices": [piece]}))
        except Refused as refused:
            if response is None:
                raise
            await _send(request, response, json.dumps(_reason(refused)))
            return response
        assert response is not None  # a completion has at least one token
        await _send(request, response, "[DONE]")
        return response

    async def _whole(self, asked: _Asked) -> dict[str, Any]:
        """The whole answer; its completions are sampled side by side."""

        async def whole(index: int) -> list[dict[str, Any]]:
            return [piece async for piece in self._pieces(asked, index)]

        tasks = [asyncio.create_task(whole(index)) for index in range(asked.n)]
        try:
            pieces = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        read, drawn = len(asked.prompt), sum(len(piece["token_ids"]) for one in pieces for piece in one)
        usage = {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
        return {"choices": [_joined(one) for one in pieces], "usage": usage}

    async def _pieces(self, asked: _Asked, index: int) -> AsyncGenerator[dict[str, Any]]:
        """One completion as it comes, in pieces with the form of a choice; the last one has a `finish_reason`."""
        sampling, drawn = asked.sampling, 0
        more = self._admission.text(sampling)
        async for tokens, logprobs in self._admission.completion(asked.prompt, (*asked.origin, index), sampling):
            drawn += len(tokens)
            piece = {"index": index, "text": more(tokens), "token_ids": tokens.tolist(), "finish_reason": None}
            piece["logprobs"] = {"token_logprobs": logprobs.tolist()} if asked.logprobs else None
            if len(tokens) and tokens[-1] in sampling.stop_token_ids:
                piece["finish_reason"] = "stop"
            elif drawn == sampling.max_tokens:
                piece["finish_reason"] = "length"
            yield piece

    async def _read(self, body: Mapping[str, Any]) -> _Asked:
        """The request in `body`. Raises ValueError if it cannot be served."""
        body, defaults = dict(body), self._admission.sampling
        body.pop("user", None)
        model, prompt = body.pop("model", self._name), body.pop("prompt", None)
        if model != self._name:
            raise ValueError(f"model {model!r} is not served here, {self._name!r} is")
        if isinstance(prompt, str):
            prompt = await self._admission.encode(prompt)
        elif not isinstance(prompt, list) or not all(type(token) is int and abs(token) < 2**31 for token in prompt):
            raise ValueError("prompt must be one text or one list of token ids; send a request for each prompt")
        sampling = Sampling(
            temperature=_number(body, "temperature", defaults.temperature),
            top_p=_number(body, "top_p", defaults.top_p),
            top_k=_whole_number(body, "top_k", defaults.top_k),
            min_p=_number(body, "min_p", defaults.min_p),
            max_tokens=_whole_number(body, "max_tokens", 16),
            stop_token_ids=defaults.stop_token_ids,
        )
        n, seed = _whole_number(body, "n", 1), _whole_number(body, "seed", -1)
        stream, logprobs = body.pop("stream", None), body.pop("logprobs", None)
        stream = False if stream is None else stream
        if body := {name: value for name, value in body.items() if value is not None}:
            raise ValueError(f"unknown fields {sorted(body)}")
        if not 0 < n <= self._admission.slots or (stream and n > 1):
            raise ValueError(f"n must be from 1 to {self._admission.slots}, and 1 in a stream, got {n}")
        if not isinstance(stream, bool) or logprobs not in (None, 0):
            raise ValueError(f"stream must be a truth value and logprobs 0 or null, got {stream!r} and {logprobs!r}")
        origin = (0, 0, self._admission.arrival()) if seed < 0 else (seed, 0, 0)
        return _Asked(self._admission.checked(prompt, sampling), sampling, n, origin, logprobs == 0, stream)


def _joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pieces of a completion, joined to one choice."""
    joined = pieces[-1] | {"text": "".join(piece["text"] for piece in pieces)}
    joined["token_ids"] = [token for piece in pieces for token in piece["token_ids"]]
    if joined["logprobs"]:
        joined["logprobs"] = {"token_logprobs": [x for piece in pieces for x in piece["logprobs"]["token_logprobs"]]}
    return joined


def _refusal(refused: Refused) -> web.Response:
    status, _ = _STATUS[refused.code]
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return web.json_response(_reason(refused), status=status, headers=headers)


def _reason(refused: Refused) -> dict[str, Any]:
    return _error(str(refused), _STATUS[refused.code][1], refused.code.name.lower())


def _error(message: str, kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = json.loads(await asyncio.wait_for(request.read(), STALL_SECONDS))
    except TimeoutError:
        late = f"the body took longer than {STALL_SECONDS:g} s to arrive; send it at once"
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, late) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the request must be a JSON object, got a {type(body).__name__}")
    return body


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.pop(name, None)
    if value is None:
        return default
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _whole_number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.pop(name, None)
    if value is None:
        return default
    if type(value) is not int or not abs(value) < 2**31:
        raise ValueError(f"{name} must be a whole number of 32 bits, got {value!r}")
    return value


async def _send(request: web.Request, response: web.StreamResponse, data: str) -> None:
    """Sends an event. Raises ConnectionResetError if the client has gone, or does not read."""
    try:
        await asyncio.wait_for(response.write(f"data: {data}\n\n".encode()), STALL_SECONDS)
    except TimeoutError:
        assert request.transport is not None
        request.transport.abort()
        raise ConnectionResetError("the client does not read") from None
