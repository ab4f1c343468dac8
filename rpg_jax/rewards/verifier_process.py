"""One verifier process: reads tasks from standard input, writes verdicts to standard output, one JSON line each.

The text that it reads may attack it. Once the verifiers are imported, it gives up everything that they do not need:
memory, files, processes, sockets, signals. An alarm, which needs no running Python, ends it when an import or a task
overruns by far, even if the parent is gone. The parent's deadline stops all else; the keeper ends what still runs.

It ignores the signals that end a run. `systemctl stop` sends them to all processes of a service, while the parent still
needs verdicts to finish its step.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from rpg_jax.rewards import descendants
from rpg_jax.rewards.callables import load
from rpg_jax.rewards.verdicts import check_call, checked, failure

_DENIED = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "os.fork", "os.forkpty", "pty.spawn"),
    *("subprocess.Popen", "os.kill", "os.killpg", "signal.pthread_kill", "os.putenv", "os.chdir", "os.chmod"),
    *("os.chown", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"),
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "shutil.rmtree"),
)
_MEMORY_BYTES = 2**29  # of address space, beyond the need of the imports
_denied: list[str] = []


def main() -> None:
    """Works until standard input ends. The command's argument is JSON, an object with these keys: "functions":
    {"module:function": [names of its arguments]}; "made": {"module:Class": options}, the objects to make; "startup_s"
    and "deadline_s": seconds for the imports and for a task. An alarm kills the process after about twice the time. The
    first line written is {"ready": process id}; or {"failed": reason}, and then the process ends. A line read is a
    `Task` with an "id". Later lines written have the "id" with "score", "value", or "error" and "detail"."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descendants.keep()
    setup = json.loads(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, 2 * setup["startup_s"])
    tasks = os.fdopen(os.dup(0), "r", encoding="utf-8")
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    descendants.detach()  # verifiers print to nobody; `tasks` and `verdicts` have file descriptors of their own
    logging.disable(logging.CRITICAL)
    try:
        made = {path: load(path, "environment")(**options) for path, options in setup["made"].items()}
        functions = {}
        for path, arguments in setup["functions"].items():
            owner, _, method = path.rpartition(".")
            function = getattr(made[owner], method) if owner in made else load(path, "reward")
            functions[path] = function, check_call(function, path, arguments)  # a reward may leave out the prompt
    except Exception as error:
        _write(verdicts, {"failed": str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"})
        return
    _confine()
    own_pid = os.getpid()
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write(verdicts, {"ready": own_pid})
    for line in tasks:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * setup["deadline_s"] + 1)
        function, count = functions[task["function"]]
        verdict = _judge(function, {**task, "arguments": task["arguments"][:count]})
        if os.getpid() != own_pid:  # a child that a verifier forked in spite of the limits
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(verdicts, {"id": task["id"], **verdict})


def _judge(function: Callable[..., Any], task: dict[str, Any]) -> dict[str, Any]:
    _denied.clear()
    try:
        found = checked(task["returns"], function(*task["arguments"], **task["options"]))
        verdict: dict[str, Any] = {"score": found.score} if found.value is None else {"value": found.value}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: an answer must not end the process
        failed = failure(error)
        verdict = {"error": failed.error, "detail": failed.detail}
    # A forbidden call counts even if the verifier swallowed the exception.
    return {"error": "forbidden", "detail": _denied[0]} if _denied else verdict


def _write(file, message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _confine() -> None:
    limits = {"CORE": 0, "FSIZE": 0, "NOFILE": 64}
    if sys.platform == "linux":  # elsewhere these two are not enforced or not there
        with open("/proc/self/statm", encoding="utf-8") as statm:
            virtual = int(statm.read().split()[0]) * resource.getpagesize()
        limits |= {"AS": virtual + _MEMORY_BYTES, "NPROC": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.dont_write_bytecode = True  # else the first import of a module not compiled yet is a forbidden write
    sys.addaudithook(_deny)


def _deny(event: str, arguments: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in _DENIED or writes:
        _denied.append(event)
        raise PermissionError(f"a verifier may not do this: {event}")


if __name__ == "__main__":
    main()
