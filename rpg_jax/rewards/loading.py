"""Loads what a config or a row names as "module:name": a verifier, an environment, a tool."""

import importlib
from collections.abc import Callable
from typing import Any


def load(path: str, kind: str) -> Callable[..., Any]:
    """What is at "module:name", and can be called.

    Args:
      kind: what it is to be, for the messages: "reward", "environment", "tool".

    Raises:
      ValueError: the path has another form, the module cannot be imported, or it has no such function or class.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"the {kind} {path!r} is not of the form module:name")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r} for the {kind} {path!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"module {module!r} has no function or class {name!r} for the {kind} {path!r}")
    return found
