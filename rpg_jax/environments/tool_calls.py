"""The tool calls in a completion, as Qwen's chat template has the model write them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, NoReturn

_THOUGHTS = "</think>"
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the model has written; `error` says what keeps it from being one, and None if nothing does."""

    name: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Said:
    """A completion in its parts: the `text` outside thoughts and calls, and the `calls` in their order."""

    text: str
    calls: list[Call]


def parse(completion: str) -> Said:
    """The calls `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of a completion, in a time linear in its length.

    What comes before the last `</think>` is a thought, whose calls do not count. A block that is not closed reaches to
    the end. Blanks around the object are allowed, and nothing else.
    """
    text = completion.rpartition(_THOUGHTS)[2]
    return Said(_BLOCK.sub("", text).strip(), [_call(block) for block in _BLOCK.findall(text)])


def _call(block: str) -> Call:
    try:
        found = json.loads(block, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return Call(error=f"this is not JSON: {str(error)[:100]}")
    if not isinstance(found, dict) or set(found) != {"name", "arguments"}:
        return Call(error='a call is {"name": ..., "arguments": {...}}')
    name, arguments = found["name"], found["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call(error="name is a text, and arguments is an object")
    return Call(name, arguments)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
