"""The environment "tools": the policy calls Python functions, reads the results, and answers.

The policy writes a call in the form of Qwen's chat template: <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rpg_jax.environments.environment import Message, Posed, Turn
from rpg_jax.rewards.callables import is_async, load
from rpg_jax.rewards.expression import evaluate
from rpg_jax.rewards.verdicts import check_call
from rpg_jax.rewards.verifiers import BY_SOURCE, ENVIRONMENT, JUDGE, VERIFIERS, name_for_source, resolve

TOOLS = {"calculator": "rpg_jax.environments.tools:calculator"}
_DEFAULT: Mapping[str, Mapping[str, Any]] = {"calculator": {}}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LONGEST = 10_000  # characters of a result
_THOUGHTS = "</think>"
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolUse:
    """Answers a turn with tool calls by the results of the calls. The first turn without a call is the final answer.

    The first message describes the tools to the chat template. A call that cannot be made gets a text "error: …".

    Args:
      tools: options by the name of a tool: "calculator", or "module:name" of a function, or of a class that the
        options make callable.
      verifier: judges the answer without thoughts: a name in `rewards.verifiers.VERIFIERS` except "judge" and
        "environment", "by_source", or "module:function". The score is the reward of the last turn.
      cost: the reward of a turn with n calls is -n · cost.

    Raises ValueError as `make_tool` and `load` do, if the verifier is unknown or a server's, or two tools share a name.
    """

    def __init__(
        self, *, tools: Mapping[str, Mapping[str, Any]] = _DEFAULT, verifier: str = "exact", cost: float = 0.0
    ):
        made = [make_tool(name, options) for name, options in tools.items()]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            raise ValueError(f"two tools have one name: {', '.join(tool.name for tool in made)}")
        found = None if verifier in (BY_SOURCE, JUDGE, ENVIRONMENT) else resolve(verifier)
        if verifier != BY_SOURCE and found is None:
            raise ValueError(f"unknown verifier {verifier!r} of an answer; known: {', '.join([*VERIFIERS, BY_SOURCE])}")
        if found:
            found.load()  # now, not after the first conversations: a name that cannot be imported, an async function
        self._verifier, self._cost = found, float(cost)

    def reset(self, problem: Posed) -> Sequence[Message]:
        """Returns the problem's own messages; the first one has the descriptions of the tools under "tools"."""
        first, *others = problem.messages
        return [{**first, "tools": [tool.description for tool in self._tools.values()]}, *others]

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn:
        """Returns a message of the role "tool" for each call in `completion`; without a call the score and the end."""
        text, calls = parse(completion)
        if not calls:
            return Turn("", self._score(problem, text), True)
        results = [{"role": "tool", "content": answer(self._tools, call)} for call in calls]
        return Turn(results, -self._cost * len(calls))

    def _score(self, problem: Posed, text: str) -> float:
        verifier = self._verifier or VERIFIERS[name_for_source(problem.source)]
        function, arguments = verifier.load(), (text, problem.answer, problem.prompt)
        return float(function(*arguments[: check_call(function, verifier.path, verifier.arguments)]))


def parse(completion: str) -> tuple[str, list[str]]:
    """Returns (the text outside thoughts and calls, without blanks around it; the text of each call, in order). A call
    is <tool_call>{"name": …, "arguments": {…}}</tool_call>. A call without the closing tag reaches to the end of the
    completion. Text up to the last </think> is a thought, and its calls do not count. The time is linear."""
    text = completion.rpartition(_THOUGHTS)[2]
    return _BLOCK.sub("", text).strip(), _BLOCK.findall(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
      name: as the policy writes it.
      function: takes keywords and returns a text, or something that JSON can hold.
      types: the annotation of each argument by its name: str, int, float, bool, list or dict.
      required: the names of the arguments without a default.
    """

    name: str
    function: Callable[..., Any]
    types: Mapping[str, Any]
    required: tuple[str, ...]

    @property
    def description(self) -> dict[str, Any]:
        """The tool for chat templates: OpenAI's JSON schema, with the first paragraph of the function's docstring."""
        about = " ".join((inspect.getdoc(self.function) or "").partition("\n\n")[0].split())
        properties = {name: {"type": _TYPES[kind]} for name, kind in self.types.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.required)}
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Calls the function, and returns the result as text or JSON, cut after 10,000 characters. If an argument is
        unknown, missing or of another type, or the function raises, the text begins with "error: "."""
        if unknown := sorted(set(arguments) - set(self.types)):
            return f"error: {self.name} takes {', '.join(self.types)}, not {', '.join(unknown)}"
        if missing := [name for name in self.required if name not in arguments]:
            return f"error: {self.name} needs {', '.join(missing)}"
        for name, value in arguments.items():
            kind = self.types[name]
            fits = isinstance(value, int | float if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                return f"error: {name} must be of the type {_TYPES[kind]}"
        try:
            result = self.function(**arguments)
            return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))[:_LONGEST]
        except Exception as error:  # the policy chose the arguments
            return f"error: {str(error)[:200] or type(error).__name__}"


def make_tool(name: str, options: Mapping[str, Any]) -> Tool:
    """Imports and returns the tool `name`: "calculator", "module:function", or "module:name" of a class or a function
    that makes the tool's function of the keywords `options`. `Tool.name` is the part after ":". The tool's
    arguments are annotated with str, int, float, bool, list or dict. Raises ValueError if there is no such tool, the
    options do not make one, it is async, or an argument has no such annotation or cannot be given by keyword."""
    if name not in TOOLS and ":" not in name:
        raise ValueError(f"unknown tool {name!r}; known: {', '.join([*TOOLS, 'module:name'])}")
    function = load(TOOLS.get(name, name), "tool")
    try:
        if inspect.isclass(function) or options:
            function = function(**options)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        hints = typing.get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except (TypeError, NameError) as error:
        raise ValueError(f"the tool {name!r} with the options {dict(options)}: {error}") from error
    if is_async(function):
        raise ValueError(f"the tool {name!r} is async: write a plain function")
    types = {p.name: hints.get(p.name) for p in parameters}
    if strange := [p.name for p in parameters if types[p.name] not in _TYPES or p.kind not in _KEYWORDS]:
        known = "str, int, float, bool, list or dict"
        raise ValueError(f"the tool {name!r} must annotate {strange[0]} as {known}, and take it by keyword")
    required = tuple(p.name for p in parameters if p.default is p.empty)
    return Tool(name.rpartition(":")[2], function, types, required)


def answer(tools: Mapping[str, Tool], call: str) -> str:
    """Returns what the policy reads after the text of a call. "error: " begins the text of a call that failed."""
    try:
        found = json.loads(call, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return f"error: this is not JSON: {str(error)[:100]}"
    if not isinstance(found, dict) or set(found) != {"name", "arguments"}:
        return 'error: a call is {"name": ..., "arguments": {...}}'
    name, arguments = found["name"], found["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "error: name is a text, and arguments is an object"
    if name not in tools:
        return f"error: there is no tool {name[:50]!r}; there are {', '.join(tools)}"
    return tools[name].call(arguments)


def calculator(expression: str) -> str:
    """Works out an expression of numbers with + - * / and parentheses, exactly.

    The policy reads the paragraph above. A result that is no whole number is then rounded to 12 significant digits:
    "1/3" gives "0.333333333333". Raises ValueError for a text that is no such expression or has more than 500
    characters, and for a division by zero; OverflowError for such a result beyond 1.8e308.
    """
    value = evaluate(expression)
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"
