"""The address of a server in a folder, where trainers find it: a file for each server, with one line."""

import contextlib
import re
import socket
from collections.abc import Iterator

from etils import epath

from rpg_jax import storage
from rpg_jax.storage import errors

_ANYWHERE = "192.0.2.1", 9  # an address of RFC 5737 that nobody has; no packet goes there
_UNSPECIFIED = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}


def address_of(host: str, port: int, *, tls: bool) -> str:
    """The URL under which others reach a server that listens on `host`.

    A server that listens everywhere has the address from which this machine would send packets to others.
    """
    if host in _UNSPECIFIED:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(_ANYWHERE)
                host = probe.getsockname()[0]
            except OSError:  # no route to other machines
                host = _UNSPECIFIED[host]
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{'https' if tls else 'http'}://{host}:{port}"


def file_of(folder: str, name: str | None, port: int) -> epath.Path:
    """The file of a server in `folder`, local or gs://BUCKET/…; by default it is called HOST-PORT.

    Raises ValueError if the folder is another kind of address, or the name more or less than one file in it.
    """
    name = f"{socket.gethostname()}-{port}" if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][-\w.]*", name):
        raise ValueError(
            f"--announce_name={name!r} is no file name: use letters, digits and -_., a letter or digit first"
        )
    return storage.absolute(folder) / name


@contextlib.contextmanager
def announced(file: epath.Path, address: str) -> Iterator[None]:
    """While entered, `file` has the address. It is written in one step, and stays if the process is killed.

    In the end it is deleted, unless another server of the same name has replaced it.

    Raises StorageFailure if the file cannot be written, after retries.
    """
    errors.written(lambda: _write(file, address + "\n"), file, alone=True)
    try:
        yield
    finally:
        with errors.named(f"{file} could not be deleted"):
            errors.retried(lambda: _delete(file, address), file)


def _write(file: epath.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if storage.in_bucket(file):
        file.write_text(text)  # an object of a bucket appears whole
    else:
        storage.write_atomically(storage.local(file), text)


def _delete(file: epath.Path, address: str) -> None:
    if file.exists() and file.read_text().strip() == address:
        file.unlink()
