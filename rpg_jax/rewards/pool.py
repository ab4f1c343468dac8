"""A pool of verifier processes that can be killed one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from rpg_jax.rewards import descendants
from rpg_jax.rewards.callables import Background
from rpg_jax.rewards.verdicts import KINDS, LARGEST_OBJECT, Task, Verdict, checked

STARTUP_S = 120.0
_STARTS = 4  # starts of a process that ends before it is ready, for example for lack of memory
_MOST_TASKS = 5000  # of a process, which is then replaced
_LONGEST_LINE = LARGEST_OBJECT + 4096  # bytes
_SUSPECT = ("timeout", "crash", "memory", "forbidden")  # a process with such a verdict is not used again


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Runs tasks in fresh Python processes without devices, secrets or a shell. Leaving the context closes the pool.

    A task that misses its deadline, crashes its process, exceeds its memory limit (on Linux 512 MiB over the imports),
    or tries to write files, start processes or use the network gets a verdict with an error. The pool then ends this
    process with all that it started; no other task suffers. A function that raises also gives a verdict with an error,
    and its process goes on. A process starts when a task finds all others at work, and serves at most 5,000 tasks.

    Args:
      functions: "module:function" that the processes import before the first task, each with the names of its
        arguments. A method of an object in `made` is "module:Class.method".
      made: options by "module:Class". Each process makes one object of each class before it gives up its rights.
      size: the most processes; by default one per CPU, at most 8.
      deadline_s: seconds a task may take.
    """

    def __init__(
        self,
        functions: Mapping[str, Sequence[str]],
        *,
        made: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        size: int | None = None,
        deadline_s: float = 10.0,
    ):
        self._functions = {path: [*functions[path]] for path in sorted(functions)}
        made = {path: dict(options) for path, options in made.items()}
        seconds = {"startup_s": STARTUP_S, "deadline_s": deadline_s}
        self._setup = json.dumps({"functions": self._functions, "made": made, **seconds})
        self._deadline_s, self._size = deadline_s, size or min(8, os.cpu_count() or 1)
        self._room, self._idle = asyncio.Semaphore(self._size), list[_Process]()
        self._background, self._closed = Background("verifiers"), False

    def run(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Waits for the tasks, and returns one verdict per task in their order. Several threads may call this.

        Raises:
          ValueError: the pool lacks a task's function, or its processes cannot import or call one of its functions.
          RuntimeError: the pool is closed.
          ChildProcessError: a process has ended, or been silent for 120 s, before it was ready, four times.
        """
        unknown = {task.function for task in tasks} - self._functions.keys()
        if unknown:
            raise ValueError(f"this pool does not have {sorted(unknown)}; it has {[*self._functions]}")
        if self._closed:
            raise RuntimeError("this worker pool is closed")
        return self._background.together(map(self._verdict, tasks))

    def wait_ready(self) -> None:
        """Starts all processes, and waits until each has loaded its functions. Raises ValueError if a function cannot
        be imported or takes other arguments, and ChildProcessError as `run` does."""
        self._idle += self._background.together(self._taken() for _ in range(self._size))

    def close(self) -> None:
        """Waits for calls of `run` in other threads, then ends the processes. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._background.begin(self._end()).result()
            self._background.close()

    def __exit__(self, *_) -> None:
        self.close()

    async def _end(self) -> None:
        for _ in range(self._size):  # one after the other, behind the tasks that wait
            await self._room.acquire()
        for process in self._idle:
            await process.kill()

    async def _verdict(self, task: Task) -> Verdict:
        async with self._room:
            process, good = await self._taken(), False
            try:
                verdict = await process.run(task, self._deadline_s)
                good = verdict.error not in _SUSPECT and process.tasks < _MOST_TASKS
                return verdict
            finally:
                if good:
                    self._idle.append(process)
                else:
                    await process.kill()

    async def _taken(self) -> _Process:
        """An idle process, or a new one once it is ready. Raises as `run` if there is none."""
        while self._idle:
            process = self._idle.pop()
            if await process.is_usable():
                return process
            await process.kill()  # it failed while idle, so the next task is not to blame
        said = ""
        for _ in range(_STARTS):
            process = await _Process.started(self._setup)
            try:
                await process.wait_ready()
                return process
            except BaseException as error:
                await process.kill()
                if not isinstance(error, _Lost):
                    raise
                said = ", ".join(filter(None, error.args))
        raise ChildProcessError(
            f"a verifier process ended {_STARTS} times before it was ready ({said}): where memory is short, set a "
            "smaller --config.rewards.workers; python -m rpg_jax.rewards.verifier_process shows other errors"
        )


class _Lost(Exception):
    """A process gives no answer. The arguments are the kind of error and the detail of a verdict."""


class _Process:
    """The parent's side of one verifier process: sends tasks, receives verdicts, notices every way to fail. `tasks`
    counts the tasks."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer
        self.tasks = 0

    @classmethod
    async def started(cls, setup: str) -> Self:
        """Starts a process. `setup` is the argument of `verifier_process.main`."""
        own, its = socket.socketpair()
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "rpg_jax.rewards.verifier_process", setup],
                stdin=its.fileno(),
                stdout=its.fileno(),
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # its own process group: what is left to kill where its keeper is gone
            )
        return cls(process, *await asyncio.open_connection(sock=own, limit=_LONGEST_LINE))

    async def wait_ready(self) -> None:
        """Waits until the process has loaded its functions. Raises _Lost if it ends or needs more than 120 s, and
        ValueError if it cannot load a function."""
        message = await self._answer(b"", STARTUP_S)
        if "failed" in message:
            raise ValueError(message["failed"])

    async def is_usable(self) -> bool:
        """Whether the idle process lives, and has written nothing without a task."""
        try:
            async with asyncio.timeout(0):
                await self._reader.read(1)
        except TimeoutError:
            return self._process.poll() is None
        except OSError:
            pass
        return False

    async def run(self, task: Task, deadline_s: float) -> Verdict:
        """Waits for the verdict on a task. A hostile completion may write a line: all but a verdict is a crash."""
        self.tasks += 1  # a line that is late, or that a function wrote, never answers a later task
        asked = json.dumps({"id": self.tasks, **dataclasses.asdict(task)}).encode() + b"\n"
        try:
            message = await self._answer(asked, deadline_s)
            if message["id"] != self.tasks or ("error" in message and message["error"] not in KINDS):
                raise ValueError
            if "error" in message:
                return Verdict(None, message["error"], str(message["detail"]))
            return checked(task.returns, message["score" if task.returns == "score" else "value"])
        except _Lost as lost:
            return Verdict(None, *lost.args)
        except (ValueError, KeyError, TypeError, OverflowError):
            return Verdict(None, "crash")

    async def _answer(self, asked: bytes, seconds: float) -> dict[str, Any]:
        """Sends bytes, and returns the JSON object in the next line of the process. Raises _Lost if there is none."""
        self._writer.write(asked)
        try:
            for left in (seconds, 0.0):  # at last without a wait: a line that is here counts, if this process was late
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        return dict(json.loads(await self._reader.readuntil()))
            kind = "timeout"
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError, TypeError, RecursionError):
            kind = "crash"
        code = self._process.poll()
        raise _Lost(kind, "" if code is None else f"exit code {code}")

    async def kill(self) -> None:
        """Ends the process and every process that it has started, and waits for the end."""
        await asyncio.to_thread(self._kill)
        self._writer.close()

    def _kill(self) -> None:
        if descendants.AVAILABLE:
            self._process.send_signal(descendants.END)
        if not descendants.AVAILABLE or not self._ended(2.0):  # a verifier can stop a keeper that it sees
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended(5.0)

    def _ended(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


def _environment() -> dict[str, str]:
    """Returns a verifier process's variables: no secrets, no accelerator, one thread, the parent's module path."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
