"""A connection to one process of a trainer. It outlives breaks of the network: calls are repeated, reads go on."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.serving.access import ApiKey, is_loopback

CERTIFIED_NAME = "rpg-fleet"
"""The name in the certificate of every trainer: workers trust one certificate, whatever the host is called."""

_TIMEOUT = 60.0  # seconds of a call
_READ_TIMEOUT = 3600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.0
_SAY_AFTER, _SAY_EVERY = 5.0, 60.0  # seconds of silence
_OPTIONS = [
    ("grpc.max_receive_message_length", messages.LARGEST),
    ("grpc.max_send_message_length", messages.LARGEST),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_PASSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Unreachable(ConnectionError):
    """The trainer did not answer for too long, or the caller stopped waiting."""


class Unknown(LookupError):
    """The trainer does not know the session, the worker or the item: it was started again, or went on."""


class Link:
    """Calls the service of one process of a trainer, and says when it is silent. Any thread may call its methods.

    Args:
      address: HOST:PORT.
      key: the fleet's secret, if it has one.
      certificate: PEM file of the certificate to trust; None for plain text.
      patience: seconds of silence after which a call gives up.
      stopped: set when calls should give up at once.

    Raises:
      ValueError: the secret would cross the network in plain text, or the certificate cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        key: ApiKey | None = None,
        certificate: str | None = None,
        patience: float = 3600.0,
        stopped: threading.Event | None = None,
    ):
        self.address, self._patience, self._stopped = address, patience, stopped or threading.Event()
        self._say_at = 0.0
        self._metadata = () if key is None else (("authorization", key.header),)
        if certificate is None:
            if not is_loopback(address.rpartition(":")[0]):
                raise ValueError(f"{address} is not loopback: pass --certificate=FILE, the trainer's certificate")
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            try:
                trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
            except OSError as error:
                raise ValueError(f"the trainer's certificate {certificate}: {error.strerror}") from None
            options = [*_OPTIONS, ("grpc.ssl_target_name_override", CERTIFIED_NAME)]
            self._channel = grpc.secure_channel(address, trusted, options=options)
        self._unary = {name: self._channel.unary_unary(f"/{messages.SERVICE}/{name}") for name in messages.UNARY}
        self._stream = self._channel.unary_stream(f"/{messages.SERVICE}/Read")

    def call(
        self, method: str, head: messages.Head, body: bytes = b"", *, once: bool = False
    ) -> tuple[messages.Head, memoryview]:
        """Calls a method until the trainer answers, or `once`.

        Raises:
          Unreachable: it did not, or the caller stopped waiting.
          Unknown: it does not know this session or worker.
          ValueError: it refuses; the message has its reason.
        """
        message = messages.pack(head, body)
        return self._repeated(
            lambda: messages.unpack(self._unary[method](message, timeout=_TIMEOUT, metadata=self._metadata)),
            patience=0.0 if once else self._patience,
        )

    def read(self, name: str, moved: Callable[[int], None] = lambda size: None) -> tuple[messages.Head, bytearray]:
        """The head and the bytes of an item; a read that breaks goes on where it broke. Raises as `call`.

        `moved` receives the size of each piece that arrives.
        """
        held = bytearray()
        head: messages.Head = {}

        def rest() -> None:
            nonlocal head
            message = messages.pack({"name": name, "offset": len(held)})
            replies = self._stream(message, timeout=_READ_TIMEOUT, metadata=self._metadata)
            head, _ = messages.unpack(next(replies))
            for chunk in replies:
                held.extend(chunk)
                moved(len(chunk))

        self._repeated(rest, patience=self._patience, progress=lambda: len(held))
        if len(held) != head["size"]:
            raise ValueError(f"{self.address} sent {len(held)} of the {head['size']} bytes of {name}")
        return head, held

    def close(self) -> None:
        """Ends the connection; calls under way raise Unreachable."""
        self._channel.close()

    def _repeated(self, attempt: Callable[[], Any], *, patience: float, progress: Callable[[], int] = lambda: 0) -> Any:
        """The result of `attempt`, repeated over breaks of the connection, in growing distances."""
        pause, reached, silent_since = _FIRST_PAUSE, progress(), time.monotonic()
        while True:
            try:
                return attempt()
            except grpc.RpcError as error:
                code, details = error.code(), error.details()
                if code == grpc.StatusCode.NOT_FOUND:
                    raise Unknown(details) from None
                if code not in _PASSES:
                    raise ValueError(f"the trainer at {self.address} says {code.name}: {details}") from None
            except ValueError as error:  # gRPC's own, of a channel that was closed
                raise Unreachable(str(error)) from None
            if progress() != reached:
                pause, reached, silent_since = _FIRST_PAUSE, progress(), time.monotonic()
            silent = time.monotonic() - silent_since
            if silent > patience or self._stopped.wait(pause):
                raise Unreachable(f"the trainer at {self.address} does not answer: {details}")
            self._say(silent, details)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say(self, silent: float, details: str) -> None:
        """Says that the trainer is silent, once a minute, whichever thread waits."""
        if silent >= _SAY_AFTER and time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + _SAY_EVERY
            print(f"no answer from {self.address} since {silent:.0f} s: {details}", file=sys.stderr, flush=True)
