"""Chat templates as model repositories ship them: Jinja programs, run in a sandbox that ends."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext

from rpg_jax.data.limits import Limited, joined

SEEN = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")


class ChatTemplate:
    """Renders a conversation into the text that the model was trained to continue.

    Args:
      template: Jinja source, or the list of {name, template} that some repositories have (its "default" is taken).
      special_tokens: bos_token, eos_token, … that the template may write.

    Raises:
      ValueError: the template does not parse.
    """

    def __init__(self, template: str | Sequence[Mapping[str, str]], special_tokens: Mapping[str, str] | None = None):
        if not isinstance(template, str):
            named = {entry["name"]: entry["template"] for entry in template}
            if "default" not in named:
                raise ValueError(f"the chat templates {sorted(named)} have no 'default'")
            template = named["default"]
        # A template comes with downloaded weights: the immutable sandbox keeps it from reaching Python's internals.
        environment = Limited(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
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
        """The prompt text; `thinking` is Qwen3's `enable_thinking`, which other templates ignore.

        The template sees the `tools` of the first message as its tools, and of every message the keys `SEEN`.

        Raises:
          ValueError: the template rejects the messages, fails, or tries something that the sandbox forbids; or it
            takes more steps than `limits.STEPS`, or makes a longer text than `limits.CHARACTERS`.
        """
        seen = [{key: value for key, value in message.items() if key in SEEN} for message in messages]
        tools = (messages[0].get("tools") if messages else None) or None
        values: dict[str, Any] = {"messages": seen, "tools": tools, "enable_thinking": thinking}
        values |= {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
        self._environment.begin()
        try:
            return joined(self._template.generate(**values))
        except Exception as error:  # a template is a program: it fails in every way
            raise ValueError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
