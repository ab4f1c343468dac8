"""Where the servers are: a list, the addresses of a DNS name, or the lines of files. The last two may change."""

import asyncio
import socket
import urllib.parse
from collections.abc import Awaitable, Callable

from etils import epath

from rpg_jax import storage

Look = Callable[[], Awaitable[list[str]]]
"""Looks for the servers' addresses. Raises OSError or ValueError if they cannot be found now."""


def source(text: str, check: Callable[[str], str]) -> list[str] | Look:
    """The addresses that `servers.urls` lists, or a function that looks for them.

    | text | addresses |
    |---|---|
    | `http://HOST:PORT,https://HOST:PORT` | these |
    | `dns://NAME:PORT` | `http://IP:PORT` for each IP of the name, as of a headless service |
    | `dns+https://NAME:PORT` | `https://IP:PORT` for each IP |
    | `file:PATH` | the lines of the file, or of all files of the folder; `#` begins a comment |

    Args:
      check: returns an address, or raises ValueError with what is wrong with it.

    Raises:
      ValueError: no address, two equal ones, or one of another form.
    """
    if text.startswith("file:"):
        path = storage.absolute(text.removeprefix("file:"))
        return lambda: asyncio.to_thread(_lines, path, check)
    scheme, _, place = text.partition("://")
    if scheme in ("dns", "dns+https"):
        return _resolver(text, "https" if scheme == "dns+https" else "http", place, check)
    urls = [check(url.strip()) for url in text.split(",") if url.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"rollout.driver=servers needs different addresses in servers.urls, got {text!r}")
    return urls


def _resolver(text: str, scheme: str, place: str, check: Callable[[str], str]) -> Look:
    try:
        parts = urllib.parse.urlsplit(f"//{place}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name = port = None
    if not name or not port or parts.path:
        raise ValueError(f"servers.urls: {text!r} is not of the form dns://NAME:PORT")
    check(f"{scheme}://{name}:{port}")

    async def look() -> list[str]:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in found})
        return [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]

    return look


def _lines(path: epath.Path, check: Callable[[str], str]) -> list[str]:
    """The addresses in a file, or in all files of a folder but those that are being written.

    A line that is none hides no other. Raises ValueError if all are none.
    """
    files = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else [path]
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    found, faults = set[str](), list[ValueError]()
    for line in filter(None, lines):
        try:
            found.add(check(line))
        except ValueError as fault:
            faults.append(fault)
    if faults and not found:
        raise faults[0]
    return sorted(found)
