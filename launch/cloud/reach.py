"""Finds what a config names here and workers would lack: they get the files that git tracks, and no others."""

import os
import re
from collections.abc import Iterator

from cloud import files
from cloud.errors import LaunchError
from cloud.job import ROOT

_MADE = ("run.dir", "warm_start.dir")  # folders that a run makes
_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def is_sent(path: str) -> bool:
    """Whether workers get a file, or some file of a folder; a relative `path` starts at the repository's root."""
    inside = (ROOT / path).resolve()
    return inside.is_relative_to(ROOT) and any(
        file == inside.relative_to(ROOT) or inside.relative_to(ROOT) in file.parents for file in files.sent()
    )


def all_is_there(config: dict) -> None:
    """Raises LaunchError with one line for each file, folder and module here that a field names and is not sent.

    A field may hold several names with commas between them, each behind a name of its own (`AIME24=file.jsonl`).
    """
    problems = [
        f"{field}={text}: {path} is on this machine alone, and workers get only what git tracks; git add {path}, or "
        "name what is on the hub or in a bucket (docs/cloud.md)"
        for field, text in _texts(config)
        for path in _paths(text)
        if field not in _MADE and os.path.exists(ROOT / path) and not is_sent(path)
    ]
    if problems:
        raise LaunchError("\n".join(problems))


def _texts(config: dict, group: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{group}{name}.")
        elif isinstance(value, str):
            yield f"{group}{name}", value


def _paths(text: str) -> Iterator[str]:
    """The paths that a text may name: each part itself, and the module of `module:name`."""
    for part in filter(None, (part.rpartition("=")[2].strip() for part in text.split(","))):
        yield part
        if module := _MODULE.match(part):
            path = module[1].replace(".", "/")
            yield from (path, f"{path}.py")
