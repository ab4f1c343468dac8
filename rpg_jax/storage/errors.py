"""Classifies errors of storage, and decides what follows: one rule for disks, buckets and checkpoints.

A ValueError of no known `Kind` is the user's, such as a wrong field or a checkpoint of another run. A user's error
before the run is open ends a command with exit code 2, after which no supervisor starts it again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
PAUSES = (1.0, 4.0, 15.0)  # seconds, beside the retries of gcsfs (6) and TensorStore (32) within each try


class Kind(enum.Enum):
    """The kinds of errors of storage, each with its meaning and its consequence.

    Attributes:
      TRANSIENT: the store did not answer, or asked to be asked again (HTTP 401, 408, 425, 429 and 5xx; a reset; a
        timeout). `retried` asks again. If that fails too, the run ends with exit code 1, and a supervisor starts it
        again. HTTP 401 is transient because tokens are renewed.
      DAMAGE: the store did answer, and a file is gone, or its bytes differ from the bytes that were written. Only then
        may an older checkpoint be used.
      PERMANENT: the store says no (HTTP 403, a missing bucket, a full or read-only disk). The call is not repeated, and
        the data stay. The run ends with exit code 1 too: a right may be granted, and a disk emptied.
      UNKNOWN: nothing tells the kind. The call is not repeated, and no file is moved.
    """

    TRANSIENT = "transient"
    DAMAGE = "damage"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


class StorageFailure(OSError):
    """Storage could not be read or written. `what` is the path, or what was tried; `reason` is the error in one line;
    `kind` is the kind of the error. The message says `what` and `reason`, and what to do now."""

    def __init__(self, what: str, reason: str, kind: Kind):
        super().__init__(f"{what}: {reason}{_FIX[kind]}")
        self.what, self.reason, self.kind = what, reason, kind


_FIX = {
    Kind.TRANSIENT: " (transient, tried several times); nothing was lost: start the same command again",
    Kind.PERMANENT: " (another try would end the same); nothing was lost: mend that, then start the same command again",
    Kind.UNKNOWN: " (an error of unknown kind, so nothing was moved or replaced); start the same command again",
    Kind.DAMAGE: " (gone, or not what was written)",
}
_TRANSIENT_CODES = {401, 408, 425, 429, *range(500, 600)}
_PERMANENT_CODES = {400, 403, 404, 405, 411, 412, 413}
_TRANSIENT_NUMBERS = {
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EINTR", "EIO", "ESTALE", "ETIMEDOUT", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EPIPE"),
    )
}
# By name, as these packages need not be installed: gcsfs, aiohttp, requests, urllib3, google-auth, google-api-core.
_TRANSIENT_NAMES = {
    *("ClientError", "ChecksumError", "RetryError", "TransportError", "RefreshError", "IncompleteRead"),
    *("ProtocolError", "ChunkedEncodingError", "ContentDecodingError"),
    *("TooManyRequests", "ServerError", "ConnectionError", "Timeout"),
}
_PERMANENT_NAMES = {"DefaultCredentialsError", "FileExistsError", "PermissionError"}
_CODE = re.compile(r"http_response_code='(\d{3})'")  # TensorStore puts it into the text of a ValueError
_CODE_FIELDS = ("code", "status", "status_code")  # gcsfs and google-api-core, aiohttp, others
_TEXTS = (  # the first that matches decides; TensorStore's errors begin with a status
    (Kind.PERMANENT, r"No space left on device|OS error (28|30|13|122):|[Qq]uota exceeded|Read-only file system"),
    (Kind.PERMANENT, r"\bPERMISSION_DENIED:|^Forbidden:"),
    (Kind.DAMAGE, r"\b(DATA_LOSS|OUT_OF_RANGE|NOT_FOUND):|checksum verification failed|Error decoding|not found\.$"),
    (Kind.DAMAGE, r"\b(INVALID_ARGUMENT|FAILED_PRECONDITION): .*([Dd]eco(d|mpress)|[Zz]std|[Bb]losc|[Tt]runcated)"),
    (Kind.TRANSIENT, r"\b(UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|INTERNAL|CANCELLED|RESOURCE_EXHAUSTED):"),
    (Kind.TRANSIENT, r"[Cc]onnection (reset|refused|closed|timed out)|[Tt]imed? ?out|Temporary failure in name"),
)


def kind_of(error: BaseException) -> Kind:
    """The kind of an error with its causes: transient if one of them is, else permanent, else damage, else unknown."""
    found = {_own_kind(one) for one in chain(error)}
    return next((kind for kind in (Kind.TRANSIENT, Kind.PERMANENT, Kind.DAMAGE) if kind in found), Kind.UNKNOWN)


def failure(what: object, error: BaseException) -> StorageFailure:
    """Returns a StorageFailure of `what`, by `one_line` and `kind_of` of the error. A StorageFailure stays as it is."""
    return error if isinstance(error, StorageFailure) else StorageFailure(str(what), one_line(error), kind_of(error))


def one_line(error: BaseException) -> str:
    """Returns an error, or the cause that decided its kind, as "TYPE: TEXT" in one line, without the specs of
    TensorStore. A long text keeps its beginning, which names the array, and its end, which names the reason."""
    kind = kind_of(error)
    told = next((one for one in chain(error) if _own_kind(one) is kind), error)
    specs = r"\s*\[(tensorstore_spec|http_response_body|source locations|os_error_code)=.*"
    text = " ".join(re.sub(specs, "", str(told)).split())
    text = text if len(text) <= 300 else f"{text[:150]} ... {text[-140:]}"
    return f"{type(told).__name__}: {text}" if text else type(told).__name__


def retried(call: Callable[[], T], what: object) -> T:
    """The result of `call`, repeated after transient errors: up to three times, after about 1, 4 and 15 s; stderr says
    so. A try may be cut short, so `call` must bear repetition. Raises StorageFailure, which names `what` (the path that
    is read or written), if every try failed transiently, or one failed permanently. Other errors pass unchanged."""
    for number in range(len(PAUSES) + 1):
        try:
            return call()
        except Exception as error:
            kind = kind_of(error)
            if kind is Kind.TRANSIENT and number < len(PAUSES):
                pause = PAUSES[number] * random.uniform(0.8, 1.2)
                say(f"{what}: {one_line(error)}; trying again in {pause:.0f} s")
                time.sleep(pause)
            elif kind in (Kind.TRANSIENT, Kind.PERMANENT):
                raise failure(what, error) from error
            else:
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def named(what: object) -> Iterator[None]:
    """Turns every error of the block into a StorageFailure that names `what`. A StorageFailure stays as it is."""
    try:
        yield
    except StorageFailure:
        raise
    except Exception as error:
        raise failure(what, error) from error


def written(write: Callable[[], object], path: object, *, alone: bool) -> None:
    """Calls `write`, and again after transient errors if this process is `alone`. One of several hosts must not repeat
    `write`, in which hosts wait for each other. Raises StorageFailure, which names `path`, for every error."""
    what = f"{path} could not be written"
    with named(what):
        if alone:
            retried(write, what)
        else:
            write()


def say(message: str) -> None:
    """Prints a line to stderr at once."""
    print(message, file=sys.stderr, flush=True)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error, its cause or else its context, the cause of that, and so on; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _own_kind(error: BaseException) -> Kind:
    """Returns the kind of an error by itself, whatever its causes are."""
    if isinstance(error, StorageFailure):
        return error.kind
    text, names = str(error), {kind.__name__ for kind in type(error).__mro__}
    codes = (
        match[1] if (match := _CODE.search(text)) else None,
        *(getattr(error, name, None) for name in _CODE_FIELDS),
        getattr(getattr(error, "response", None), "status_code", None),  # an error of requests or of the hub's client
    )
    code = next((int(code) for code in map(str, codes) if code.isdecimal()), None)
    if code in _TRANSIENT_CODES:
        return Kind.TRANSIENT
    if code in _PERMANENT_CODES:
        return Kind.PERMANENT
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | EOFError | KeyError | FileNotFoundError):
        return Kind.DAMAGE
    if isinstance(error, OSError) and error.errno is not None:
        return Kind.TRANSIENT if error.errno in _TRANSIENT_NUMBERS else Kind.PERMANENT
    if isinstance(error, TimeoutError | ConnectionError) or names & _TRANSIENT_NAMES:
        return Kind.TRANSIENT
    if names & _PERMANENT_NAMES:
        return Kind.PERMANENT
    if isinstance(error, ValueError | RuntimeError | OSError):
        return next((kind for kind, pattern in _TEXTS if re.search(pattern, text)), Kind.UNKNOWN)
    return Kind.UNKNOWN
