"""Errors of cloud commands, by the reasons that a launcher answers by itself; the programs explain the others."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator


class LaunchError(Exception):
    """One line for the user: what is wrong, and the fix."""

    def __init__(self, problem: str, fix: str = "", kind: Kind | None = None):
        self.kind = kind or Kind.OTHER
        super().__init__(f"{problem}; {fix}" if fix else problem)


class Kind(enum.Enum):
    """The reason why a cloud command failed, or why there is no TPU."""

    NOT_FOUND = "not found"
    EXISTS = "already exists"
    STOCKOUT = "no capacity"
    TRANSIENT = "temporary failure"
    LOST = "preempted"
    OTHER = "failed"


# The first pattern that matches decides. A stockout and a quota error are both RESOURCE_EXHAUSTED.
_PATTERNS = (
    (Kind.STOCKOUT, r"no more capacity|not enough (resources|capacity)|RESOURCE_POOL_EXHAUSTED|does not have enough"),
    (Kind.OTHER, r"[Qq]uota (limit|exceeded|.*has been exceeded)|QUOTA_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED"),
    (Kind.EXISTS, r"ALREADY_EXISTS|already exists"),
    (Kind.NOT_FOUND, r"NOT_FOUND|was not found|HTTPError 404|not found: 404|matched no objects|Cannot find"),
    (
        Kind.TRANSIENT,
        r"UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|HTTPError (429|500|502|503|504)|[Tt]oo many requests|"
        r"[Cc]onnection (reset|refused|closed|timed out)|timed out|Temporary failure|network is unreachable|"
        r"Unable to find the server|name resolution",
    ),
)


def classify(stderr: str) -> Kind:
    """The reason why a gcloud, kubectl or xpk command failed, from its stderr."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, stderr)), Kind.OTHER)


class CommandError(LaunchError):
    """A cloud command failed for good. The message is what the command said, advice included, in one line."""

    def __init__(self, command: list[str], stderr: str):
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        first = next((n for n, line in enumerate(lines) if line.startswith("ERROR")), len(lines) - 1)
        said = " ".join(lines[first:]).removeprefix("ERROR:").strip() or "no message"
        super().__init__(f"{' '.join(command[:5])}: {said[:800]}", kind=classify(stderr))


@contextlib.contextmanager
def ignored(kind: Kind) -> Iterator[None]:
    """Ignores commands that fail for this reason."""
    try:
        yield
    except CommandError as error:
        if error.kind is not kind:
            raise
