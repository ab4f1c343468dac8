"""A pool of verifier processes that can be killed one task at a time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from rpg_jax.rewards import descendants
from rpg_jax.rewards.verdicts import KINDS, LARGEST_OBJECT, Task, Verdict, checked

STARTUP_S = 120.0
_STARTS = 4  # starts of a process that ends before it is ready, for example for lack of memory
_MAX_VERDICT_BYTES = {"score": 4096, "object": LARGEST_OBJECT + 4096}


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Runs tasks in fresh Python processes without devices, secrets or a shell. Leaving the context closes the pool.

    A task that misses its deadline, crashes its process, exceeds its memory limit (on Linux 512 MiB over the imports),
    or tries to write files, start processes or use the network gets a verdict with an error. The pool then ends this
    process with all that it started, and starts another; no other task suffers. A function that raises also gives a
    verdict with an error, and its process goes on. The processes start at once and load in the background.

    Args:
      functions: "module:function" that the processes import before the first task, each with the names of its
        arguments. A method of an object in `made` is "module:Class.method".
      made: options by "module:Class". Each process makes one object of each class before it gives up its rights.
      size: number of processes; by default one per CPU, at most 8.
      deadline_s: seconds a task may take.
      recycle_after: tasks after which a process is replaced.

    Attributes:
      counts: "done" tasks, with and without an error; errors by kind; "rebuilt" processes, which the pool had to end or
        which ended themselves; "recycled" processes, replaced after `recycle_after` tasks.
    """

    def __init__(
        self,
        functions: Mapping[str, Sequence[str]],
        *,
        made: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        size: int | None = None,
        deadline_s: float = 10.0,
        recycle_after: int = 5000,
    ):
        self.counts: collections.Counter[str] = collections.Counter()
        self._functions = {path: [*functions[path]] for path in sorted(functions)}
        made = {path: dict(options) for path, options in made.items()}
        seconds = {"startup_s": STARTUP_S, "deadline_s": deadline_s}
        self._setup = json.dumps({"functions": self._functions, "made": made, **seconds})
        self._deadline_s, self._recycle_after = deadline_s, recycle_after
        self._lock = threading.Lock()
        self._lost: collections.Counter[int] = collections.Counter()  # processes that ended before they were ready
        self._processes = [_Process(self._setup) for _ in range(size or min(8, os.cpu_count() or 1))]

    def run(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Waits for the tasks, and returns one verdict per task in their order. Threads that call at once take turns.

        Raises:
          ValueError: the pool lacks a task's function, or its processes cannot import or call one of its functions.
          RuntimeError: the pool is closed.
          ChildProcessError: a process has ended, or been silent for 120 s, before it was ready, four times.
        """
        unknown = {task.function for task in tasks} - self._functions.keys()
        if unknown:
            raise ValueError(f"this pool does not have {sorted(unknown)}; it has {[*self._functions]}")
        with self._lock:
            if not self._processes:
                raise RuntimeError("this worker pool is closed")
            return self._run(tasks)

    def wait_ready(self) -> None:
        """Waits until every process has loaded its functions. Raises ValueError if a function cannot be imported or
        takes other arguments, and ChildProcessError as `run` does."""
        with self._lock:
            while not all(process.ready for process in self._processes):
                self._wait()
                for i, process in enumerate(self._processes):
                    if not process.ready:
                        self._poll(i)

    def close(self) -> None:
        """Waits for a call of `run` in another thread, then kills the processes. A second call does nothing."""
        with self._lock:
            processes, self._processes = self._processes, []
            for process in processes:
                process.kill()

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, tasks: Sequence[Task]) -> list[Verdict]:
        for i, process in enumerate(self._processes):
            if process.task_id is not None:  # an earlier call was interrupted
                self._replace(i, "rebuilt")
        waiting = collections.deque(range(len(tasks)))
        verdicts: list[Verdict | None] = [None] * len(tasks)
        unfinished = len(tasks)
        while unfinished:
            for i, process in enumerate(self._processes):
                if process.ready and process.task_id is None:
                    if not waiting:
                        continue
                    if process.unusable():  # it failed while idle, so the next task is not to blame
                        self._replace(i, "rebuilt")
                        continue
                    task_id = waiting.popleft()
                    process.send(task_id, tasks[task_id], self._deadline_s)
                finished = process.task_id
                verdict = self._poll(i)
                if verdict is None or finished is None:  # it works, or loads
                    continue
                verdicts[finished] = verdict
                unfinished -= 1
                self._lost[i] = 0
                self.counts.update(filter(None, ("done", verdict.error)))
                if verdict.error in ("timeout", "crash", "memory", "forbidden"):  # it is dead or suspect
                    self._replace(i, "rebuilt")
                elif process.tasks_sent >= self._recycle_after:
                    self._replace(i, "recycled")
            self._wait()
        return verdicts  # type: ignore[return-value]

    def _poll(self, i: int) -> Verdict | None:
        """Returns process `i`'s verdict if its task has ended, else None. Replaces it if it was lost while loading."""
        try:
            return self._processes[i].poll()
        except _Lost as lost:
            self._lost[i] += 1
            if self._lost[i] < _STARTS:
                self._replace(i, "rebuilt")
                return None
            raise ChildProcessError(
                f"a verifier process ended {_STARTS} times before it was ready ({lost}): where memory is short, set a "
                "smaller --config.rewards.workers; python -m rpg_jax.rewards.verifier_process shows other errors"
            ) from None

    def _replace(self, i: int, reason: str) -> None:
        self.counts[reason] += 1
        self._processes[i].kill()
        self._processes[i] = _Process(self._setup)

    def _wait(self) -> None:
        """Sleeps until a pipe is ready or the nearest deadline passes. Returns at once if no process loads or works."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                if process.ready and process.task_id is None:
                    continue
                selector.register(process.verdicts_fd, selectors.EVENT_READ)
                if process.unsent:
                    selector.register(process.tasks_fd, selectors.EVENT_WRITE)
            if selector.get_map():
                nearest = min(p.deadline for p in self._processes if not p.ready or p.task_id is not None)
                selector.select(max(0.0, nearest - time.monotonic()))


class _Lost(Exception):
    """A process has ended before it was ready, or was not ready in time."""


class _Process:
    """The parent's side of one verifier process: sends tasks, receives verdicts, notices every way to fail."""

    def __init__(self, setup: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rpg_jax.rewards.verifier_process", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # its own process group: what is left to kill where its keeper is gone
        )
        tasks, verdicts = self._process.stdin, self._process.stdout
        assert tasks is not None and verdicts is not None  # both are pipes
        self._pipes = tasks, verdicts
        self.tasks_fd, self.verdicts_fd = tasks.fileno(), verdicts.fileno()
        os.set_blocking(self.tasks_fd, False)
        os.set_blocking(self.verdicts_fd, False)
        self.ready = False
        self.task_id: int | None = None
        self._returns: Literal["score", "object"] = "score"
        self.tasks_sent = 0
        self.unsent = b""
        self.deadline = time.monotonic() + STARTUP_S
        self._received = b""

    def send(self, task_id: int, task: Task, deadline_s: float) -> None:
        self.task_id, self._returns = task_id, task.returns
        self.tasks_sent += 1  # a line that is late, or that a function wrote, never answers a later task
        self.deadline = time.monotonic() + deadline_s
        self.unsent = json.dumps({"id": self.tasks_sent, **dataclasses.asdict(task)}).encode() + b"\n"

    def unusable(self) -> bool:
        """Tells whether the idle process has died, or has written something without a task."""
        return self._process.poll() is not None or self._read() or bool(self._received)

    def poll(self) -> Verdict | None:
        """Moves bytes without blocking. Returns the verdict once the task has ended or failed, before then None. Raises
        _Lost if the process fails before it is ready, and ValueError if it cannot load a function."""
        try:
            if self.unsent:
                self.unsent = self.unsent[os.write(self.tasks_fd, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return self._failed("crash")
        if self._read():
            return self._failed("crash")
        if b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            return self._interpret(line)
        if len(self._received) > _MAX_VERDICT_BYTES[self._returns]:
            return self._failed("crash")
        return self._failed("timeout") if time.monotonic() > self.deadline else None

    def _read(self) -> bool:
        """Reads the bytes that are in the pipe. Returns True at the end of the pipe."""
        try:
            data = os.read(self.verdicts_fd, 65536)
        except BlockingIOError:
            return False
        self._received += data
        return not data

    def _interpret(self, line: bytes) -> Verdict | None:
        """Returns the verdict in a line; None for "ready". A hostile completion may have written the line: another line
        counts as a crash. Raises ValueError for "failed"."""
        try:
            message = dict(json.loads(line))
            if self.ready:
                if message["id"] != self.tasks_sent or ("error" in message and message["error"] not in KINDS):
                    raise ValueError
                if "error" in message:
                    verdict = Verdict(None, message["error"], str(message["detail"]))
                else:
                    verdict = checked(self._returns, message["score" if self._returns == "score" else "value"])
                self.task_id = None
                return verdict
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            return self._failed("crash")
        if "failed" in message:
            raise ValueError(message["failed"])
        self.ready = True
        return None

    def _failed(self, kind: str) -> Verdict:
        code = self._process.poll()
        if not self.ready:
            raise _Lost(kind if code is None else f"{kind}, exit code {code}")
        self.task_id = None
        return Verdict(None, kind, "" if code is None else f"exit code {code}")

    def kill(self) -> None:
        """Ends the process and every process that it has started, and waits for the end."""
        if descendants.AVAILABLE:
            self._process.send_signal(descendants.END)
        if not descendants.AVAILABLE or not self._ended(2.0):  # a verifier can stop a keeper that it sees
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._ended(5.0)
        for pipe in self._pipes:
            pipe.close()

    def _ended(self, seconds: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None


def _environment() -> dict[str, str]:
    """Returns a verifier process's variables: no secrets, no accelerator, one thread, the parent's module path."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
