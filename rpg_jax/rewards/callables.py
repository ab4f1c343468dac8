"""A user's functions and classes: loaded from "module:name", or handed over by a Python program and called in it."""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import importlib
import inspect
import itertools
import numbers
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rpg_jax.rewards.verdicts import REWARD, Task, Verdict, check_call, checked, failure

T = TypeVar("T")
Handed = Mapping[str, Any]
"""What a Python program hands over: functions, classes and objects, by their names in the config."""
NOTHING: Handed = MappingProxyType({})


def load(path: str, kind: str) -> Callable[..., Any]:
    """Imports the module of `path`, "module:name", and returns its function or class of that name. `kind` is the use of
    the function, for the messages: "reward", "environment", "tool", "task". Raises ValueError if the path has another
    form, an import fails, there is no such function or class, or a reward is async. Other errors pass through."""
    module, _, name = path.partition(":")
    if not module or module.startswith(".") or not name:
        raise ValueError(f"the {kind} {path!r} is not of the form module:name")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        where = "drop the .py" if module.endswith(".py") else "run where its folder is, or put the folder in PYTHONPATH"
        raise ValueError(f"cannot import {module!r} for the {kind} {path!r}: {error}; {where}") from error
    if not callable(found):
        raise ValueError(f"module {module!r} has no function or class {name!r} for the {kind} {path!r}")
    if kind == "reward" and is_async(found):
        raise ValueError(f"the reward {path!r} is async: hand the function itself over in Python, or write a plain one")
    return found


def source_digests(path: str, handed: Any = None) -> dict[str, str]:
    """Returns the SHA-256 digests, in hex, of the code behind `path`, "module:name". Imports nothing.

    The digest of the module's file has the key `path`. Each module that the file imports, directly or not, has the key
    "path imports module", if its file lies below the folder of the first file or below the present folder. Imports of
    installed packages, the standard library and this package, and by computed names, are left out. `handed` is what a
    Python program handed over under the name `path`, or None. With it the only digest is of the source text of the
    function or class. Code without a source has no digest, so the dict may be empty.
    """
    if handed is not None:
        try:
            source = inspect.getsource(_definition(handed))
        except (OSError, TypeError):  # typed into an interpreter, or written in C
            return {}
        return {path: hashlib.sha256(source.encode()).hexdigest()}
    first = path.partition(":")[0]
    files: dict[str, Path] = {}
    waiting = [first]
    while waiting:
        module = waiting.pop()
        if module in files or (file := _file_of(module)) is None:
            continue
        if module != first and not _is_own(module, file, {files[first].parent, Path.cwd()}):
            continue
        files[module] = file
        waiting += _imported(module, file)
    names = {module: path if module == first else f"{path} imports {module}" for module in files}
    return {names[module]: hashlib.sha256(file.read_bytes()).hexdigest() for module, file in files.items()}


def _file_of(module: str) -> Path | None:
    """Returns the file of a module, found without an import; None if there is none."""
    found, where = None, None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, where)
        if found is None:
            return None
        where = found.submodule_search_locations
    file = Path((found and found.origin) or "").absolute()
    return file if file.is_file() else None


def _is_own(module: str, file: Path, folders: set[Path]) -> bool:
    if module.partition(".")[0] in sys.stdlib_module_names | {"rpg_jax"} or "site-packages" in file.parts:
        return False
    return not folders.isdisjoint(file.parents)


def _imported(module: str, file: Path) -> set[str]:
    """Returns the modules that the import statements of a file may mean, with the packages around each module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # no Python: a compiled module
        return set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = list(filter(None, [*parents, node.module]))
            named |= {".".join(base), *(".".join([*base, alias.name]) for alias in node.names)}
    return {part for name in named if name for part in itertools.accumulate(name.split("."), "{}.{}".format)}


def name_of(function: Callable[..., Any], kind: str = "reward") -> str:
    """Returns the name "module:qualname" of a function or class, or of what `functools.partial` wraps; for another
    object, the name of its class. `kind` is the use of `function`: "reward", "environment", …. Raises ValueError if
    `function` is not callable; only an "environment" may instead be an object with a method `step`."""
    if kind == "environment" and not callable(function) and not hasattr(function, "step"):
        raise ValueError(
            f"environment is a name, a class, or an object with reset and step; got {type(function).__name__}"
        )
    if kind != "environment" and not callable(function):
        part = " of a part" if kind == "reward" else ""
        raise ValueError(f"a {kind} is a function or the name{part}, got {type(function).__name__}")
    named = _definition(function)
    return f"{named.__module__}:{named.__qualname__}"


def _definition(given: Any) -> Any:
    """Returns a function or class itself, the function that `functools.partial` wraps, or another object's class."""
    while isinstance(given, functools.partial):
        given = given.func
    return given if hasattr(given, "__qualname__") else type(given)


def named(rewards: Callable[..., Any] | str | Mapping[Any, float]) -> tuple[dict[str, float], dict[str, Callable]]:
    """Returns (the weight of each part by name, the functions among the parts by the same names). `rewards` is a
    function or the name of a part, with weight 1, or {function or name: weight}. A function gets the name
    "module:qualname". A name goes through `in_file`, and is not checked further. Raises ValueError if
    `rewards` has another form or is empty, a weight is no number, two parts have one name, a file is missing, or a
    function cannot be called as (completion, answer, prompt) or (completion, answer)."""
    if isinstance(rewards, list | set) or rewards in ("", {}):
        raise ValueError(f"reward={rewards!r}: give a function, a name, or their weights, as {{'exact': 1.0}}")
    given = rewards if isinstance(rewards, Mapping) else {rewards: 1.0}
    weights: dict[str, float] = {}
    functions: dict[str, Callable] = {}
    for reward, weight in given.items():
        name = in_file(reward) if isinstance(reward, str) else name_of(reward)
        if name in weights:
            raise ValueError(f"two rewards are called {name}: give each function a name of its own, with def")
        if not isinstance(weight, numbers.Real):
            raise ValueError(f"the weight of the reward {name!r} must be a number, got {weight!r}")
        weights[name] = float(weight)
        if not isinstance(reward, str):
            check_call(reward, name, REWARD)
            functions[name] = reward
    return weights, functions


def in_file(name: str) -> str:
    """Returns "module:function" for "FOLDER/module.py:function", and other names unchanged. Puts FOLDER first in
    `sys.path`, if it is not in there. Raises ValueError if there is no such file, or if ":function" is missing."""
    if name.endswith(".py"):
        raise ValueError(f"the reward {name!r}: name its function too, as {name}:FUNCTION")
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return name
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"the reward {name!r}: there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return f"{path.stem}:{function}"


def is_async(function: Callable[..., Any]) -> bool:
    """Tells whether `function`, the function in a partial, or an object's `__call__` is declared by `async def`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs the coroutines at once, and returns their results in order. If one raises, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Background:
    """An event loop in a daemon thread called `name`, started at once. Any thread may begin coroutines there."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts the coroutine in the loop, and returns at once. The future gets the result or the exception."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def together(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Runs `together(work)` in the loop, waits, and returns the results. An interrupt of the wait cancels all."""
        future = self.begin(together(work))
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels the coroutines that run, and waits until they and the thread end. A second call does nothing."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        if not self._loop.is_closed():
            self.begin(end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class InProcess:
    """Calls a user's functions in this process. Plain functions run in the caller's thread, one after the other, and
    have no deadline. Async functions run together in a thread with an event loop, so the caller may have a running
    event loop, as a notebook has. Calls of async functions are cancelled after `deadline_s` seconds. `functions` has
    the functions by their names in tasks."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], deadline_s: float):
        self._functions, self._deadline_s = functions, deadline_s
        self._background = Background("rewards")  # one for all calls: a client's connections belong to their loop

    def run(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Calls each task's function with the task's arguments and options, waits, and returns one verdict per task in
        their order. An exception of a function becomes a verdict with an error, except a plain function's
        KeyboardInterrupt; the deadline, the error "timeout"."""
        calls = [(self._functions[task.function], task) for task in tasks]
        begun = [
            self._background.begin(_awaited(*call, self._deadline_s)) if is_async(call[0]) else None for call in calls
        ]
        return [future.result() if future else _called(*call) for call, future in zip(calls, begun, strict=True)]

    def close(self) -> None:
        """Cancels the async calls that still run, and ends their thread. Later async calls raise RuntimeError."""
        self._background.close()


def _called(function: Callable[..., Any], task: Task) -> Verdict:
    try:
        return checked(task.returns, function(*task.arguments, **task.options))
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # an answer that the verifier cannot read, exit()
        return failure(error)


async def _awaited(function: Callable[..., Any], task: Task, deadline_s: float) -> Verdict:
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return checked(task.returns, await function(*task.arguments, **task.options))
    except BaseException as error:  # SystemExit too: out of here it would end the loop, for which callers would wait
        if (own := asyncio.current_task()) and own.cancelling():  # by `close`
            raise
        return failure(TimeoutError(f"no score within {deadline_s:g} s") if limit.expired() else error)
