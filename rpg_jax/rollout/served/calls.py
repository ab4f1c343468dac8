"""Calls of one server: JSON over HTTP, each with a deadline. Those of a batch, or of a server, can be ended at once."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from rpg_jax.rollout.serving.access import ApiKey, is_loopback
from rpg_jax.rollout.weights import RolloutError

CONNECT_SECONDS = 5.0
_MOST_BYTES = 2**28  # of an answer
_PASSES = (408, 425, 429, 500, 502, 503, 504)


class ServerError(RolloutError, ValueError):
    """What servers do, or no longer do, ends the run. It is no fault of the program: its message is for the user."""


class Unavailable(Exception):
    """A server does not answer now.

    Attributes:
      status: of its answer; 0 if there is none.
      after: seconds that it asks to wait.
      busy: it lives, and has no room; otherwise it may have been started anew.
      fault: it had the whole request, which may be what it cannot answer.
    """

    def __init__(self, message: str, *, status: int = 0, after: float = 0.0, fault: bool = False):
        super().__init__(message)
        self.status, self.after, self.fault, self.busy = status, after, fault, status == 429


class Superseded(Exception):
    """A call was not made: its batch has ended, or its server has failed meanwhile."""


class Refused(Exception):
    """A server does not do what it was asked, and would not the next time; the message has its reason.

    Attributes:
      status: of its answer.
    """

    def __init__(self, message: str, *, status: int = 200):
        super().__init__(message)
        self.status = status


class Batch:
    """Calls that end together: `stop` breaks those under way, and a call that begins later breaks at once."""

    def __init__(self) -> None:
        self._lock, self._live = threading.Lock(), set[http.client.HTTPConnection]()
        self.stopped = False

    @contextlib.contextmanager
    def member(self, connection: http.client.HTTPConnection):
        with self._lock:
            self._live.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._live.discard(connection)
            connection.close()

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for connection in self._live:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)  # its thread reads an end; close would not wake it


class Caller:
    """Posts to one server. Any number of threads may.

    Args:
      url: http://HOST:PORT or https://…; paths are added to it.
      key: sent as `Authorization: Bearer KEY`.
      certificate: PEM file to trust; None for the system's.
      timeout: seconds for one call.

    Raises:
      ValueError: the url is none, the file cannot be read, or the key would cross the network in plain text.
    """

    def __init__(self, url: str, *, key: ApiKey | None = None, certificate: str | None = None, timeout: float):
        self.url, self._timeout, self._under_way = url.rstrip("/"), timeout, Batch()
        try:
            parts = urllib.parse.urlsplit(self.url)
            self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ValueError(f"servers.urls: {url!r} is not of the form http://HOST:PORT")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            if parts.scheme == "http" and not is_loopback(self._host):
                raise ValueError(f"the API key would go to {self.url} in plain text: give an https address")
            self._headers["Authorization"] = key.header
        try:
            self._tls = ssl.create_default_context(cafile=certificate) if parts.scheme == "https" else None
        except OSError as error:
            raise ValueError(f"servers.certificate={certificate}: {error.strerror or error}") from None

    def post(self, path: str, body: Mapping[str, Any], batch: Batch, wanted: Callable[[], bool] = lambda: True) -> Any:
        """The JSON of the answer; None if it is empty. Raises Unavailable or Refused. No redirect is followed.

        Raises Superseded if the call is not `wanted` once the server has accepted the connection.
        """
        status, content = self._answer("POST", path, json.dumps(body), self._timeout, batch, wanted)
        if status != 200:
            raise Refused(self._said(path, status, content), status=status)
        try:
            return json.loads(content) if content.strip() else None
        except (ValueError, RecursionError):
            raise Refused(f"{self.url}{path} answered no JSON: {content[:80]!r}") from None

    def look(self, timeout: float) -> None:
        """Returns if the server answers GET /health in time; raises Unavailable if not, or if the status may pass."""
        self._answer("GET", "/health", None, timeout, Batch(), lambda: True)

    def break_off(self) -> None:
        """Ends the calls under way, which raise Unavailable."""
        ended, self._under_way = self._under_way, Batch()
        ended.stop()

    def _answer(
        self, method: str, path: str, body: str | None, timeout: float, batch: Batch, wanted: Callable[[], bool]
    ) -> tuple[int, bytes]:
        """Status and content, where the status is none that passes."""
        deadline = time.monotonic() + timeout
        connection, sent = self._connection(min(CONNECT_SECONDS, timeout)), False
        with batch.member(connection), self._under_way.member(connection):
            try:
                connection.connect()
                if batch.stopped or not wanted():  # now, when `stop` finds a socket: who comes second sees the other
                    raise Superseded
                connection.sock.settimeout(timeout)
                connection.request(method, self._path + path, body, self._headers)
                sent = True
                answer = connection.getresponse()
                content = _read(connection, answer, deadline)
            except TimeoutError:
                what = f"no answer in {timeout:g} s" if sent else "it does not accept the connection, or the request"
                raise Unavailable(f"{self.url}{path}: {what}", fault=sent) from None
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise Unavailable(f"{self.url}{path}: {reason}") from None
        if answer.status in _PASSES:
            after = answer.headers.get("Retry-After", "")
            how: dict[str, Any] = {"after": float(after) if after.isdecimal() else 0.0, "fault": answer.status == 500}
            raise Unavailable(self._said(path, answer.status, content), status=answer.status, **how)
        return answer.status, content

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _said(self, path: str, status: int, content: bytes) -> str:
        text = " ".join(content[:300].decode(errors="replace").split())
        if secret := self._headers.get("Authorization"):
            text = text.replace(secret.removeprefix("Bearer "), "…")
        return f"{self.url}{path} answered {status}: {text}"


def _read(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body. Raises TimeoutError at the deadline, however slowly it comes, and HTTPException if it is cut short."""
    parts, size = [], 0
    while True:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = answer.read1(2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise http.client.HTTPException(f"an answer of more than {_MOST_BYTES} bytes")
    if answer.length:  # read1 does not say that the end came early
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)
