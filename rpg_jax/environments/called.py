"""An environment as others call it: plain JSON goes in, and checked JSON comes out."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from rpg_jax.environments.conversation import Environment, Posed, checked_messages, checked_turn
from rpg_jax.environments.registry import Declaration

METHODS = {"reset": ("problem",), "step": ("problem", "messages", "completion")}


class Called:
    """The methods of an environment that a worker process makes from the path of its class and its options."""

    def __init__(self, path: str, options: Mapping[str, Any]):
        self._environment = Declaration(path).make(options)

    def reset(self, problem: dict[str, str]) -> dict[str, Any]:
        return self._called("reset", problem)

    def step(self, problem: dict[str, str], messages: list, completion: str) -> dict[str, Any]:
        return self._called("step", problem, messages, completion)

    def _called(self, name: str, problem: dict[str, str], *others: Any) -> dict[str, Any]:
        value = getattr(self._environment, name)(Posed(**problem), *others)
        return _checked(name, asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)


async def call(environment: Environment, name: str, problem: dict[str, str], *others: Any) -> dict[str, Any]:
    """Calls a method of an environment in this process: a coroutine is awaited, and others run in a thread.

    If it is cancelled, as at a deadline, such a thread is left alone: it ends when the method returns, or never.
    """
    method, arguments = getattr(environment, name), (Posed(**problem), *others)
    if inspect.iscoroutinefunction(method):
        return _checked(name, await method(*arguments))
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result(value) if error is None else result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = method(*arguments)
        except BaseException as raised:  # SystemExit too: it must not end the thread without a result
            error = RuntimeError(f"{type(raised).__name__}: {raised}") if not isinstance(raised, Exception) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, error)

    # Not a thread of an executor: the interpreter would wait at its end for one that hangs.
    threading.Thread(target=run, name=f"environment {name}", daemon=True).start()
    return _checked(name, await result)


def _checked(name: str, value: Any) -> dict[str, Any]:
    return checked_turn(value) if name == "step" else {"messages": checked_messages(value)}


async def _awaited(value: Any) -> Any:
    return await value
