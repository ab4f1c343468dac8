"""Reads run folders that a run may still be writing, or that a killed run left in the middle of a line."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rpg_jax.storage.json_files import read_if_there

INPUTS = "inputs.json"
START = "weights before the first step"  # in INPUTS


class Line(NamedTuple):
    """A line of a JSON-lines file: its object, and its bytes without the line break."""

    record: dict[str, Any]
    content: bytes


def read_lines(path: Path) -> tuple[list[Line], bytes]:
    """The lines of a JSON-lines file, and the bytes of a last line that a kill or a full disk cut short.

    Raises:
      ValueError: an earlier line is broken; the message has the file and the line's number.
    """
    *complete, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    lines = [Line(_record(path, number, content), content) for number, content in enumerate(complete, start=1)]
    try:  # an object without its line break is whole too
        return ([*lines, Line(_record(path, len(lines) + 1, last), last)], b"") if last else (lines, b"")
    except ValueError:
        return lines, last


def _record(path: Path, number: int, content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
        if not isinstance(record, dict):
            raise ValueError(f"expected an object, got {type(record).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number}: {error}; remove this line") from error
    return record


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file that a run may still be writing; a file that does not exist has none.

    Raises ValueError as `read_lines` does.
    """
    return [line.record for line in read_lines(path)[0]]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads one record for each step, in order. A resumed run can repeat a step: its later record counts."""
    by_step = {record["step"]: record for record in read_jsonl(run_dir / "metrics.jsonl") if "step" in record}
    return [by_step[step] for step in sorted(by_step)]


def read_config(run_dir: Path) -> dict[str, Any]:
    """Reads the resolved config as nested dicts; {} if the run ended before it wrote one."""
    return read_if_there(run_dir / "config.json")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts; names become dotted."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def read_versions(run_dir: Path) -> dict[str, Any]:
    """Reads the commit, the packages and the machine of the run; {} if the run ended before it wrote them."""
    return read_if_there(run_dir / "versions.json")


def read_start(run_dir: Path) -> str:
    """Reads the checksum of the weights before the first step; "" if the run did not write it."""
    return read_if_there(run_dir / INPUTS).get(START, "")


def series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The steps at which a metric is a finite number, and its values there."""
    points = [(record["step"], record[key]) for record in records if _is_finite(record.get(key))]
    return [step for step, _ in points], [float(value) for _, value in points]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
