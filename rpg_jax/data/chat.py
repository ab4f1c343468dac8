"""Chat templates as model repositories ship them: programs of strangers, which a process of their own renders.

Jinja's immutable sandbox hides Python's internals from a template. The process, not the program, bounds time and
memory: a filter can pad a text to any width, and no list of such filters is complete.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

SEEN = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
"""The keys of a message that a template sees."""
CHARACTERS = 10_000_000  # the longest text
SECONDS = 10  # of CPU for a rendering: a long conversation takes hundredths
_MEBIBYTES = 512  # of address space, with Python


class ChatTemplate:
    """Renders a conversation into the text that the model was trained to continue.

    Args:
      template: Jinja source, or the list of {name, template} that some repositories have ("default" is used).
      special_tokens: texts by the names that the template may write: bos_token, eos_token, ….

    Raises ValueError if it does not compile or a list has no "default"; KeyError or TypeError for another list.
    """

    def __init__(self, template: str | Sequence[Mapping[str, str]], special_tokens: Mapping[str, str] | None = None):
        if not isinstance(template, str):
            named = {entry["name"]: entry["template"] for entry in template}
            if "default" not in named:
                raise ValueError(f"the chat templates {sorted(named)} have no 'default'")
            template = named["default"]
        self._source, self._special_tokens = template, dict(special_tokens or {})
        _renderer.ask(self._source, None)

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, thinking: bool = True, add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation, for the model to continue. Several threads may call this.

        Args:
          messages: {"role", "content", …} of JSON values. Only keys in `SEEN`, and "tools" of the first, are seen.
          thinking: Qwen3's `enable_thinking`: False asks for an answer without thoughts. Other templates ignore it.
          add_generation_prompt: end the text with the beginning of the assistant's next turn.

        Raises ValueError if the template rejects the messages or fails, tries what the sandbox forbids, takes more than
        10 seconds of CPU or 512 MiB of memory (on Linux), or makes a text of more than 10,000,000 characters.
        """
        seen = [{key: value for key, value in message.items() if key in SEEN} for message in messages]
        tools = (messages[0].get("tools") if messages else None) or None
        values: dict[str, Any] = {"messages": seen, "tools": tools, "enable_thinking": thinking}
        values |= {"add_generation_prompt": add_generation_prompt, **self._special_tokens}
        return _renderer.ask(self._source, values)


class _Renderer:
    """The process that renders the templates of this one. It starts when it is needed, also after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, source: str, values: Mapping[str, Any] | None) -> str:
        """Returns the text of a rendering; without `values` it compiles only. Raises ValueError if either fails."""
        try:
            request = json.dumps([source, values, SECONDS]).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat template failed: the messages are no JSON: {error}") from error
        with self._lock:
            lives = self._process is not None and self._process.poll() is None
            process, self._process = self._process if lives else _started(), None  # an interrupt leaves a late reply
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            if not reply:
                ended = process.wait()
                late = f"it takes more than {SECONDS} s of CPU" if ended == -signal.SIGXCPU else f"exit code {ended}"
                raise ValueError(f"the chat template failed: {late}")
            self._process = process
        text, failure = json.loads(reply)
        if failure is not None:
            raise ValueError(failure)
        return text


def _started() -> subprocess.Popen[bytes]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}
    command = [sys.executable, "-P", __file__]  # as a file, which does not import the package around it
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, **pipes, env=variables, start_new_session=True)


_renderer = _Renderer()
os.register_at_fork(after_in_child=_renderer.__init__)  # type: ignore[misc]  # two must not share its pipes


def _serve() -> None:
    """Renders until standard input ends. It reads lines of JSON [source, values or null, seconds], and writes as many
    of [text, error]."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `systemctl stop` sends it to all, before a run's last prompts
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_MEBIBYTES << 20, _MEBIBYTES << 20))
    for line in sys.stdin:
        source, values, seconds = json.loads(line)
        end = int(time.process_time()) + 1 + seconds  # then the kernel ends this process, whatever runs
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        text, error = "", None
        try:
            template = _compiled(source)
            text = "" if values is None else template.render(**values)
            if len(text) > CHARACTERS:
                text, error = "", f"the chat template failed: its text has more than {CHARACTERS} characters"
        except jinja2.TemplateSyntaxError as failure:
            error = f"chat template line {failure.lineno}: {failure.message}"
        except MemoryError:
            error = f"the chat template failed: it takes more than {_MEBIBYTES} MiB of memory"
        except Exception as failure:  # a template is a program: it fails in every way
            error = f"the chat template failed: {type(failure).__name__}: {str(failure)[:200]}"
        print(json.dumps([text, error]), flush=True)


@functools.lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [jinja2.ext.loopcontrols]}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False) -> str:
    """The filter of transformers, with its arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    _serve()
