"""The parent's side of one verifier process: it sends tasks, receives verdicts, and notices every way to fail."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import Literal

from rpg_jax.rewards import descendants
from rpg_jax.rewards.verdicts import KINDS, LARGEST_OBJECT, Task, Verdict, checked

STARTUP_S = 120.0
_MAX_VERDICT_BYTES = {"score": 4096, "object": LARGEST_OBJECT + 4096}


class Member:
    """One process and the task it works on."""

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
        self.tasks_done = self._sent = 0
        self.unsent = b""
        self.deadline = time.monotonic() + STARTUP_S
        self._received = b""

    def send(self, task_id: int, task: Task, deadline_s: float) -> None:
        self.task_id, self._returns = task_id, task.returns
        self._sent += 1  # a line that is late, or that a function wrote, never answers a later task
        self.deadline = time.monotonic() + deadline_s
        self.unsent = json.dumps({"id": self._sent, **dataclasses.asdict(task)}).encode() + b"\n"

    def unusable(self) -> bool:
        """Whether the process died while it was idle, or wrote a line that no task asked for."""
        return self._process.poll() is not None or self._read() or bool(self._received)

    def poll(self) -> Verdict | None:
        """Moves bytes without blocking, and returns the verdict once the task has ended or failed."""
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
        """Reads the bytes that are in the pipe; true at the end of the pipe."""
        try:
            data = os.read(self.verdicts_fd, 65536)
        except BlockingIOError:
            return False
        self._received += data
        return not data

    def _interpret(self, line: bytes) -> Verdict | None:
        """The verdict in a line. A hostile completion may have written the line: anything else counts as a crash."""
        try:
            message = dict(json.loads(line))
            if self.ready:
                if message["id"] != self._sent or message.get("error") not in (None, *KINDS):
                    raise ValueError
                verdict = Verdict(None, message["error"], str(message["detail"])) if "error" in message else None
                asked = "score" if self._returns == "score" else "value"
                verdict = verdict or checked(self._returns, message[asked])
                self.task_id = None
                self.tasks_done += 1
                return verdict
        except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
            return self._failed("crash")
        if "failed" in message:
            raise ValueError(message["failed"])
        self.ready = True
        return None

    def _failed(self, kind: str) -> Verdict:
        if not self.ready:
            raise RuntimeError(
                f"a verifier process did not start ({kind}): try `python -m rpg_jax.rewards.verifier_process`"
            )
        self.task_id = None
        code = self._process.poll()
        return Verdict(None, kind, "" if code is None else f"exit code {code}")

    def kill(self) -> None:
        """Ends the process with all that it started, and waits for it."""
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
    """No secrets, no accelerator, one thread; and the parent's module search path, for a user's own verifiers."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
