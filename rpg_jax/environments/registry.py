"""The environments by name. A new one is one file here and one line, or a class of your own as module:name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rpg_jax.environments.conversation import Environment
from rpg_jax.rewards.callables import load

Handed = Mapping[str, Any]
"""What a Python program hands over, by the name that the config has: classes, or objects with `reset` and `step`."""
NOTHING: Handed = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Where an environment is.

    Attributes:
      path: "module:Class", or the name of a function that makes the environment.
      pooled: it runs in processes that can be killed, and have no network. Otherwise it runs in the trainer's process,
        which its author then trusts with what the policy writes; it may keep state there.
      handed: what a Python program handed over under the name `path`; None is loaded from `path`.
    """

    path: str
    pooled: bool = True
    handed: Any = dataclasses.field(default=None, compare=False)

    def make(self, options: Mapping[str, Any]) -> Environment:
        """The environment. Raises ValueError if it is none, or does not take the options."""
        factory = load(self.path, "environment") if self.handed is None else self.handed
        if not inspect.isclass(factory) and hasattr(factory, "step"):
            if options:
                raise ValueError(f"{self.path} is an object that is made already: leave environment.options {{}}")
            return checked(factory, self.path)
        try:
            inspect.signature(factory).bind(**options)
        except TypeError as error:
            raise ValueError(f"environment.options {dict(options)} of {self.path}: {error}") from error
        except ValueError:  # some builtin classes have no signature
            pass
        return checked(factory(**options), self.path)


ENVIRONMENTS: dict[str, Declaration] = {
    "guessing": Declaration("rpg_jax.environments.narrowing:Narrowing"),
    "calculator": Declaration("rpg_jax.environments.calculator:Calculator"),
    "tools": Declaration("rpg_jax.environments.tool_use:ToolUse"),
    "verifiers": Declaration("rpg_jax.environments.verifiers_library:Verifiers", pooled=False),
}


def find(name: str, *, in_process: bool = False, handed: Handed = NOTHING) -> Declaration:
    """The environment called `name`, one that was handed over under it, or a user's own at "module:name".

    Raises ValueError if it is none of them.
    """
    if name in handed:
        return Declaration(name, pooled=False, handed=handed[name])
    if name in ENVIRONMENTS:
        known = ENVIRONMENTS[name]
        return dataclasses.replace(known, pooled=known.pooled and not in_process)
    if ":" not in name:
        raise ValueError(f"unknown environment.name {name!r}; known: {', '.join([*ENVIRONMENTS, 'module:name'])}")
    return Declaration(name, pooled=not in_process)


def name_of(environment: Any) -> str:
    """module:qualname of a class or function that makes an environment, or of the class of one.

    Raises ValueError if it is neither.
    """
    if not callable(environment) and not hasattr(environment, "step"):
        raise ValueError(
            f"environment is a name, a class, or an object with reset and step; got {type(environment).__name__}"
        )
    named = environment if hasattr(environment, "__qualname__") else type(environment)
    return f"{named.__module__}:{named.__qualname__}"


def checked(environment: Any, path: str) -> Environment:
    """`environment` itself. Raises ValueError if it does not have what an environment has."""
    for name, arguments in (("reset", ("problem",)), ("step", ("problem", "messages", "completion"))):
        function = getattr(environment, name, None)
        called = f"{name}({', '.join(arguments)})"
        if not callable(function):
            raise ValueError(f"{path} has no {called}: an environment has reset and step, see docs/environments.md")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ValueError(f"{path} is called as {called}: {error}") from error
    return environment
