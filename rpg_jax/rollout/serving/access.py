"""The address of a server, its TLS, the API key that every request needs, and the file that announces the address."""

import contextlib
import dataclasses
import hmac
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from etils import epath

from rpg_jax import storage
from rpg_jax.storage import errors

ENVIRONMENT = "RPG_JAX_API_KEY"  # the variable that may hold a server's API key
CERTIFICATE, PRIVATE_KEY = "RPG_JAX_CERTIFICATE", "RPG_JAX_PRIVATE_KEY"
"""Variables that may hold the texts of a server's PEM files: a launcher fills variables from a store of secrets."""
STALL_SECONDS = 30.0
"""A connection is closed if for so many seconds no whole request head or no body comes, or the client reads nothing."""

_SHORTEST = 16


class ApiKey:
    """A secret that clients send as `Authorization: Bearer KEY`, in HTTP headers or gRPC metadata. The attribute
    `header` is the text "Bearer KEY". Raises ValueError if `text`, the key, has fewer than 16 characters, a space, or a
    character that is not visible ASCII."""

    def __init__(self, text: str):
        if len(text) < _SHORTEST or not all("!" <= letter <= "~" for letter in text):
            raise ValueError(
                f"an API key has at least {_SHORTEST} visible ASCII characters and no space, and this one does not; "
                "make one: openssl rand -hex 32"
            )
        self.header = f"Bearer {text}"

    @classmethod
    def find(cls, file: str | None, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The key in the file `file`; if `file` is None, the key in the variable RPG_JAX_API_KEY of `environment`; None
        without both. White space at the ends of the text does not count. Raises ValueError, which names the file or the
        variable, if the file cannot be read or the text is no key, for example empty."""
        if file is None and ENVIRONMENT not in environment:
            return None
        source = f"the environment variable {ENVIRONMENT}" if file is None else file
        try:
            return cls((environment[ENVIRONMENT] if file is None else Path(file).read_text(encoding="utf-8")).strip())
        except OSError as error:
            raise ValueError(f"the API key's file {file}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def opens(self, authorization: str | None) -> bool:
        """Whether `authorization`, the value of a header or None without one, is "Bearer KEY" with this key. The
        comparison takes the same time for every wrong key that is as long as this key."""
        return hmac.compare_digest((authorization or "").encode("utf-8", "surrogatepass"), self.header.encode())


@dataclasses.dataclass(frozen=True)
class Access:
    """Where a server listens, and what it asks of clients. Raises ValueError if `host` is not loopback and there is no
    TLS or no API key, or if one PEM file lacks the other.

    Attributes:
      host: the address or name of this machine on which the server listens. An IPv6 address may come in brackets.
      certificate, private_key: the paths of TLS's PEM files, the chain and its key; None for plain text.
      key: the API key that every request needs; None serves everybody who reaches the address.
    """

    host: str = "127.0.0.1"
    certificate: str | None = None
    private_key: str | None = None
    key: ApiKey | None = None

    def __post_init__(self):
        object.__setattr__(self, "host", self.host.strip("[]"))
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("TLS needs both --certificate and --private_key")
        if is_loopback(self.host):
            return
        if self.certificate is None:
            variables = f"the variables {CERTIFICATE} and {PRIVATE_KEY}"
            raise ValueError(
                f"host {self.host} is not loopback: it needs TLS, --certificate and --private_key, or {variables}"
            )
        if self.key is None:
            raise ValueError(f"host {self.host} is not loopback: it needs an API key, --api_key_file or {ENVIRONMENT}")

    def check_free(self, flag: str, port: int | None) -> None:
        """Raises ValueError if no server can listen on `port` of the host, for example because another program does.
        The message names `flag`, an option of the command line without its dashes. None and 0 stand for any free port,
        and fail only for a wrong host."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            socket.create_server((self.host, port or 0), family=family).close()
        except OSError as error:
            raise ValueError(
                f"cannot serve on {self.host}:{port}: {os.strerror(error.errno or 0)}; choose another --{flag}"
            ) from error

    def tls(self) -> ssl.SSLContext | None:
        """TLS of an HTTP server; None without a certificate. Raises ValueError if a file cannot be read, is no PEM, or
        is encrypted, or if the key does not belong to the certificate."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.private_key, password="")  # an encrypted key must not ask
        except OSError as error:  # SSLError is one
            raise ValueError(f"TLS with {self.certificate} and {self.private_key}: {error}") from None
        return context


def pem_file(path: str | None, variable: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns `path`; if `path` is None, the path of a new file with the PEM text of the variable `variable` of
    `environment`; None if the variable is missing too. The new file is in memory and ends with this process, so no
    private key stays on a disk. Raises ValueError if the file is needed and the system is not Linux."""
    if path is not None or variable not in environment:
        return path
    if not hasattr(os, "memfd_create"):
        raise ValueError(f"{variable} works on Linux only: put its text into a file, and give the file's name")
    number = os.memfd_create(variable)
    with os.fdopen(number, "w", closefd=False) as file:
        file.write(environment[variable].strip() + "\n")
    return f"/proc/self/fd/{number}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`: an IP address of the loopback interface, or the name localhost. An IPv6
    address may stand in brackets. Names are not resolved."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


_UNSPECIFIED = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}
_ANYWHERE = {"127.0.0.1": "192.0.2.1", "::1": "2001:db8::1"}  # nobody has these; no packet goes there


def address_of(host: str, port: int, *, tls: bool) -> str:
    """The URL http://HOST:PORT, with `tls` https://HOST:PORT, under which clients reach a server on `host`. A `host` of
    "", 0.0.0.0, :: or [::] means all addresses of this machine. HOST is then the address from which this machine sends
    packets to others, by IPv6 for the last two; without a route, loopback. An IPv6 HOST stands in brackets."""
    if host in _UNSPECIFIED:
        host = _UNSPECIFIED[host]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # no route, or no IPv6
            probe.connect((_ANYWHERE[host], 9))
            host = probe.getsockname()[0]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if tls else 'http'}://{host}:{port}"


def file_of(folder: str, name: str | None, port: int) -> epath.Path:
    """The path of the file `name`, which announces a server, in `folder`, which is local or gs://BUCKET/…. Nothing is
    written. `name` None stands for HOST-PORT, with this machine's name. Raises ValueError if the folder is an address
    of another kind, or the name has other signs than letters, digits and "-_.", or begins with none of A-Za-z0-9."""
    name = f"{socket.gethostname()}-{port}" if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][-\w.]*", name):
        raise ValueError(f"--announce_name={name!r} is no file name: letters, digits and -_., a letter or digit first")
    return storage.absolute(folder) / name


@contextlib.contextmanager
def announce(file: epath.Path, address: str) -> Iterator[None]:
    """Writes the line `address` into `file`, whose folder is made, and deletes the file at the end of the block, unless
    another server has written its own address there. The file appears whole, and stays if the process is killed. Raises
    StorageFailure if the file cannot be written or deleted; transient errors are tried again, up to three times."""
    errors.written(lambda: _write(file, address + "\n"), file, alone=True)
    try:
        yield
    finally:
        with errors.named(f"{file} could not be deleted"):
            errors.retried(lambda: _delete(file, address), file)


def _write(file: epath.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if storage.in_bucket(file):
        file.write_text(text, encoding="utf-8")  # an object of a bucket appears whole
    else:
        storage.write_atomically(storage.local(file), text)


def _delete(file: epath.Path, address: str) -> None:
    if file.exists() and file.read_text(encoding="utf-8").strip() == address:
        file.unlink()
