"""Chat templates as model repositories ship them: programs of strangers, run in a sandbox that bounds time and size."""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

SEEN = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
"""The keys of a message that a template sees."""
STEPS = 100_000  # turns of loops, calls and filters, and a step for each 1,000 characters that they make
CHARACTERS = 10_000_000  # the longest text
_BITS = 4096  # the largest whole number
_WIDE = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "slice", "batch", "round", "to_bytes")
_WIDEST = 1000  # an option of these
_WIDE_FIELD = re.compile(r"\d{4}|\*")  # of %: four digits, or a width that is an argument


class ChatTemplate:
    """Renders a conversation into the text that the model was trained to continue.

    Args:
      template: Jinja source, or the list of {name, template} that some repositories have ("default" is used).
      special_tokens: texts by the names that the template may write: bos_token, eos_token, ….

    Raises ValueError if the template does not parse or a list has no "default"; KeyError or TypeError for another list.
    """

    def __init__(self, template: str | Sequence[Mapping[str, str]], special_tokens: Mapping[str, str] | None = None):
        if not isinstance(template, str):
            named = {entry["name"]: entry["template"] for entry in template}
            if "default" not in named:
                raise ValueError(f"the chat templates {sorted(named)} have no 'default'")
            template = named["default"]
        # A template comes with downloaded weights: the immutable sandbox keeps it from reaching Python's internals.
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.globals["raise_exception"] = _raise
        try:
            self._environment, self._template = environment, environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, MemoryError, OverflowError, SyntaxError) as error:
            raise ValueError(f"the chat template cannot be compiled: {type(error).__name__}") from error
        self._special_tokens = dict(special_tokens or {})

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, thinking: bool = True, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation, for the model to continue. Several threads may call this.

        Args:
          messages: {"role", "content", …}. Other keys than `SEEN` are hidden, except "tools" of the first message.
          thinking: Qwen3's `enable_thinking`: False asks for an answer without thoughts. Other templates ignore it.
          add_generation_prompt: end the text with the beginning of the assistant's next turn.

        Raises ValueError if the template rejects the messages or fails, tries what the sandbox forbids, takes more than
        100,000 steps (`STEPS`), or makes a text of more than 10,000,000 characters.
        """
        seen = [{key: value for key, value in message.items() if key in SEEN} for message in messages]
        tools = (messages[0].get("tools") if messages else None) or None
        values: dict[str, Any] = {"messages": seen, "tools": tools, "enable_thinking": thinking}
        values |= {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
        self._environment.begin()
        try:
            return _within_limit(self._template.generate(**values))
        except Exception as error:  # a template is a program: it fails in every way
            raise ValueError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, which hides Python's internals from a template. Each rendering has a step budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._left = threading.local()
        self.concat = functools.partial(self._made, "a block", _within_limit)  # type: ignore[method-assign]
        self.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self.filters["_joined"] = _within_limit
        for name, given in self.filters.items():  # the update keeps the mark of a filter that gets the context
            self.filters[name] = functools.update_wrapper(functools.partial(self._made, name, given), given)
        self.filters["_counted"] = _counted
        del self.globals["lipsum"]  # makes texts of any length

    def begin(self) -> None:
        """Gives the present thread a new budget of `STEPS` steps."""
        self._left.steps = STEPS

    def spend(self, steps: int = 1) -> None:
        """Takes steps from the budget. Raises TemplateError if none is left."""
        self._left.steps -= steps
        if self._left.steps < 0:
            raise jinja2.TemplateError(f"it takes more than {STEPS} steps")

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **keywords: Any) -> Any:
        called = functools.partial(super().call, __context)
        return __self._made(getattr(__obj, "__name__", ""), called, __obj, *arguments, **keywords)

    def _made(self, name: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Calls a function, whose options are all arguments but the first. Raises TemplateError if one is too wide, the
        result is too large, or no step is left. Jinja's compiler has no steps, so it computes no text by itself."""
        wide = any(isinstance(option, int) and option > _WIDEST for option in (*arguments[1:], *keywords.values()))
        made = None if wide and name in _WIDE else function(*arguments, **keywords)
        size = len(made) if isinstance(made, str | bytes | list) else 0
        if size > CHARACTERS or (wide and name in _WIDE):
            raise jinja2.TemplateError(f"the result of {name} is too large")
        self.spend(1 + size // 1000)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a sum, product or power. Raises TemplateError, without computing, if the result may be too large."""
        if _size(operator, left, right) > CHARACTERS:
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Budgeted().visit(super()._parse(source, name, filename))


def _within_limit(pieces: Iterable[Any]) -> str:
    """Joins the pieces as texts. Raises TemplateError if the result has more than `CHARACTERS` characters."""
    texts, length = [], 0
    for piece in pieces:
        texts.append(str(piece))
        length += len(texts[-1])
        if length > CHARACTERS:
            raise jinja2.TemplateError(f"its text has more than {CHARACTERS} characters")
    return "".join(texts)


class _Budgeted(NodeTransformer):
    """Changes a template so that every loop counts its iterations, and every concatenation (~) its characters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None, lineno=node.lineno)


@jinja2.pass_context  # so that Jinja does not run it while it compiles
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        context.environment.spend()  # type: ignore[attr-defined]
        yield item


def _size(operator: str, left: Any, right: Any) -> float:
    """Estimates the length of a result. For whole numbers: infinity if it may have more than `_BITS` bits, else 0."""
    if operator == "%":
        return float("inf") if isinstance(left, str | bytes) and _WIDE_FIELD.search(str(left)) else 0
    numbers = [x for x in (left, right) if isinstance(x, int)]
    if len(numbers) == 2:
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return float("inf") if bits > _BITS else 0
    lengths = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
    if operator == "*" and numbers and lengths:
        return lengths[0] * max(numbers[0], 0)
    return sum(lengths)
