"""Calls of an environment, in worker processes that can be killed or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rpg_jax.data.prompts import Problem
from rpg_jax.environments.environment import (
    METHODS,
    Declaration,
    Posed,
    Turn,
    call,
    checked_messages,
    checked_turn,
)
from rpg_jax.rewards.callables import InProcess
from rpg_jax.rewards.pool import WorkerPool
from rpg_jax.rewards.verdicts import CHANCE, BadScore, FirstFailures, Task, Verdict, failure

_WORKER = "rpg_jax.environments.environment:WorkerEnvironment"
_WAITING = 64  # threads that wait for an environment
_TOGETHER = 64  # problems that one thread opens


class Stage(contextlib.AbstractContextManager["Stage"]):
    """An environment with its options, and up to 64 threads that ask it. Close it, or use it as a context, to end the
    threads.

    Worker processes start when calls need them. A call that hangs holds one thread and one process until the deadline,
    and the others go on. An environment that is not pooled is made here at once, and asked in this process.

    Args:
      declaration: says where the environment is, and whether it runs in worker processes (is pooled).
      options: the keywords that make the environment.
      workers: the most processes; by default one per CPU, at most 8.
      deadline_s: seconds that a call may take.

    Raises as `Declaration.make` does, if the environment runs in this process.
    """

    def __init__(
        self,
        declaration: Declaration,
        options: Mapping[str, Any],
        *,
        workers: int | None = None,
        deadline_s: float = 10.0,
    ):
        self.name = declaration.path
        self._runs: WorkerPool | InProcess
        if declaration.pooled:
            functions = {f"{_WORKER}.{name}": arguments for name, arguments in METHODS.items()}
            made = {_WORKER: {"path": self.name, "options": dict(options)}}
            self._runs = WorkerPool(functions, made=made, size=workers, deadline_s=deadline_s)
        else:
            environment = declaration.make(options)
            calls = {f"{_WORKER}.{name}": functools.partial(call, environment, name) for name in METHODS}
            self._runs = InProcess(calls, deadline_s)
        self._threads = ThreadPoolExecutor(_WAITING, "environment")
        self._first = FirstFailures(f"environment.name={self.name}", "turn")

    def opened(self, problems: Sequence[Problem]) -> list[Problem]:
        """Waits for `reset` on each problem, and returns the problems in order. The messages of `reset` become
        the problem's `messages`, unless they equal the problem's own opening. Raises ValueError if `reset` fails on a
        problem, or the environment cannot be made, and ChildProcessError if the worker processes do not start."""
        chunks = [problems[i : i + _TOGETHER] for i in range(0, len(problems), _TOGETHER)]
        return [problem for opened in self._threads.map(self._open, chunks) for problem in opened]

    def step(self, problem: Problem, messages: Sequence[Mapping[str, Any]], completion: str) -> Verdict:
        """Waits for the answer to a turn. Several threads may call this.

        `messages` are the conversation before the turn, those of `reset` first, and `completion` is the turn without
        its stop token. Returns a verdict with the value {"observation": messages, "reward": float, "done": bool}, or
        with the kind of error. After a deadline, a crash, a lack of memory or an OSError, `step` asks again, once.

        Raises:
          ValueError: the environment cannot be made, or every turn of its first 16 problems has failed.
          ChildProcessError: the worker processes do not start.
        """
        task = _task("step", problem, list(messages), completion)
        [verdict] = self._runs.run([task])
        if verdict.error in CHANCE:
            [verdict] = self._runs.run([task])
        if (value := verdict.value) is not None:
            try:  # the turn is checked again: a worker process may lie
                turn = Turn(value.get("observation", ""), value.get("reward", 0.0), value.get("done", False))
                verdict = Verdict(None, value=checked_turn(turn))
            except BadScore as error:
                verdict = failure(error)
        self._first.look([problem.prompt_id], [verdict])
        return verdict

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begins function(*arguments), which may call `step`, in a thread of this stage. Returns the call's future."""
        return self._threads.submit(function, *arguments)

    def close(self) -> None:
        """Cancels calls not begun and calls in this process; waits for calls in worker processes, and ends these."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._runs.close()
        self._threads.shutdown(wait=True)

    def __exit__(self, *_) -> None:
        self.close()

    def _open(self, problems: Sequence[Problem]) -> list[Problem]:
        verdicts = self._runs.run([_task("reset", problem) for problem in problems])
        return [_opened(self.name, *each) for each in zip(problems, verdicts, strict=True)]


def _task(name: str, problem: Problem, *others: Any) -> Task:
    return Task(f"{_WORKER}.{name}", (dataclasses.asdict(Posed.of(problem)), *others), returns="object")


def _opened(name: str, problem: Problem, verdict: Verdict) -> Problem:
    try:
        if verdict.value is None:
            raise ValueError(f"{verdict.error} ({verdict.detail})")
        messages = checked_messages(verdict.value.get("messages"))
        if not messages or messages[-1]["role"] == "assistant":
            raise ValueError("it must return messages, and the last one is not the assistant's")
        if messages == problem.opening:
            return problem
    except ValueError as error:
        raise ValueError(f"environment.name={name}: reset of {problem.prompt[:80]!r} failed: {error}") from error
    return dataclasses.replace(problem, messages=tuple(messages))
