"""A pool of verifier processes that can be killed one task at a time."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

_STARTUP_S = 120.0
_MAX_VERDICT_BYTES = 4096
KINDS = ("timeout", "crash", "memory", "error", "forbidden")


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of a verifier: strings and plain JSON options only."""

    function: str
    arguments: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a task: a finite `score`, or None with the kind of error (one of `KINDS`) and its detail."""

    score: float | None
    error: str | None = None
    detail: str = ""


class WorkerPool:
    """Runs tasks in `size` fresh Python processes without devices, secrets or a shell.

    A task that overruns `deadline_s`, crashes its process, or exceeds the memory limit loses its own verdict and
    nothing else: the process group is terminated, then killed, and the member rebuilt. Each process works on one task
    at a time, so it is always known whose fault it was. Nothing but JSON crosses the pipes.

    Args:
      functions: import paths "module:function" that the processes load before they start.
      size: processes; default one for each CPU, at most 8.
      deadline_s: seconds a task may take.
      memory_bytes: address space a process may add to what its imports need.
      recycle_after: tasks after which a process is replaced.

    Attributes:
      counts: tasks done, errors by kind, members rebuilt after an error and recycled by age.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        size: int | None = None,
        deadline_s: float = 10.0,
        memory_bytes: int = 2**29,
        recycle_after: int = 5000,
    ):
        self.counts: collections.Counter[str] = collections.Counter()
        self._functions = sorted(set(functions))
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._recycle_after = recycle_after
        self._lock = threading.Lock()
        self._members = [self._spawn() for _ in range(size or min(8, os.cpu_count() or 1))]

    def run(self, tasks: Sequence[Task]) -> list[Verdict]:
        """One verdict a task, in the order of the tasks. Threads take turns.

        Raises:
          ValueError: a task's function is not one of the pool's, or one of those cannot be imported.
          RuntimeError: the pool is closed, or its processes do not start.
        """
        unknown = {task.function for task in tasks} - set(self._functions)
        if unknown:
            raise ValueError(f"this pool does not have {sorted(unknown)}; it has {self._functions}")
        with self._lock:
            if not self._members:
                raise RuntimeError("this worker pool is closed")
            return self._run(tasks)

    def wait_ready(self) -> None:
        """Returns when every process has loaded its functions; raises as `run` does where one cannot be imported."""
        with self._lock:
            while not all(member.ready for member in self._members):
                self._wait()
                for member in self._members:
                    if not member.ready:
                        member.poll()

    def close(self) -> None:
        """Kills the processes; the pool cannot be used afterwards."""
        with self._lock:
            members, self._members = self._members, []
            for member in members:
                member.kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, tasks: Sequence[Task]) -> list[Verdict]:
        waiting = collections.deque(range(len(tasks)))
        verdicts: list[Verdict | None] = [None] * len(tasks)
        unfinished = len(tasks)
        while unfinished:
            for i, member in enumerate(self._members):
                if member.ready and member.task_id is None and waiting:
                    if member.died():  # while idle: no task is to blame
                        self._replace(i, "rebuilt")
                        continue
                    task_id = waiting.popleft()
                    member.send(task_id, tasks[task_id], self._deadline_s)
                finished = member.task_id
                verdict = member.poll()
                if verdict is None:
                    continue
                if finished is not None:
                    verdicts[finished] = verdict
                    unfinished -= 1
                    self.counts["done"] += 1
                self._account(i, verdict)
            self._wait()
        return verdicts  # type: ignore[return-value]

    def _account(self, i: int, verdict: Verdict) -> None:
        """Counts an error and replaces the member where it is dead, suspect or old."""
        member = self._members[i]
        if verdict.error is not None:
            self.counts[verdict.error] += 1
        if verdict.error in ("timeout", "crash", "memory", "forbidden"):
            self._replace(i, "rebuilt")
        elif member.tasks_done >= self._recycle_after:
            self._replace(i, "recycled")

    def _replace(self, i: int, reason: str) -> None:
        self.counts[reason] += 1
        self._members[i].kill()
        self._members[i] = self._spawn()

    def _wait(self) -> None:
        """Sleeps until a pipe is ready or the nearest deadline passes."""
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                if member.ready and member.task_id is None:
                    continue
                selector.register(member.verdicts_fd, selectors.EVENT_READ)
                if member.unsent:
                    selector.register(member.tasks_fd, selectors.EVENT_WRITE)
            if selector.get_map():
                nearest = min(m.deadline for m in self._members if not m.ready or m.task_id is not None)
                selector.select(max(0.0, nearest - time.monotonic()))

    def _spawn(self) -> _Member:
        setup = {"functions": self._functions, "memory_bytes": self._memory_bytes, "deadline_s": self._deadline_s}
        return _Member(json.dumps(setup))


class _Member:
    """One process and the task it works on."""

    def __init__(self, setup: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rpg_jax.rewards.worker", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # its own process group: children that it leaves behind are killed with it
        )
        self.tasks_fd = self._process.stdin.fileno()
        self.verdicts_fd = self._process.stdout.fileno()
        os.set_blocking(self.tasks_fd, False)
        os.set_blocking(self.verdicts_fd, False)
        self.ready = False
        self.task_id: int | None = None
        self.tasks_done = 0
        self.unsent = b""
        self.deadline = time.monotonic() + _STARTUP_S
        self._received = b""

    def send(self, task_id: int, task: Task, deadline_s: float) -> None:
        self.task_id = task_id
        self.deadline = time.monotonic() + deadline_s
        message = {"id": task_id, "function": task.function, "arguments": task.arguments, "options": task.options}
        self.unsent = json.dumps(message).encode() + b"\n"

    def died(self) -> bool:
        return self._process.poll() is not None

    def poll(self) -> Verdict | None:
        """Moves bytes without blocking; the verdict if the task has ended, in whatever way."""
        try:
            if self.unsent:
                self.unsent = self.unsent[os.write(self.tasks_fd, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return self._failed("crash")
        try:
            data = os.read(self.verdicts_fd, 65536)
            if not data:
                return self._failed("crash")
            self._received += data
        except BlockingIOError:
            pass
        if b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            return self._interpret(line)
        if len(self._received) > _MAX_VERDICT_BYTES:
            return self._failed("crash")
        return self._failed("timeout") if time.monotonic() > self.deadline else None

    def _interpret(self, line: bytes) -> Verdict | None:
        """A hostile completion may have written the line: whatever is not a plain verdict counts as a crash."""
        try:
            message = json.loads(line)
            if not self.ready:
                if "failed" in message:
                    raise ValueError(message["failed"])
                self.ready = message["ready"] == self._process.pid
                return None if self.ready else self._failed("crash")
            if message["id"] != self.task_id or message.get("error") not in (None, *KINDS):
                return self._failed("crash")
            score = None if "error" in message else float(message["score"])
            verdict = Verdict(score, message.get("error"), str(message.get("detail", "")))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
            return self._failed("crash")
        self.task_id = None
        self.tasks_done += 1
        return verdict

    def _failed(self, kind: str) -> Verdict:
        if not self.ready:
            raise RuntimeError(f"a verifier process did not start ({kind}): try `python -m rpg_jax.rewards.worker`")
        self.task_id = None
        code = self._process.poll()
        return Verdict(None, kind, "" if code is None else f"exit code {code}")

    def kill(self) -> None:
        """Terminates the process group, then kills it, and waits for the process."""
        for sign, patience_s in ((signal.SIGTERM, 0.2), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        self._process.stdin.close()
        self._process.stdout.close()


def _environment() -> dict[str, str]:
    """No secrets, no accelerator, one thread; the parent's module search path, for verifiers given by import path."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
