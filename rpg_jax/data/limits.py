"""A sandbox for Jinja templates of strangers: no access to Python, an end to loops and calls, a bound on sizes."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

STEPS = 100_000  # turns of loops and calls of a rendering: a conversation takes hundreds
CHARACTERS = 10_000_000  # of a text
_BITS = 4096  # of a whole number


class Limited(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, which keeps a template from Python's internals, with a budget for each rendering."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._left = threading.local()
        self.filters |= {"_counted": _counted, "_joined": _joined}

    def begin(self) -> None:
        """Gives the thread a new budget."""
        self._left.steps = STEPS

    def spend(self) -> None:
        """Takes a step. Raises TemplateError after the last."""
        self._left.steps -= 1
        if self._left.steps < 0:
            raise jinja2.TemplateError(f"it takes more than {STEPS} steps")

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **keywords: Any) -> Any:
        __self.spend()
        return super().call(__context, __obj, *arguments, **keywords)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A sum, product or power. Raises TemplateError before a large one is computed."""
        if _size(operator, left, right) > CHARACTERS:
            raise jinja2.TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Budgeted().visit(super()._parse(source, name, filename))


def joined(pieces: Iterable[Any]) -> str:
    """The texts in a row. Raises TemplateError beyond `CHARACTERS`."""
    texts, length = [], 0
    for piece in pieces:
        texts.append(str(piece))
        length += len(texts[-1])
        if length > CHARACTERS:
            raise jinja2.TemplateError(f"its text has more than {CHARACTERS} characters")
    return "".join(texts)


class _Budgeted(NodeTransformer):
    """Lets every loop count its turns, and every concatenation its characters."""

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


@jinja2.pass_context
def _joined(context: Context, items: Iterable[Any]) -> str:
    return joined(items)


def _size(operator: str, left: Any, right: Any) -> float:
    """About how large a result is: its length, or more than any length for a number of too many bits."""
    numbers = [x for x in (left, right) if isinstance(x, int)]
    if len(numbers) == 2:
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return float("inf") if bits > _BITS else 0
    lengths = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
    if operator == "*" and numbers and lengths:
        return lengths[0] * max(numbers[0], 0)
    return sum(lengths)
