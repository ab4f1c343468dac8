"""A pool of verifier processes that can be killed one task at a time."""

import collections
import contextlib
import itertools
import json
import os
import selectors
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rpg_jax.rewards.member import STARTUP_S, Member
from rpg_jax.rewards.verdicts import Task, Verdict


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Runs tasks in `size` fresh Python processes without devices, secrets or a shell.

    A task that overruns `deadline_s`, crashes its process, or exceeds the memory limit loses its own verdict and
    nothing else: the pool ends it, with all that it started (see `keeper`), and starts another. Each process works on
    one task at a time, so the task at fault is always known. Only JSON crosses the pipes.

    Args:
      functions: import paths "module:function" that the processes load before they start, each with the names of its
        arguments.
      made: classes "module:Class" with options: each process makes one object of each before it gives up its rights.
        Its methods are functions "module:Class.method".
      size: number of processes; by default one per CPU, at most 8.
      deadline_s: seconds a task may take.
      memory_bytes: address space that a process may use beyond the need of its imports.
      recycle_after: tasks after which a process is replaced.

    Attributes:
      counts: tasks done; errors by kind; processes rebuilt after an error, and recycled because of their age.
    """

    def __init__(
        self,
        functions: Mapping[str, Sequence[str]],
        *,
        made: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        size: int | None = None,
        deadline_s: float = 10.0,
        memory_bytes: int = 2**29,
        recycle_after: int = 5000,
    ):
        self.counts: collections.Counter[str] = collections.Counter()
        self._functions = {path: [*functions[path]] for path in sorted(functions)}
        self._made = {path: dict(options) for path, options in made.items()}
        self._deadline_s, self._memory_bytes, self._recycle_after = deadline_s, memory_bytes, recycle_after
        self._lock = threading.Lock()
        self._members = [self._spawn() for _ in range(size or min(8, os.cpu_count() or 1))]

    def run(self, tasks: Sequence[Task]) -> list[Verdict]:
        """One verdict per task, in the order of the tasks. Threads take turns.

        Raises:
          ValueError: the pool lacks a task's function, or cannot import or call one of its own functions.
          RuntimeError: the pool is closed, or its processes do not start.
        """
        unknown = {task.function for task in tasks} - self._functions.keys()
        if unknown:
            raise ValueError(f"this pool does not have {sorted(unknown)}; it has {[*self._functions]}")
        with self._lock:
            if not self._members:
                raise RuntimeError("this worker pool is closed")
            return self._run(tasks)

    def wait_ready(self) -> None:
        """Returns once every process has loaded its functions; raises as `run` does if one cannot be imported."""
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

    def __exit__(self, *_) -> None:
        self.close()

    def _run(self, tasks: Sequence[Task]) -> list[Verdict]:
        for i, member in enumerate(self._members):
            if member.task_id is not None:  # of an earlier call that was interrupted
                self._replace(i, "rebuilt")
        waiting = _Waiting(tasks, len(self._members))
        verdicts: list[Verdict | None] = [None] * len(tasks)
        unfinished = len(tasks)
        while unfinished:
            for i, member in enumerate(self._members):
                if member.ready and member.task_id is None:
                    if not waiting:
                        continue
                    if member.unusable():  # it failed while idle, so the next task is not to blame
                        self._replace(i, "rebuilt")
                        continue
                    task_id = waiting.pop(i)
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
        """Counts an error, and replaces the member if it is dead, suspect or old."""
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

    def _spawn(self) -> Member:
        setup = {"functions": self._functions, "made": self._made, "memory_bytes": self._memory_bytes}
        return Member(json.dumps({**setup, "startup_s": STARTUP_S, "deadline_s": self._deadline_s}))


class _Waiting:
    """Tasks not yet sent. Neighbours with the same reference go to the same process, which parses it once."""

    def __init__(self, tasks: Sequence[Task], members: int):
        runs = itertools.groupby(range(len(tasks)), lambda i: tasks[i].arguments[1:])
        self._runs = collections.deque(collections.deque(run) for _, run in runs)
        self._own: list[collections.deque[int]] = [collections.deque() for _ in range(members)]
        self._left = len(tasks)

    def __bool__(self) -> bool:
        return self._left > 0

    def pop(self, member: int) -> int:
        self._left -= 1
        if not self._own[member] and self._runs:
            self._own[member] = self._runs.popleft()
        if self._own[member]:
            return self._own[member].popleft()
        return max(self._own, key=len).pop()  # helps the member with most to do
