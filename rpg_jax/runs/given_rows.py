"""Rows that a Python program hands over. They become a file beside the runs, read and digested as every other file."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax import storage

FOLDER = "rows"


def write(rows: Sequence[Mapping[str, Any]], run_dir: str) -> str:
    """Writes rows to `run_dir`/rows/DIGEST.jsonl and returns the path; equal rows are one file.

    Where `run_dir` is in a bucket, the file is in runs/rows here: every host of a run reads its own.

    Raises:
      ValueError: a row is no object, or holds what JSON does not; the message has its number. Or `run_dir` has a comma.
    """
    content = "".join(_line(number, row) + "\n" for number, row in enumerate(rows)).encode()
    folder = Path("runs" if storage.in_bucket(run_dir) else run_dir) / FOLDER
    if "," in str(folder):
        raise ValueError(f"run.dir={run_dir!r} has a comma, which separates the files of task.train: choose another")
    file = folder / f"{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_atomically(file, content)
    return str(file)


def listed(rows: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The rows of a list, an iterator or a data set. Raises ValueError for none, or for splits in place of rows."""
    if isinstance(rows, Mapping):
        raise ValueError(f"{name} has the splits {[*rows]}: give the rows of one, as {name}=rows[{next(iter(rows))!r}]")
    if not (found := list(rows)):
        raise ValueError(f"{name} has no rows")
    return found


def split(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(rows to train on, rows to evaluate on): of the latter a tenth, at least one and at most `most`, spread evenly.

    Raises ValueError for a single row.
    """
    if len(rows) < 2:
        raise ValueError("data has one row, and one at least is held out: give held_out=[…] too")
    count = max(1, min(len(rows) // 10, most))
    chosen = {i * len(rows) // count for i in range(count)}
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def _line(number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number}: expected a dict, got {type(row).__name__}")
    for name, value in row.items():
        try:
            json.dumps({name: value}, default=_plain)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number}, {name!r}: {error}; leave this column out") from error
    return json.dumps(dict(row), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """A number or an array of numpy as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of the type {type(value).__name__} is no JSON")
