"""JSON files that others wrote: read whole, or refused in one line that names the file."""

import json
from pathlib import Path
from typing import Any


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names the file, if it holds anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {_reason(error)}. Copy it again from where it came") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def _reason(error: Exception) -> str:
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
