"""The interface of an environment, the environments by name, and their calls as plain JSON.

An environment answers the turns of a policy. Its worker processes import this file, which never loads JAX.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self

from rpg_jax.rewards.callables import NOTHING, Handed, load
from rpg_jax.rewards.verdicts import BadScore, checked_score, failure

Message = Mapping[str, Any]
"""One message of a chat: {"role": …, "content": …}, both text.

Chat templates also see `name`, `reasoning_content`, `tool_calls` and `tool_call_id`, and the descriptions of tools
under `tools` of the first message. An environment may add keys with values of JSON: its `step` gets them back.
"""
ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Posed:
    """A problem as an environment sees it: fields of `data.Problem`, all of them text. `prompt` is the user's turn with
    its prompt template, `question` the problem without the template, `answer` the reference answer ("" for none),
    `system` the system turn ("" for none), `source` the task or data set."""

    prompt: str
    answer: str
    question: str
    system: str = ""
    source: str = ""

    @classmethod
    def of(cls, problem: Any) -> Self:
        """Takes the fields from a `data.Problem`."""
        return cls(*(getattr(problem, field.name) for field in dataclasses.fields(cls)))

    @property
    def messages(self) -> list[Message]:
        """The messages of the prompt: the system turn, if any, and `prompt` as the user's turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclasses.dataclass(frozen=True)
class Turn:
    """An environment's answer to one turn of the policy.

    Attributes:
      observation: what the policy reads next: messages, or a text, which is a user's message. Ignored if `done`.
      reward: the reward of the turn, within ±1e6; a completion's reward is the sum over its turns.
      done: the conversation is over.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """The methods of a user's environment. The keywords of its class are the config's `environment.options`. In worker
    processes both methods must be pure: equal arguments give equal results, and nothing is kept between two calls. Any
    process may run a call, and a new process replaces a killed process. Each method may be a coroutine function."""

    def reset(self, problem: Posed) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Returns the messages of the prompt, at least one. The last one is not the assistant's."""
        ...

    def step(self, problem: Posed, messages: Sequence[Message], completion: str) -> Turn | Awaitable[Turn]:
        """Answers a turn of the policy: an observation, a reward, and whether the conversation is over.

        Args:
          problem: the problem that `reset` was given.
          messages: the conversation before the turn, the messages of `reset` first.
          completion: the text of the turn, without its stop token.
        """
        ...


METHODS = {"reset": ("problem",), "step": ("problem", "messages", "completion")}
"""The methods of an environment and the names of their arguments."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Where an environment is, and where it runs.

    Attributes:
      path: "module:Class", or "module:function" of a function that makes the environment.
      pooled: the environment runs in processes that can be killed and have no network. Otherwise the environment runs
        in the trainer's process and may keep state there. Its author then answers for every text that a policy writes.
      handed: the class or object that a Python program handed over under the name `path`; None: `path` is loaded.
    """

    path: str
    pooled: bool = True
    handed: Any = dataclasses.field(default=None, compare=False)

    def make(self, options: Mapping[str, Any]) -> Environment:
        """Returns a new environment, made with `options` as keywords; or `handed`, if `handed` is an object. An object
        takes no options. Raises ValueError if `path` cannot be imported, `options` do not fit, or `reset(problem)` or
        `step(problem, messages, completion)` is missing; and what the class itself raises."""
        factory = load(self.path, "environment") if self.handed is None else self.handed
        if not inspect.isclass(factory) and hasattr(factory, "step"):
            if options:
                raise ValueError(f"{self.path} is an object that is made already: leave environment.options {{}}")
            return _checked_environment(factory, self.path)
        try:
            inspect.signature(factory).bind(**options)
        except TypeError as error:
            raise ValueError(f"environment.options {dict(options)} of {self.path}: {error}") from error
        except ValueError:  # some builtin classes have no signature
            pass
        return _checked_environment(factory(**options), self.path)


ENVIRONMENTS: dict[str, Declaration] = {
    "tools": Declaration("rpg_jax.environments.tools:ToolUse"),
}


def find(name: str, *, in_process: bool = False, handed: Handed = NOTHING) -> Declaration:
    """Returns the declaration of the environment `name`: a name in `handed` or in `ENVIRONMENTS`, or a user's own
    "module:name". Imports nothing. With `in_process` the environment runs in the trainer's process; what is in `handed`
    always does. Raises ValueError for a name without ":" that is unknown."""
    if name in handed:
        return Declaration(name, pooled=False, handed=handed[name])
    if name not in ENVIRONMENTS and ":" not in name:
        raise ValueError(f"unknown environment.name {name!r}; known: {', '.join([*ENVIRONMENTS, 'module:name'])}")
    found = ENVIRONMENTS.get(name) or Declaration(name)
    return dataclasses.replace(found, pooled=found.pooled and not in_process)


def _checked_environment(environment: Any, path: str) -> Environment:
    """Returns `environment` itself. Raises ValueError if a method of `METHODS` is missing or takes other arguments."""
    for name, arguments in METHODS.items():
        function = getattr(environment, name, None)
        called = f"{name}({', '.join(arguments)})"
        if not callable(function):
            raise ValueError(f"{path} has no {called}: an environment has reset and step, see docs/environments.md")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ValueError(f"{path} is called as {called}: {error}") from error
    return environment


def checked_messages(value: Any) -> list[dict[str, Any]]:
    """Returns `value`, a sequence of messages, as a list of new dicts with the same keys. Raises BadScore for another
    value, a message without a role of `ROLES` or a text as content, and a content that UTF-8 cannot hold."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise BadScore(f"messages are a list, got {type(value).__name__}")
    for message in value:
        if not isinstance(message, Mapping):
            raise BadScore(f"a message is a dict with role and content, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise BadScore(f"a message has a role of {', '.join(ROLES)} and a text as content, got {role!r:.40}")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise BadScore(f"a message that is no text: {error.reason} at character {error.start}") from error
    return [dict(message) for message in value]


def checked_turn(value: Any) -> dict[str, Any]:
    """Returns the `Turn` `value` as {"observation": messages, "reward": float, "done": bool}; [] as messages if done.
    Raises BadScore for another value, for a field of another type, for a reward that is not within ±1e6, and for a turn
    that is not done and has no message. A text, also "", is a message."""
    if not isinstance(value, Turn):
        raise BadScore(f"step returns a Turn(observation, reward, done), got {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise BadScore(f"Turn.done is True or False, got {type(value.done).__name__}")
    seen = value.observation
    messages = [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
    observation = [] if value.done else checked_messages(messages)
    if not value.done and not observation:
        raise BadScore("a turn that is not done has an observation")
    return {"observation": observation, "reward": checked_score(value.reward), "done": value.done}


class WorkerEnvironment:
    """Makes the environment at `path`, "module:Class", with `options` as keywords, and calls it with plain JSON. This
    runs in a worker process. A coroutine is awaited. Each method raises what the environment raises, and BadScore for a
    result of another form."""

    def __init__(self, path: str, options: Mapping[str, Any]):
        self._environment = Declaration(path).make(options)

    def reset(self, problem: dict[str, str]) -> dict[str, Any]:
        """Begins a conversation. Returns {"messages": messages of the prompt}. `problem` has the fields of `Posed`."""
        return self._called("reset", problem)

    def step(self, problem: dict[str, str], messages: list, completion: str) -> dict[str, Any]:
        """Returns the answer to the turn `completion`, {"observation": messages, "reward": float, "done": bool}.
        `problem` has the fields of `Posed`; `messages` are the conversation before the turn."""
        return self._called("step", problem, messages, completion)

    def _called(self, name: str, problem: dict[str, str], *others: Any) -> dict[str, Any]:
        value = getattr(self._environment, name)(Posed(**problem), *others)
        return _checked_value(name, asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)


async def call(environment: Environment, name: str, problem: dict[str, str], *others: Any) -> dict[str, Any]:
    """Calls a method of an environment in this process: a coroutine function in the running event loop, another method
    in a new thread. `name` is "reset", with the result {"messages": messages}, or "step", with messages and completion
    as `others` and the result {"observation": messages, "reward": float, "done": bool}. `problem` has `Posed`'s fields.
    If the call is cancelled, as at a deadline, the thread runs on until the method returns. Raises BadScore for a
    result of another form, and what the method raises; in a thread RuntimeError for StopIteration and SystemExit."""
    method, arguments = getattr(environment, name), (Posed(**problem), *others)
    if inspect.iscoroutinefunction(method):
        return _checked_value(name, await method(*arguments))
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(method(*arguments))
        except BaseException as error:  # asyncio takes no StopIteration, and an exit would end the loop
            fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
            result.set_exception(error if fits else RuntimeError(failure(error).detail))

    result.set_running_or_notify_cancel()  # so that the thread may set it after a deadline
    # Not a thread of an executor: the interpreter would wait at its end for one that hangs.
    threading.Thread(target=run, name=f"environment {name}", daemon=True).start()
    return _checked_value(name, await asyncio.wrap_future(result))


def _checked_value(name: str, value: Any) -> dict[str, Any]:
    return checked_turn(value) if name == "step" else {"messages": checked_messages(value)}


async def _awaited(value: Any) -> Any:
    return await value


Player = Callable[[Sequence[str]], str]
"""A scripted player: the observations so far, as texts -> the next turn."""


def play(
    environment: Environment, problem: Posed, player: Player, *, turns: int
) -> tuple[list[Message], float, list[Message]]:
    """Plays one conversation of at most `turns` >= 1 turns. The environment's methods must not be coroutine functions.
    `player` gets the texts of the observations so far, and returns its next turn. Returns (the messages with which the
    environment opens; the sum of the rewards; the messages after the opening, of which the first and the last are the
    player's, with the role "assistant"). Raises BadScore if `reset` or `step` returns something of another form."""
    prompt: list[Message] = [*checked_messages(environment.reset(problem))]
    conversation: list[Message] = []
    observations: list[str] = []
    reward = 0.0
    for left in reversed(range(turns)):
        text = player(observations)
        answer = checked_turn(environment.step(problem, [*prompt, *conversation], text))
        conversation.append({"role": "assistant", "content": text})
        reward += answer["reward"]
        if answer["done"] or not left:
            break
        conversation += answer["observation"]
        observations.append("".join(message["content"] for message in answer["observation"]))
    return prompt, reward, conversation
