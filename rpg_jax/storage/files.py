"""Files of runs, on local disk or in a Google Cloud Storage bucket, and the JSON in them.

Weights go to a bucket directly. All other files are small, and some libraries write only local files. So these files
have a local folder. It is fetched from the bucket at the start, and every change is then copied to the bucket.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import json
import math
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from etils import epath

from rpg_jax.storage import errors

_IN_PLACE = ("checkpoints", "reference", "initial", "base", "journal")  # subfolders that a run writes there directly
_COPY_SECONDS = 30.0


def absolute(address: str | Path | epath.Path) -> epath.Path:
    """The absolute path of a local address, with links followed, or gs://BUCKET/FOLDER as a path. It need not exist.
    Raises ValueError if the address has another form, as s3://…, or a package that buckets need is not installed."""
    text = str(address)
    if not re.match(r"[A-Za-z][\w+.-]*:/", text):
        return epath.Path(os.path.realpath(address))  # epath's own `resolve` follows no links
    if not re.match(r"gs://[a-z0-9][-_.a-z0-9]+[a-z0-9](/|$)", text):
        raise ValueError(f"{text!r} is neither a local path nor gs://BUCKET/FOLDER")
    for module, package in (("gcsfs", "gcsfs"), ("google.cloud.storage", "google-cloud-storage")):
        if not _installed(module):
            raise ValueError(f"{text} needs the package {package}: pip install gcsfs google-cloud-storage")
    import fsspec

    for name in ("gs", "gcs"):  # no cache of listings: tensorstore and other hosts write to the bucket too
        fsspec.config.conf.setdefault(name, {})["use_listings_cache"] = False
    return epath.Path(text.rstrip("/"))


def in_bucket(path: str | epath.Path) -> bool:
    """Returns whether `path` is an address in a bucket, which begins with gs://."""
    return str(path).startswith("gs://")


def local(address: str | Path) -> Path:
    """`address` as a local path, which need not exist. Raises ValueError for gs://… and every other SCHEME:/…."""
    if re.match(r"[A-Za-z][\w+.-]*:/", str(address)):
        raise ValueError(f"{str(address)!r} is no local folder: give one here, and copy it with gcloud storage cp -r")
    return Path(address)


def cache_folder() -> Path:
    """Returns this user's folder for copies of remote files: $XDG_CACHE_HOME/rpg_jax or ~/.cache/rpg_jax. The folder
    may be missing. Raises RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rpg_jax"


def secret() -> bytes:
    """Returns 32 random bytes of this user on this host, the same in every process: the first call writes them into a
    file that only the user can read. Returns b"" without a home folder, or if the file cannot be written or read."""
    with contextlib.suppress(OSError, RuntimeError):
        (file := cache_folder() / "secret").parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            with (file.parent / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():  # of several first calls, one writes
                    write_atomically(file, secrets.token_bytes(32), mode=0o600)
        return file.read_bytes()
    return b""


def local_copy(address: str, patterns: Sequence[str]) -> Path:
    """Copies the files of a bucket's folder, and returns the local folder that keeps the copies for later calls.

    A file is copied again once its size or time in the bucket has changed, and appears whole or not at all. The copy of
    a file that was deleted in the bucket is deleted. One process of a host copies at a time; others wait.

    Args:
      address: gs://BUCKET/FOLDER; never a local path.
      patterns: which files, as "*.safetensors"; one pattern that matches the name is enough. No subfolder may match.

    Raises:
      ValueError: the address is of another scheme, a package that buckets need is not installed, there is no such
        folder, or no file in it matches.
      StorageFailure: the folder cannot be read, after retries, or a copy cannot be written.
    """
    source = absolute(address)
    target = cache_folder() / str(source).removeprefix("gs://")
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.glob(".*.partial"):  # files of a killed process: under the lock, no other process writes
            left.unlink()
        try:
            found = errors.retried(lambda: list(source.iterdir()), address)
            files = [path for path in found if any(map(path.match, patterns))]
            for path in files:
                errors.retried(lambda path=path: _copy_changed(path, target / path.name), path)  # type: ignore[misc]
            for gone in {path.name for path in target.iterdir()} - {path.name for path in found}:
                if any(map(Path(gone).match, patterns)):  # an old index would win over new weights
                    (target / gone).unlink()
        except FileNotFoundError as error:
            raise ValueError(f"cannot read {address}: it does not exist ({error})") from error
        except Exception as error:
            raise errors.failure(address, error) from error
    if not files:
        raise ValueError(f"{address} has no file {' or '.join(patterns)}")
    return target


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object], *, mode: int = 0o666) -> None:
    """Makes or replaces the file at `path` in one step, so that nobody ever reads half of a file.

    A `content` of text is written as UTF-8. A function receives the open binary file and writes to it. A link at `path`
    is replaced. The file never has more permissions than `mode` and the umask allow. Raises ValueError if `path` is a
    device, a pipe or a folder; OSError if its folder is missing or the disk is full.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file, and is not replaced: give another name")
    # A hidden name, so that `Folder` does not copy it; one of this thread, so that two writers do not share it.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.unlink(missing_ok=True)  # the file of a killed process, or somebody's link
        with naming(path), open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of at most 64 MiB, as a dict. Raises ValueError, which names the file, if the
    file is larger or holds anything else; OSError if there is no file."""
    try:
        finite(value := json.loads(read_bytes(file)))  # whoever walks it goes as deep
    except (ValueError, RecursionError) as error:
        reason = "its JSON is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{file} is damaged: {reason}. Copy it again from where it came") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON that people write, as `object_pairs_hook` of `json.loads`: ValueError for a key that repeats,
    which `json` would take from its last place without a word."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return found


def read_bytes(file: Path, most: int = 2**26) -> bytes:
    """The bytes of a file of at most `most` bytes. Raises ValueError if it has more, OSError if there is no file."""
    if file.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return file.read_bytes()


def read_if_there(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; {} if there is no file. Raises ValueError for other content or more than 64 MiB."""
    return read_object(file) if file.exists() else {}


def finite(value: Any) -> Any:
    """A copy of `value` with texts "inf", "-inf" and "nan" for these numbers, which JSON lacks; tuples become lists."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, **options: Any) -> str:
    """The JSON text of `value`, with infinities and NaN as texts, as "inf". `options` are those of `json.dumps`."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, **options)


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`. It becomes `folder` if the block ends without an error; else it is deleted.
    Makes missing parents. Raises OSError, which names `folder`, if `folder` has files when the block ends."""
    partial = (folder := folder.absolute()).with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        with naming(folder):
            partial.mkdir(parents=True)
            yield partial
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Locks a folder for the block, by its inode: another name for the folder (a link, a mount) meets the same lock. A
    file system without locks of folders grants every lock. If the lock is held already, raises ValueError at once, or
    with `wait` says so on stderr and waits for it. Raises FileNotFoundError if there is no folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                fix = "wait for its end, or stop it"
                raise ValueError(f"{folder} is being written by another process: {fix}") from None
            errors.say(f"{folder} is being written by another process: waiting for its end")
            fcntl.flock(number, fcntl.LOCK_EX)
        except OSError:  # network file systems that lock no folders: the lease alone holds it
            pass
        yield
    finally:
        os.close(number)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError of the block that names no file, for example if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


class Folder:
    """A run's folder, local or in a bucket; a context, entered once, that keeps the bucket up to date until the end.

    Raises ValueError if `address` is neither local nor in a bucket, and StorageFailure at the end if a copy fails.

    Attributes:
      home: the folder that lasts; weights and the journal are written to it directly.
      files: the local folder of all other files: `home` itself or, for a bucket, a temporary folder that starts empty.
        Changes in the temporary folder are copied to the bucket every half minute, at `push`, and at the end. At the
        end the temporary folder is deleted, unless its last copy fails.
    """

    def __init__(self, address: str | Path):
        self.home = absolute(address)
        self._remote = in_bucket(self.home)
        # A new folder each time: the files of a killed process are not part of the run, and may be worth a look.
        self.files = Path(tempfile.mkdtemp(prefix="rpg-jax-")) / self.home.name if self._remote else Path(address)
        self._copied: dict[str, tuple[int, int]] = {}
        self._lock, self._done = threading.Lock(), threading.Event()
        self._copier = threading.Thread(target=self._copy_now_and_then, name="bucket", daemon=True)

    def __enter__(self) -> Folder:
        if self._remote:
            self.files.mkdir(parents=True)
            self._copier.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._remote:
            return
        self._done.set()
        self._copier.join()
        try:
            self.push()
        except errors.StorageFailure:
            errors.say(f"{self.home}: not copied; the run's last files are kept in {self.files}")
            raise
        with self._lock:
            shutil.rmtree(self.files.parent)

    def set_aside(self) -> epath.Path:
        """Moves the run with its weights to the first free `replaced/NAME-K` beside it, K from 0. Returns the path."""
        aside = self.home.parent / "replaced"
        with self._lock:
            target = next(t for k in itertools.count() if not (t := aside / f"{self.home.name}-{k}").exists())
            move(self.home, target)
            if self._remote:
                shutil.rmtree(self.files)
                self.files.mkdir()
                self._copied.clear()
        return target

    def fetch(self) -> None:
        """Copies a bucket to `files`, without the subfolders checkpoints, reference, initial, base and journal. A local
        folder is only checked: ValueError if it has a pipe or a device, as a process that reads a pipe may wait for
        ever. Raises StorageFailure if the bucket cannot be read, after retries."""
        if not self._remote:
            for path in self.files.rglob("*"):
                if path.exists() and not (path.is_file() or path.is_dir()):
                    raise ValueError(f"{path} is neither a file nor a folder: no run has one; remove it")
            return
        with errors.named(self.home):
            for name, path in errors.retried(lambda: list(_files(self.home, skipped=_IN_PLACE)), self.home):
                file = self.files / name
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, errors.retried(path.read_bytes, path))
                self._copied[name] = _version(file)

    def push(self) -> None:
        """Copies new and changed files of `files` to the bucket, and deletes the objects there of files that were
        copied or fetched and are gone; returns when that is done. Files whose names begin with a dot are left out. Does
        nothing for a local folder, or after the context. Raises StorageFailure if the bucket cannot be written."""
        if not self._remote:
            return
        with self._lock:
            if not self.files.exists():  # the context has ended; an empty listing would empty the bucket
                return
            found = {str(p.relative_to(self.files)): p for p in self.files.rglob("[!.]*") if p.is_file()}
            for name, file in found.items():
                try:
                    version = _version(file)  # before the read, so that later changes are copied next time
                    content = file.read_bytes() if self._copied.get(name) != version else None
                except FileNotFoundError:  # a tracker's own process has deleted its file since
                    continue
                if content is not None:
                    self._write(name, content)
                    self._copied[name] = version
            for name in self._copied.keys() - found.keys():
                self._write(name, None)
                del self._copied[name]

    def _write(self, name: str, content: bytes | None) -> None:
        """Writes a file in the bucket, or deletes it if `content` is None."""
        target = self.home / name
        with errors.named(target):
            remove, write = lambda: target.unlink(missing_ok=True), lambda: target.write_bytes(content)
            errors.retried(remove if content is None else write, target)

    def shown(self, text: str) -> str:
        """Returns `text` with the path `home` in place of the path `files`, which is temporary for a bucket."""
        return text.replace(str(self.files), str(self.home)) if self._remote else text

    def _copy_now_and_then(self) -> None:
        while not self._done.wait(_COPY_SECONDS):
            try:
                self.push()
            except Exception as error:  # the next copy may succeed
                errors.say(f"{self.home}: not copied, {error}")


def move(source: epath.Path, target: epath.Path) -> None:
    """Renames a folder. In a bucket, copies all objects, then deletes the originals, so that a kill loses no object.
    Makes missing parents; nothing may be at `target`. Errors of disk and bucket are raised as they come."""
    if not in_bucket(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    import fsspec

    bucket = fsspec.filesystem("gs")
    for name, path in _files(source):
        bucket.copy(str(path), str(target / name))  # within the bucket: the bytes do not come here
    source.rmtree()


def _files(folder: epath.Path, prefix: str = "", skipped: tuple[str, ...] = ()) -> Iterator[tuple[str, epath.Path]]:
    """(`prefix` and the name relative to `folder`, path) of all files below `folder`, without its entries `skipped`."""
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name in skipped:
            continue
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name, path


def _copy_changed(source: epath.Path, target: Path) -> None:
    found = source.stat()
    if target.exists() and _version(target) == (found.length, int(found.mtime) * 10**9):
        return
    with source.open("rb") as reader:
        write_atomically(target, lambda writer: shutil.copyfileobj(reader, writer, 1 << 24))
    os.utime(target, (int(found.mtime), int(found.mtime)))  # a kill before this costs another copy


def _version(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
