"""JSON as other programs read it: no Infinity and no NaN; a file is read whole or refused in a line that names it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 64 MiB.

    Raises ValueError, which names the file, if the file is larger or holds anything else; OSError if there is no file.
    """
    try:
        value = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        reason = "its JSON is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ValueError(f"{file} is damaged: {reason}. Copy it again from where it came") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def read_bytes(file: Path, most: int = 2**26) -> bytes:
    """The bytes of a file. Raises ValueError if the file has more than `most` bytes."""
    if file.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return file.read_bytes()


def read_if_there(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file. Raises ValueError as `read_object` does."""
    return read_object(file) if file.exists() else {}


def finite(value: Any) -> Any:
    """`value` with the texts "inf", "-inf" and "nan" in place of these numbers, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: Any, **options: Any) -> str:
    """The JSON of `finite(value)`; `options` are those of `json.dumps`."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, **options)
