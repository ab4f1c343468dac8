"""A verifier process leaves nothing running: its keeper ends every process that the verifier started.

A process group does not hold a process that calls `setsid`. On Linux a verifier process therefore gets a parent of its
own, the keeper, which ends with it and ends all that descends from it. Where the system allows it, the verifier works
in a PID namespace: the kernel ends the namespace as one, and the verifier cannot signal a process outside of it.
Elsewhere on Linux the keeper is a subreaper: it inherits every process that lost its parent. A verifier that kills its
keeper through the C library can then leave a process behind. Other systems have neither: only the process group ends.

Sources: pid_namespaces(7), PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG in prctl(2).
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

END = signal.SIGUSR1  # asks a keeper to end its verifier
AVAILABLE = sys.platform == "linux"
_LOOK_S = 0.5  # between two looks whether the trainer is alive
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000


def keep() -> None:
    """Forks, and returns only in the child, in which verifiers run. On other systems than Linux it does nothing. The
    calling process becomes the keeper: it waits, kills what the child leaves running, and never returns. The keeper
    ends when the child has ended, with the child's exit code (128 + n after signal n). On `END` (SIGUSR1), or when the
    keeper's own parent has ended, the keeper kills the child and all that the child started, and ends with 137."""
    if not AVAILABLE:
        return
    trainer = os.getppid()
    libc = ctypes.CDLL(None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END})
    namespace = own_pid_namespace(libc)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child:
        detach()
        _watch(child, trainer, namespace)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in case that the keeper is killed
    if namespace and (verifier := os.fork()):  # this is process 1 of the namespace, and all others end with it
        detach()
        while (ended := os.wait())[0] != verifier:
            pass
        os._exit(_exit_code(ended[1]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, END})


def own_pid_namespace(libc: ctypes.CDLL) -> bool:
    """Lets this process start its later children in a new PID namespace. Returns False if the system refuses. Where
    only a new user namespace allows it, this process enters one, and keeps its rights. `libc` is the C library."""
    if libc.unshare(_CLONE_NEWPID) == 0:
        return True
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) != 0:
        return False
    with contextlib.suppress(OSError):  # without these lines the user has no name, and the same rights
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")
    return True


def _watch(child: int, trainer: int, namespace: bool) -> NoReturn:
    code = None
    while code is None and os.getppid() == trainer:
        received = signal.sigtimedwait({signal.SIGCHLD, END}, _LOOK_S)
        if received is not None and received.si_signo == END:
            break
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = _exit_code(ended[1])
    if namespace and code is None:
        os.kill(child, signal.SIGKILL)  # process 1 of the namespace: its end ends all the others
    while True:
        for pid in _children() if not namespace else ():
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()  # the children of a process that has ended are now this process's
        except ChildProcessError:
            os._exit(128 + signal.SIGKILL if code is None else code)


def _children() -> list[int]:
    own, children = os.getpid(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((process / "stat").read_bytes().rpartition(b")")[2].split()[1]) == own:
                children.append(int(process.name))
    return children


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def detach() -> None:
    """Points standard input, output and error of this process to the null device. So the process holds no end of a
    verifier's connection, and the pool notices when the verifier ends."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
