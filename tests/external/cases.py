"""Expected values that other projects publish: one JSON file a project, and how ours are compared with them.

Each file names its origin: repository, commit and date. Each case names the file and the test that state its numbers.
Numbers alone are taken over. `how` says what was done to call our function: `calls` name it with its options.
A `null` is NaN in an input, and an entry that is not compared in an expected array.

`differs` lists what is known to differ, with the reason: {name: {"at": flat indices, "reason": …}}. Those entries must
differ, and all others must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent


def cases(group: str) -> list[Any]:
    """The cases of a group in all files, as pytest parameters."""
    return [
        pytest.param(case, id=f"{file.stem}-{case['test']}-{number}")
        for file in sorted(FOLDER.glob("*.json"))
        for number, case in enumerate(json.loads(file.read_text(encoding="utf-8")).get(group, []))
    ]


def array(numbers: Any) -> np.ndarray:
    return np.asarray(numbers, float)


def padded(numbers: Any, shape: tuple[int, int], padding: float = np.nan) -> np.ndarray:
    """The rows of `numbers` in a larger array: one shape for all cases, so that each operation compiles once."""
    rows = array(numbers)
    large = np.full(shape, padding, np.float32)
    large[: rows.shape[0], : rows.shape[1]] = rows
    return large


def compare(case: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Fails unless `ours` agree with case["expected"] everywhere but at the entries of case["differs"].

    Tolerances are the case's. They are those of the project's own test where it prints a few digits, and the rounding
    of f32 where its numbers are exact.
    """
    for name, expected in case["expected"].items():
        theirs, mine = array(expected).ravel(), array(ours[name]).ravel()
        assert theirs.shape == mine.shape, name
        agree = np.isclose(mine, theirs, rtol=case["rtol"], atol=case.get("atol", 1e-7)) | np.isnan(theirs)
        known = case.get("differs", {}).get(name, {"at": []})["at"]
        assert np.flatnonzero(~agree).tolist() == known, f"{name}: ours {mine}, theirs {theirs}"
