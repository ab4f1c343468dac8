"""The trainer's gRPC service for workers, and for the other processes of the same trainer."""

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.fleet.hub import Hub, Refused, Stranger
from rpg_jax.rollout.fleet.shelf import Shelf
from rpg_jax.rollout.serving.access import Access
from rpg_jax.storage import journal_records

_THREADS = 256  # calls at one time; a worker has few, and a thread that waits costs little
_READS = 128  # of them that read: reads are long, and signs of life must not wait behind them
_WAIT = 20.0  # seconds that a read waits for its item
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", messages.LARGEST),
    ("grpc.max_send_message_length", messages.LARGEST),
    ("grpc.keepalive_time_ms", 30_000),  # a reader that is stopped must not hold its thread for ever
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


class Service:
    """Serves `hub` and `shelf` at `access`, from `start` to `stop`.

    Args:
      port: 0 takes a free one, which the attribute `port` then holds.

    Attributes:
      trainers: the addresses of all processes of the trainer, this one included.

    Raises:
      ValueError: the port is taken.
    """

    def __init__(self, hub: Hub, shelf: Shelf, access: Access, port: int = 0):
        self._hub, self._shelf, self._key = hub, shelf, access.key
        self.session = secrets.token_hex(8)
        self.trainers: list[str] = []
        self._reading = threading.Semaphore(_READS)
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, "rpg-fleet"), options=_OPTIONS)
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(getattr(self, f"_{name.lower()}")))
            for name in messages.UNARY
        }
        methods["Read"] = grpc.unary_stream_rpc_method_handler(self._read)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(messages.SERVICE, methods),))
        address, credentials = f"{access.host}:{port}", access.grpc_credentials()
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ValueError(f"the fleet's service cannot listen on {address}: {error}") from error

    def start(self, trainers: list[str]) -> None:
        """Begins to serve. A worker that asked earlier is answered now: it must hear of all `trainers`."""
        self.trainers = trainers
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=0.5).wait()

    def _guarded(self, method: Callable[[messages.Head, memoryview], Any]) -> Callable[[bytes, Any], bytes]:
        """A handler that asks for the key, reads the message, and says every refusal with its reason."""

        def handle(message: bytes, context: Any) -> bytes:
            self._check_key(context)
            try:
                head, body = messages.unpack(message)
                if head.get("session", self.session) != self.session:
                    raise Stranger("this trainer is another process than the one that was joined")
                answer = method(head, body)
                return messages.pack(*answer) if isinstance(answer, tuple) else messages.pack(answer)
            except Refused as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except Stranger as error:
                context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(error).__name__}: {error}")
            raise AssertionError("abort raises")

        return handle

    def _check_key(self, context: Any) -> None:
        sent = dict(context.invocation_metadata() or ()).get("authorization")
        if self._key is not None and not self._key.opens(sent):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the trainer asks for its key: --key_file=FILE")

    def _join(self, head: messages.Head, body: memoryview) -> messages.Head:
        self._hub.join(head["worker"], head)
        return {"session": self.session, "spec": self._hub.spec, "trainers": self.trainers}

    def _leave(self, head: messages.Head, body: memoryview) -> messages.Head:
        self._hub.leave(head["worker"])
        return {}

    def _beat(self, head: messages.Head, body: memoryview) -> messages.Head:
        return {"over": self._hub.beat(head["worker"], int(head["progress"]))}

    def _lease(self, head: messages.Head, body: memoryview) -> messages.Head | tuple[messages.Head, bytes]:
        over, lent = self._hub.beat(head["worker"], int(head["progress"])), None
        if not over:
            lent = self._hub.lease(head["worker"], int(head["room"]))
        if lent is None:
            return {"over": over, "places": []}
        job, places = lent
        wire, tokens = messages.request_to_wire(job.request)
        weights = {"weights": f"{job.checksum:016x}", "version": job.version}
        return {"over": False, "places": places, "job": job.number, "request": wire, **weights}, tokens

    def _complete(self, head: messages.Head, body: memoryview) -> messages.Head:
        records, damaged = journal_records.from_bytes(bytes(body))
        if damaged or len(records) != 1:
            raise ValueError(f"one group comes at a time, and whole; {len(records)} came, {damaged} damaged")
        return {"counts": self._hub.complete(head["worker"], *records[0])}

    def _release(self, head: messages.Head, body: memoryview) -> messages.Head:
        self._hub.release(head["worker"], head["job"], head["places"], head["fault"])
        return {}

    def _read(self, message: bytes, context: Any) -> Iterator[bytes]:
        """An item of the shelf: first its head and size, then its bytes from an offset on."""
        self._check_key(context)
        head, _ = messages.unpack(message)
        if not self._reading.acquire(blocking=False):
            context.abort(grpc.StatusCode.UNAVAILABLE, f"{_READS} others read at this time")
        try:
            item = self._shelf.get(head["name"], _WAIT)
            if item is None:
                context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {head['name']} (any more)")
                raise AssertionError("abort raises")
            yield messages.pack({**item.head, "size": item.size})
            yield from item.chunks(int(head["offset"]))
        finally:
            self._reading.release()
