"""The addresses of servers, and calls of them: JSON over HTTP by aiohttp, each with a deadline, in one event loop."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from etils import epath, epy

from rpg_jax import storage
from rpg_jax.rollout.serving.access import ApiKey, is_loopback
from rpg_jax.rollout.weights import RolloutError

with epy.lazy_imports():  # an extra: every run reads the kinds of servers, and few call one
    import aiohttp

CONNECT_SECONDS = 5.0  # the longest wait for a connection
_MOST_BYTES = 2**28  # of an answer
_PASSES = (408, 425, 429, 500, 502, 503, 504)


class ServerError(RolloutError, ValueError):
    """A server's behaviour ends the run: this program has no defect. The message tells the user what to mend."""


class Unavailable(Exception):
    """A server does not answer a call as it should now; a later call may succeed.

    Attributes:
      status: the HTTP status, if the answer has 408, 425, 429, 500, 502, 503 or 504; 0 for every other reason.
      after: the seconds that the server asks to wait; 0 if it does not ask.
      busy: whether the server lives and has no room (429). Otherwise the server may have been started anew.
      fault: whether the request itself may be the cause: the server accepted the connection and gave no answer in
        time, answered 500, broke the completion off, or answered by other weights. A call for the health has none.
    """

    def __init__(self, message: str, *, status: int = 0, after: float = 0.0, fault: bool = False):
        super().__init__(message)
        self.status, self.after, self.fault, self.busy = status, after, fault, status == 429


class Refused(Exception):
    """A server refuses a request, and would refuse it again. The message has the server's reason. `status` is the HTTP
    status of the server's answer; 200 if only its content is wrong."""

    def __init__(self, message: str, *, status: int = 200):
        super().__init__(message)
        self.status = status


class Client:
    """How this process calls servers: the key, TLS and the connections of all calls. One event loop at a time may use a
    client. Raises ValueError if the certificate's file cannot be read or is no PEM.

    Args:
      key: sent as `Authorization: Bearer KEY`; None for no key.
      certificate: the path of a PEM file with the certificates to trust; None for the system's.
      certificate_name: the name in the servers' certificate; None for the host of each address.
      timeout: the most seconds of one `Caller.post`.
    """

    def __init__(
        self,
        *,
        key: ApiKey | None = None,
        certificate: str | None = None,
        certificate_name: str | None = None,
        timeout: float,
    ):
        self.timeout, self._key, self._name = timeout, key, certificate_name
        self._session: aiohttp.ClientSession | None = None
        try:
            self._tls = ssl.create_default_context(cafile=certificate)
        except OSError as error:
            raise ValueError(f"the servers' certificate {certificate}: {error.strerror or error}") from None

    def check(self, url: str) -> str:
        """Returns `url` without slashes at its end. Asks no server. Raises ValueError if `url` is no http or https
        address, which may have a port and a path, or if the key would go to another machine in plain text."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, _ = parts.hostname or "", parts.port
            host.encode("idna")  # a look-up does this too: its UnicodeError is a ValueError
        except ValueError:
            host = ""
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.username:
            raise ValueError(f"the server's address {url!r} is not of the form http://HOST:PORT")
        if self._key is not None and parts.scheme == "http" and not is_loopback(host):
            raise ValueError(f"the API key would go to {url} in plain text: give an https address")
        return url.rstrip("/")

    def request(self, method: str, url: str, body: bytes | None, noted: SimpleNamespace) -> Any:
        """Returns an async context manager, which sends a request when it is entered, and gives aiohttp's answer. No
        redirect is followed. `method` is "GET" or "POST"; `body` is JSON, None for no body. `noted.connected` gets the
        time at which the server accepts the connection, in seconds of `time.monotonic`. An event loop must run."""
        if self._session is None:
            self._session = self._opened()
        named = {"server_hostname": self._name} if self._name is not None and url.startswith("https:") else {}
        options: dict[str, Any] = {"allow_redirects": False, "trace_request_ctx": noted, **named}
        return self._session.request(method, url, data=body, **options)

    def without_key(self, text: str) -> str:
        """`text` with "…" in place of the API key, for messages."""
        return text if self._key is None else text.replace(self._key.header.removeprefix("Bearer "), "…")

    async def close(self) -> None:
        """Closes the connections. A later request opens new connections, also in another event loop."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _opened(self) -> aiohttp.ClientSession:
        async def note(_session: Any, context: Any, _params: Any) -> None:
            context.trace_request_ctx.connected = time.monotonic()

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(note)
        return aiohttp.ClientSession(
            # One connection a call: a new process must not get what was meant for the one before it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            headers={"Content-Type": "application/json"}  # vLLM refuses others
            | ({} if self._key is None else {"Authorization": self._key.header}),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )


class Caller:
    """Calls one server at `url`, an address from `client.check`. Calls may be under way at the same time. A call raises
    ServerError if this process has too many open files."""

    def __init__(self, url: str, client: Client):
        self.url, self._client = url, client
        self._under_way = dict[asyncio.Timeout, SimpleNamespace]()

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[Any, float]:
        """Posts `body` as JSON. Returns two things: the answer's JSON as a Python value, None for an empty answer; and
        when the server accepted the connection, in seconds of `time.monotonic`. Raises Unavailable if the call fails,
        is not over within the client's timeout, or the status is 408, 425, 429, 500, 502, 503 or 504; Refused for every
        other status than 200, and for an answer that is not JSON."""
        status, content, connected = await self._answer("POST", path, json.dumps(body).encode(), self._client.timeout)
        if status != 200:
            raise Refused(self._said(path, status, content), status=status)
        try:
            return (json.loads(content) if content.strip() else None), connected
        except (ValueError, RecursionError):
            raise Refused(f"{self.url}{path} answered no JSON: {content[:80]!r}") from None

    async def look(self, timeout: float, path: str = "/health") -> None:
        """Sends a GET and returns once the server answers; 404 is an answer too. Raises Unavailable if no answer comes
        within `timeout` seconds, or the status is 408, 425, 429, 500, 502, 503 or 504."""
        await self._answer("GET", path, None, timeout)

    def break_off(self) -> None:
        """Ends all calls of this `Caller` that are under way: they raise Unavailable. Does not wait for them."""
        for limit, noted in self._under_way.items():
            if not limit.expired():
                noted.broken = True
                limit.reschedule(0)  # at once

    async def _answer(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes, float]:
        """Sends a request, and returns the answer's status, its content, and the time of the connection. Raises
        Unavailable without an answer in `timeout` seconds, and for a status in `_PASSES`."""
        noted, limit = SimpleNamespace(connected=None, broken=False), asyncio.timeout(timeout)
        asks = body is not None  # a call for the health has nothing of a request
        try:
            async with limit:
                self._under_way[limit] = noted
                async with self._client.request(method, self.url + path, body, noted) as answer:
                    content = await _read(answer)
        except TimeoutError:  # the timeout of `limit`, or aiohttp's timeout of the connection
            if noted.broken:
                raise Unavailable(f"{self.url}{path}: broken off, the server is silent") from None
            connected = noted.connected is not None
            what = f"no answer in {timeout:g} s" if connected else "it does not accept the connection"
            raise Unavailable(f"{self.url}{path}: {what}", fault=connected and asks) from None
        except (OSError, aiohttp.ClientError) as error:
            # The messages of aiohttp repeat the address, so the error number gives the reason. Errors of TLS keep their
            # message: it says more than the number.
            number = None if isinstance(error, aiohttp.ClientSSLError) else getattr(error, "errno", None)
            if number == errno.EMFILE:
                what = f"this process has too many open files to call {self.url}: raise the limit, as by ulimit -n"
                raise ServerError(f"{what} 65536, or lower servers.parallel") from None
            named = number and (os.strerror(number) if number > 0 else getattr(error, "strerror", ""))  # < 0: DNS
            reason = named or str(error) or type(error).__name__
            raise Unavailable(f"{self.url}{path}: {reason}") from None
        finally:
            self._under_way.pop(limit, None)
        if answer.status in _PASSES:
            text, said = answer.headers.get("Retry-After", ""), self._said(path, answer.status, content)
            after, fault = float(text) if text.isdecimal() else 0.0, asks and answer.status == 500
            raise Unavailable(said, status=answer.status, after=after, fault=fault)
        return answer.status, content, noted.connected

    def _said(self, path: str, status: int, content: bytes) -> str:
        text = self._client.without_key(" ".join(content[:300].decode(errors="replace").split()))
        if status == 401:
            text = "it has another API key; a trainer reads RPG_JAX_SERVERS_KEY, and evaluate --api_key_file"
        return f"{self.url}{path} answered {status}: {text}"


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises ClientPayloadError if the body is cut short, or has more than 256 MiB."""
    content = bytearray()
    async for part in answer.content.iter_any():
        content += part
        if len(content) > _MOST_BYTES:
            raise aiohttp.ClientPayloadError(f"an answer of more than {_MOST_BYTES} bytes")
    return bytes(content)


Look = Callable[[], Awaitable[list[str]]]
"""Looks for the servers' URLs, which may be none. Raises if they cannot be found now."""


def source(text: str, check: Callable[[str], str], field: str = "servers.urls") -> list[str] | Look:
    """Returns the addresses that `text`, the value of a config field, lists, or an async function that finds addresses.
    The function may find no address, and raises if it cannot look now.

    | text | result |
    |---|---|
    | `http://HOST:PORT,https://HOST:PORT` | the list of these addresses |
    | `dns://NAME:PORT` | a function that finds `http://IP:PORT` for each IP of the name, as of a headless service |
    | `dns+https://NAME:PORT` | a function that finds `https://IP:PORT` for each IP |
    | `file:PATH` | a function that reads the lines of the file, or of all files of the folder; `#` begins a comment |

    Args:
      check: returns the URL to use for a URL, or raises ValueError with what is wrong with the URL. A function that
        reads files skips wrong lines, and raises ValueError if all lines are wrong.
      field: the name of the field, for messages.

    Raises ValueError at once for an empty list, an address twice, a wrong form, or as `check` for an address in `text`.
    """
    if text.startswith("file:"):
        path = storage.absolute(text.removeprefix("file:"))
        return lambda: asyncio.to_thread(_lines, path, check)
    if text.startswith(("dns://", "dns+https://")):
        return _resolver(text, check, field)
    urls = [check(url.strip()) for url in text.split(",") if url.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"{field}={text!r}: give http://HOST:PORT of each server once, with commas between")
    return urls


def _resolver(text: str, check: Callable[[str], str], field: str) -> Look:
    parts = re.fullmatch(r"dns(\+https)?://([^/:]+):(\d+)", text)
    if parts is None:
        raise ValueError(f"{field}={text!r} is not of the form dns://NAME:PORT")
    scheme, name, port = "https" if parts[1] else "http", parts[2], int(parts[3])
    check(f"{scheme}://{name}:{port}")

    async def look() -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in found})
        return [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]

    return look


def _lines(path: epath.Path, check: Callable[[str], str]) -> list[str]:
    """The distinct addresses, sorted, in a file, or in all files of a folder whose names do not begin with a dot. Lines
    that `check` refuses are skipped. Raises ValueError if `check` refuses all, OSError if a file cannot be read."""
    files = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else [path]
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found, faults = set[str](), list[ValueError]()
    for line in filter(None, lines):
        try:
            found.add(check(line))
        except ValueError as fault:
            faults.append(fault)
    if faults and not found:
        raise faults[0]
    return sorted(found)
