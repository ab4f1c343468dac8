"""Leases: one process at a time writes a run, on this machine, on a shared disk or in a bucket.

A lease is a small JSON file beside the run, `.owners/NAME.json`, that names the process that holds it. The owner counts
up its `beat` every few seconds. It changes the file only if nobody else has changed it since: under a file lock, in a
bucket by the object's generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etils import epath

from rpg_jax.storage.files import in_bucket, write_atomically

BEAT_SECONDS = 10.0
STALE_SECONDS = 45.0  # an owner whose beat stands still for so long is gone


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a lease.

    Attributes:
      host, process: the name of the machine, and the number of the process there.
      space: the boot of the machine and the namespace of the number `process`; "" where the system does not tell.
      started: when the process began, in the kernel's ticks; a later process of the same number has another value.
      since: when the process asked for the lease, as text for people.
      token: a text that no other lease has.
      beat: how often the process has written the lease.
    """

    host: str
    process: int
    space: str
    started: str
    since: str
    token: str
    beat: int = 0

    def __post_init__(self):
        if type(self.process) is not int or not 0 < self.process < 2**31:
            raise ValueError(f"{self.process!r} is no number of a process")

    @classmethod
    def this_process(cls) -> Owner:
        """Returns the present process, as the owner of a new lease, with a new token and beat 0."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        token = secrets.token_hex(8)
        return cls(socket.gethostname(), os.getpid(), _space(), _started(os.getpid()) or "", since, token)

    @property
    def ended(self) -> bool | None:
        """Whether the process is gone; None if that is not known: it is of another machine or namespace, or hidden."""
        if not self.space or self.space != _space():
            return None
        started = _started(self.process)
        return None if started is None else started != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Lease(contextlib.AbstractContextManager["Lease"]):
    """A context in which this process alone may write the folder `home`; entered once. A thread renews the lease.

    Entering takes the lease, from an owner that is gone too. If the owner lives on this machine, entering raises
    ValueError at once. An owner elsewhere is gone once its beat stands still for `stale_seconds`; clocks need not
    agree. If its beat goes on for twice this time, entering raises ValueError. Leaving gives the lease up. If another
    process takes the lease inside the context, a thread calls `lost` with a line that names the other process. The
    present process must then end.
    """

    def __init__(
        self,
        home: epath.Path,
        lost: Callable[[str], None],
        *,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        self._home, self._lost = home, lost
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._cell = _cell(home.parent / ".owners" / f"{home.name}.json")
        self._owner, self._version = Owner.this_process(), None
        self._ending = threading.Event()
        self._heart = threading.Thread(target=self._beats, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Takes the lease. Raises ValueError if another process holds it; the message names that process."""
        self._take()
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._heart.join()
        with contextlib.suppress(Exception):  # the run has ended; a lease that stays is taken over
            self._cell.swap(None, self._version)

    def _take(self) -> None:
        began = changed = time.monotonic()
        seen = None
        while True:
            found, version = self._read()
            now = time.monotonic()
            if seen is not None and found != seen:
                changed = now
            stale = now - changed > self._stale_seconds
            if found is not None and found.token == self._owner.token:
                self._version = version  # a write that succeeded, and whose answer was lost
                return
            if found is None or found.ended or stale:
                if self._swap(version):
                    return self._tell(f"is taken over from {found}, which is gone") if found else None
                continue  # another process was faster
            if found.ended is False or now - began > 2 * self._stale_seconds:
                raise ValueError(
                    f"{self._home} is being written by {found}. Stop that run or wait for its end, or give this one "
                    "another --config.run.name"
                )
            if seen is None:
                self._tell(f"is held by {found}; waiting up to {2 * self._stale_seconds:g} s for a sign of life")
            seen = found
            time.sleep(self._beat_seconds / 10)

    def _tell(self, text: str) -> None:
        print(f"{self._home} {text}", file=sys.stderr, flush=True)

    def _beats(self) -> None:
        while not self._ending.wait(self._beat_seconds):
            try:
                if self._swap(self._version):
                    continue
                found, version = self._read()
            except Exception as error:  # no connection, no space: the next beat may succeed
                self._tell(f"got no sign of life from this process: {error}")
                continue
            if found is not None and found.token == self._owner.token:
                self._version = version  # a write that succeeded, and whose answer was lost
            elif found is not None and not self._ending.is_set():
                self._lost(f"{self._home} was taken over by {found}: this process stops writing")
                return
            elif found is None:
                self._version = None  # deleted by hand: taken again at the next beat

    def _read(self) -> tuple[Owner | None, Any]:
        content, version = self._cell.read()
        try:
            return (Owner(**json.loads(content)) if content is not None else None), version
        except (ValueError, TypeError, RecursionError):
            return None, version  # not a lease of this version of the program: nobody holds it

    def _swap(self, version: Any) -> bool:
        owner = dataclasses.replace(self._owner, beat=self._owner.beat + 1)
        written = self._cell.swap(json.dumps(dataclasses.asdict(owner)).encode(), version)
        if written is None:
            return False
        self._owner, self._version = owner, written
        return True


class _File:
    """A local cell: its version is its content, and a lock of the system guards the comparison."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> tuple[bytes | None, Any]:
        content = self._path.read_bytes() if self._path.is_file() else None
        return content, content

    def swap(self, content: bytes | None, version: Any) -> Any:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._path.parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with os.fdopen(lock, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if self.read()[1] != version:
                return None
            if content is None:
                self._path.unlink(missing_ok=True)
                return b""
            write_atomically(self._path, content)
            return content


class _Object:
    """A cell in a bucket: its version is the generation of the object."""

    def __init__(self, address: str):
        from google.cloud import storage as gcs

        bucket, _, name = address.removeprefix("gs://").partition("/")
        self._bucket, self._name = gcs.Client(project=None).bucket(bucket), name

    def read(self) -> tuple[bytes | None, Any]:
        from google.api_core import exceptions

        found = self._bucket.get_blob(self._name)
        if found is None:
            return None, None
        try:
            return found.download_as_bytes(if_generation_match=found.generation), found.generation
        except (exceptions.NotFound, exceptions.PreconditionFailed):  # changed in between
            return self.read()

    def swap(self, content: bytes | None, version: Any) -> Any:
        from google.api_core import exceptions

        blob = self._bucket.blob(self._name)
        try:
            if content is None:
                blob.delete(if_generation_match=version)
                return 0
            blob.upload_from_string(content, if_generation_match=version or 0)
        except (exceptions.NotFound, exceptions.PreconditionFailed):
            return None
        return blob.generation


def _cell(path: epath.Path) -> _File | _Object:
    """Returns a file that a process can change only if it knows the present version. A missing file has version None.

    `read` returns (content or None, version). `swap` writes its content, or deletes the file if the content is None. It
    returns the new version, or None if `version` is out of date.
    """
    return _Object(str(path)) if in_bucket(path) else _File(Path(path))


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        clock = Path("/proc/self/ns/time")  # Linux 5.6 and later: a namespace that shifts the times of processes
        return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink(clock) if clock.exists() else ""])
    except OSError:
        return ""


def _started(process: int) -> str | None:
    """When a process began, in ticks since the boot; "" if it is gone or a zombie; None if /proc hides it (hidepid)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return ""
        except OSError:
            return None
        return None
    return "" if fields[0] in "ZX" else fields[19]
