"""Puts two loads on the gRPC server. The clients of `closed` ask again as soon as they have an answer; the requests of
`open` arrive at a rate of their own.

Without --server this process starts a server of random weights, and the clients share its cores. Times are in seconds:
`first_token` until the first reply with tokens, `latency` until the last reply, each at three percentiles of the
requests that were served. `errors` counts the other requests by status. If the server cannot keep up with an open load,
latency grows with --requests, and requests beyond the server's --max-active end as RESOURCE_EXHAUSTED.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import jax
import numpy as np

from rpg_jax import models, rollout
from rpg_jax.benchmarks.subject import PRESETS, Work, peak_bytes
from rpg_jax.rollout.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.server import Server
from rpg_jax.types import Sampling


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome of a request: seconds to its first tokens and to its end, tokens, and the status if it failed."""

    first: float
    latency: float
    tokens: int
    error: str | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="w1", help="model and sizes of a request (default w1)")
    parser.add_argument("--server", metavar="HOST:PORT", help="a running server; its vocabulary must hold the preset's")
    parser.add_argument("--requests", type=int, default=128, help="of each load (default 128)")
    parser.add_argument("--clients", type=int, help="of the closed load (default: the preset's slots)")
    parser.add_argument(
        "--rate", type=float, help="requests a second of the open load (default: 0.8 of the closed load's)"
    )
    parser.add_argument("--max-active", type=int, default=1024, help="requests that the server started here admits")


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    work = PRESETS[arguments.preset]
    clients = work.slots if arguments.clients is None else arguments.clients
    if min(arguments.requests, clients) < 1 or (arguments.rate is not None and arguments.rate <= 0):
        raise ValueError("--requests, --clients and --rate must be positive")
    with _server(arguments.server, work, arguments.max_active) as address:
        asyncio.run(_load(address, work, partial(_closed, work.slots), work.slots))  # compiles the programs
        seconds, answers = asyncio.run(_load(address, work, partial(_closed, clients), arguments.requests))
        closed = _summary(arguments.preset, "closed", seconds, answers)
        yield closed | {"clients": clients}
        rate = arguments.rate or 0.8 * max(closed["requests_per_s"], 1e-3)
        seconds, answers = asyncio.run(_load(address, work, partial(_open, rate), arguments.requests))
        yield _summary(arguments.preset, "open", seconds, answers) | {"rate": rate}


@contextlib.contextmanager
def _server(address: str | None, work: Work, max_active: int) -> Iterator[str]:
    """Yields `address`, or the address of a server of random weights; stops that server at the end."""
    if address is not None:
        yield address
        return
    made = Server(_rollout(work), _NoText(), Sampling(), max_active=max_active)
    try:
        yield f"127.0.0.1:{made.port}"
    finally:
        made.stop(grace=5)


def _rollout(work: Work) -> JetStreamRollout:
    graphdef, params = models.init(work.model)
    decoding = rollout.Decoding(slots=work.slots, capacity=rollout.capacity(work.prompt_tokens, work.new_tokens))
    engine = rollout.DecodeEngine(work.model, graphdef, rollout.Weights(params), decoding)
    return JetStreamRollout(engine, keep_state=True)


Send = Callable[[int], Awaitable[Answer]]
Arrivals = Callable[[Send, int], Awaitable[list[Answer]]]


async def _closed(clients: int, send: Send, requests: int) -> list[Answer]:
    numbers = iter(range(requests))

    async def client() -> list[Answer]:
        return [await send(number) for number in numbers]

    return sum(await asyncio.gather(*(client() for _ in range(clients))), [])


async def _open(rate: float, send: Send, requests: int) -> list[Answer]:
    """Sends requests at times with exponential gaps, which are the same in every run."""
    times = np.cumsum(np.random.default_rng(0).exponential(1 / rate, requests))
    began = time.perf_counter()

    async def at(number: int) -> Answer:
        await asyncio.sleep(times[number] - (time.perf_counter() - began))
        return await send(number)

    return list(await asyncio.gather(*(at(number) for number in range(requests))))


async def _load(address: str, work: Work, arrive: Arrivals, requests: int) -> tuple[float, list[Answer]]:
    prompts = np.random.default_rng(1).integers(0, work.model.vocab_size, (requests, work.prompt_tokens))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)

        async def send(number: int) -> Answer:
            content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=prompts[number].tolist())
            request = jetstream_pb2.DecodeRequest(token_content=content, max_tokens=work.new_tokens)
            began, first, tokens = time.perf_counter(), 0.0, 0
            try:
                async for reply in stub.Decode(request):
                    tokens += len(reply.stream_content.samples[0].token_ids)
                    first = first or time.perf_counter() - began
            except grpc.aio.AioRpcError as error:
                return Answer(0.0, 0.0, 0, error.code().name)
            return Answer(first, time.perf_counter() - began, tokens)

        began = time.perf_counter()
        answers = await arrive(send, requests)
        return time.perf_counter() - began, answers


def _summary(preset: str, load: str, seconds: float, answers: list[Answer]) -> dict[str, Any]:
    served = [a for a in answers if a.error is None]
    tokens = sum(a.tokens for a in served)
    result: dict[str, Any] = {
        "bench": "serve",
        "preset": preset,
        "load": load,
        "device": jax.devices()[0].device_kind,
        "requests": len(answers),
        "served": len(served),
        "errors": dict(collections.Counter(a.error for a in answers if a.error)),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "requests_per_s": len(served) / seconds,
    }
    if served:
        for name, times in (("first_token", [a.first for a in served]), ("latency", [a.latency for a in served])):
            result |= {f"{name}_p{percentile}": float(np.percentile(times, percentile)) for percentile in (50, 90, 99)}
    return result | {"peak_bytes": peak_bytes()}


class _NoText:
    """The codec of a server whose clients send token ids and read no text."""

    def encode(self, text: str) -> list[int]:
        raise ValueError("this server takes token ids")

    def decode(self, ids) -> str:
        return ""
