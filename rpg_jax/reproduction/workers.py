"""A pool of processes that carry out tasks one after another, each process on one core.

A worker imports JAX once, and its tasks share compiled programs. A task that fails ends its worker, and the next task
gets another. So a task is as alone as in a process of its own: a signal, an exit or an error ends no other task.

`python -m rpg_jax.reproduction.workers` is a worker. It reads a task a line from stdin, as JSON, and writes the result
of the function as a line of JSON to stdout after each task that ended well. The first task that fails ends the worker,
which takes over the exit code of the task.
"""

import collections
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.runs import cli

POLL_SECONDS = 0.5
WORKER = (sys.executable, "-m", "rpg_jax.reproduction.workers")
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Task:
    """A call of a module's `function` with `argument`, which JSON can hold. All output is added to the file `log`. The
    task fails if the function raises, or returns an int other than 0 (True is 1), the exit code. Another value that the
    function returns, which JSON can hold, is the task's result. `name` is for callers."""

    name: str
    function: Callable[[Any], Any]
    argument: Any
    log: Path


@dataclasses.dataclass(frozen=True)
class Done:
    """A task that has ended: its exit code, -N if signal N killed it; and its result, None after a failure."""

    task: Task
    code: int
    result: Any = None


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A process that carries out tasks, one at a time. It starts with its first task, and anew after a failed task.
    `task` is the task in progress, or None; `process` the process, or None before the first task.

    Args:
      place: index of the process's only core among the cores that this process may use; None binds it to no core.
      inherited: descriptors that the process inherits, for example of a lock.
    """

    def __init__(self, place: int | None, inherited: Sequence[int]):
        self.task: Task | None = None
        self._place, self._inherited = place, inherited
        self.process: subprocess.Popen[bytes] | None = None

    def give(self, task: Task) -> None:
        """Starts a task and returns at once. The task before must have ended, and `take` have returned it."""
        self.task = task
        if self.process is None or self.process.poll() is not None:
            self.process = self._start(task.log)
        assert self.process.stdin is not None
        function = f"{task.function.__module__}:{task.function.__name__}"
        order = json.dumps({"function": function, "argument": task.argument, "log": str(task.log)})
        with contextlib.suppress(BrokenPipeError):  # it has just ended: `take` returns the code
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()

    def take(self) -> Done | None:
        """Returns at once: None while the task is in progress, `Done` once after its end. There must be a task."""
        process, task = self.process, self.task
        assert process is not None and process.stdout is not None and task is not None
        code = process.poll()  # before the look: an answer that is written later is seen the next time
        answer = select.select([process.stdout], [], [], 0)[0] and process.stdout.readline()
        if not answer and code is None:
            return None
        self.task = None
        return Done(task, 0, json.loads(answer)) if answer else Done(task, code or 1)

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as errors:
            process = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=self._inherited,
                bufsize=0,
            )
        if self._place is not None:  # no preexec_fn: it can wait for ever for a lock that a thread held at the fork
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, {sorted(os.sched_getaffinity(0))[self._place]})
        return process


@contextlib.contextmanager
def _workers(jobs: int, inherited: Sequence[int]) -> Iterator[tuple[list[Worker], list[int]]]:
    """Yields the workers and the signals heard so far; ends the workers when the context ends, and then raises as
    `run_tasks` does if a signal was heard. The handlers only note a signal. If a handler raised between the start of a
    process and its entry in a worker, nothing would end that process."""
    can_bind = hasattr(os, "sched_setaffinity")
    workers = [Worker(place if can_bind and 1 < jobs <= cores() else None, inherited) for place in range(jobs)]
    heard: list[int] = []
    asking = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    previous = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in asking}
    try:
        yield workers, heard
    finally:
        processes = [worker.process for worker in workers if worker.process is not None]
        for process in processes:
            process.terminate()  # a training run finishes its step and saves before it ends
        for number, handler in previous.items():  # a second signal ends the wait below
            signal.signal(number, handler)
        for process in processes:
            process.wait()
    if heard:
        raise KeyboardInterrupt if heard[0] == signal.SIGINT else SystemExit(128 + heard[0])


def run_tasks(
    tasks: Sequence[Task],
    *,
    jobs: int,
    inherited: int,
    first_alone: bool = False,
    on_tick: Callable[[Sequence[Task]], None] = lambda running: None,
) -> Iterator[Done]:
    """Carries out tasks, `jobs` ≥ 1 at a time, in worker processes, each bound to a core if 1 < `jobs` ≤ `cores()`.
    Yields the `Done` of each task after its end. Read the iterator in the main thread: tasks start only while the
    iterator is read. The processes end with the iterator.

    Args:
      inherited: the descriptor of a lock, which the workers hold too.
      first_alone: the first task runs alone, and no other task starts if the first fails.
      on_tick: called with the tasks in progress, about twice a second.

    Raises KeyboardInterrupt for SIGINT and SystemExit for SIGTERM or SIGHUP, after the tasks in progress were ended.
    """
    with _workers(jobs, [inherited]) as (workers, heard):
        waiting, alone = collections.deque(tasks), first_alone
        while (waiting or any(worker.task for worker in workers)) and not heard:
            for worker in workers[: 1 if alone else jobs]:
                if waiting and worker.task is None:
                    worker.give(waiting.popleft())
            time.sleep(POLL_SECONDS)
            for worker in workers:
                if worker.task is not None and (done := worker.take()) is not None:
                    if alone and done.code:
                        waiting.clear()
                    alone = False
                    yield done
            on_tick([worker.task for worker in workers if worker.task])


def main() -> int:
    """Runs as a worker: carries out the tasks of stdin, and writes each result to stdout. Stops after a failed task.
    Returns the exit code of the failed task, 1 for an exception, or 0 if no task failed."""
    cli.prepare_process()
    answers = os.dup(1)
    for line in sys.stdin:
        order = json.loads(line)
        with Path(order["log"]).open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        module, _, name = order["function"].partition(":")
        try:
            result = getattr(importlib.import_module(module), name)(order["argument"])
        except Exception:
            traceback.print_exc()
            return 1
        gc.collect()  # the arrays of the task
        cli.return_pages()
        sys.stdout.flush()
        if isinstance(result, int) and result:
            return result
        # A broken pipe: nobody waits for the result, because the command was killed.
        with contextlib.suppress(BrokenPipeError), open(answers, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(result).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
