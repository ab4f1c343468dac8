"""Tools: Python functions with a JSON schema, which a policy may call by name."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from rpg_jax.environments.tool_calls import Call
from rpg_jax.rewards.callables import load
from rpg_jax.rewards.expression import evaluate

TOOLS = {
    "calculator": "rpg_jax.environments.tools:calculator",
    "search": "rpg_jax.environments.table_search:Search",
}
_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("string", (str,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    bool: ("boolean", (bool,)),
    list: ("array", (list,)),
    dict: ("object", (dict,)),
}
_LONGEST = 10_000  # characters of a result


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: as the policy writes it.
      function: takes keywords and returns a text, or something that JSON can hold.
      types: the annotation of each argument.
      required: the arguments without a default.
    """

    name: str
    function: Callable[..., Any]
    types: Mapping[str, Any]
    required: tuple[str, ...]

    @property
    def description(self) -> dict[str, Any]:
        """The tool as chat templates render it, in the form of OpenAI's function calling."""
        about = " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())
        properties = {name: {"type": _TYPES[kind][0]} for name, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def call(self, arguments: Mapping[str, Any]) -> str:
        """What the policy reads: the result as text, or what was wrong with the call, or what the function raised."""
        if unknown := sorted(set(arguments) - set(self.types)):
            return f"error: {self.name} takes {', '.join(self.types)}, not {', '.join(unknown)}"
        if missing := [name for name in self.required if name not in arguments]:
            return f"error: {self.name} needs {', '.join(missing)}"
        for name, value in arguments.items():
            kind, accepted = _TYPES[self.types[name]]
            if not isinstance(value, accepted) or (isinstance(value, bool) and kind != "boolean"):
                return f"error: {name} must be of the type {kind}"
        try:
            result = self.function(**arguments)
            return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))[:_LONGEST]
        except Exception as error:  # the policy chose the arguments
            return f"error: {str(error)[:200] or type(error).__name__}"


def make_tool(name: str, options: Mapping[str, Any]) -> Tool:
    """The tool of that name: one of `TOOLS`, or "module:name", a function, or a class that `options` make callable.

    Its schema comes from the function's annotations (str, int, float, bool, list, dict) and the first paragraph of its
    docstring.

    Raises:
      ValueError: there is none, or an argument has another annotation, or none.
    """
    if name not in TOOLS and ":" not in name:
        raise ValueError(f"unknown tool {name!r}; known: {', '.join([*TOOLS, 'module:name'])}")
    function = load(TOOLS.get(name, name), "tool")
    if inspect.isclass(function) or options:
        function = function(**options)
    called = function if inspect.isroutine(function) else type(function).__call__
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = typing.get_type_hints(called)
    types = {p.name: hints.get(p.name) for p in parameters}
    if strange := [argument for argument, kind in types.items() if kind not in _TYPES]:
        raise ValueError(f"the tool {name!r} must annotate {strange[0]} as str, int, float, bool, list or dict")
    required = tuple(p.name for p in parameters if p.default is p.empty)
    return Tool(name.rpartition(":")[2], function, types, required)


def answer(tools: Mapping[str, Tool], call: Call) -> str:
    """What the policy reads after a call."""
    if call.error is not None:
        return f"error: {call.error}"
    if call.name not in tools:
        return f"error: there is no tool {call.name[:50]!r}; there are {', '.join(tools)}"
    return tools[call.name].call(call.arguments)


def calculator(expression: str) -> str:
    """Works out an expression of numbers with + - * / and parentheses, exactly."""
    value = evaluate(expression)
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"
