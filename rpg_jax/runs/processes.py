"""The processes of one run: the run stops where they differ, a signal ends it early, and a watchdog if it has stalled.

After a signal, the run finishes and saves the step in progress. It leaves an evaluation that is due after the step to
the run that continues. No step is saved halfway. A step that does not end within `run.stop_seconds` is lost: the
process ends at that deadline, and the next run repeats every step since the last complete checkpoint, to the same bits.
While a run loads weights or trains its warm start, nothing is to save, and SIGTERM ends it at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax.parallel import hosts, joining
from rpg_jax.rollout import find_driver
from rpg_jax.runs import run_folder
from rpg_jax.training import heartbeat

_GPUS = ("gpu", "cuda", "rocm")  # JAX calls all of them "gpu" once it has found them


def join(config: ConfigDict) -> None:
    """Joins the other processes of the run, if there are any, and finds the devices. Call it before anything touches a
    device. Several processes wait for each other. A second call only looks for the devices again. Raises ValueError if
    the settings contradict each other, or there is no device of the kind that `run.platform` or JAX_PLATFORMS asks for.
    The message names the processes of this host that hold a TPU."""
    asked = config.run.platform
    if asked:  # JAX then raises where the device is missing, instead of taking the CPU
        jax.config.update("jax_platforms", "cuda" if asked == "gpu" else asked)
    arguments = joining.settings(config.distributed.heartbeat_timeout)
    if arguments is not None and not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        joining.initialize(arguments)
    found = platform()
    if asked and found != ("gpu" if asked in _GPUS else asked):
        raise ValueError(f"run.platform={asked!r}, but JAX found {found!r} on {socket.gethostname()}")


def platform() -> str:
    """The platform that JAX computes on: `cpu`, `gpu` or `tpu`. Raises ValueError if its device is absent or taken."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is one
        holders = "; ".join(f"process {pid} ({command})" for pid, command in device_holders().items())
        held = f" It is held by {holders}: stop that, then start again." if holders else ""
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = " ".join(str(error).split()) or f"JAX finds nothing of {asked!r}"
        raise ValueError(f"no accelerator on {socket.gethostname()}: {reason}.{held}") from error


def fast_dtype() -> tuple[str, str]:
    """(the dtype that is fast on this process's devices, "float32" or "bfloat16"; the reason, to end a sentence)."""
    if platform() == "cpu":
        return "float32", ", because CPUs emulate bfloat16"
    capability = getattr(jax.devices()[0], "compute_capability", None)  # only GPUs have one
    if capability is not None and float(capability) < 8:
        return "float32", f", because a GPU of compute capability {capability} has no bfloat16"
    return "bfloat16", ", which is fast here; weights and optimizer stay in float32"


def check(config: ConfigDict) -> None:
    """Checks this process against the config and against the other processes. Collective: all processes call it. Raises
    ValueError if sampling ahead in one process would share several devices with training, or if processes differ in
    their `facts`: devices, commit, versions, config. Then the message names the hosts and the differences."""
    ahead, devices = config.rollout.max_staleness, jax.device_count()
    shared = not config.rollout.devices and not find_driver(config.rollout.driver).remote
    if ahead and jax.process_count() == 1 and devices > 1 and shared:
        raise ValueError(
            f"rollout.max_staleness={ahead} on {devices} devices needs some devices that only sample: two threads that "
            "launch programs on the same devices can block each other for ever. Set rollout.devices, "
            f"to {devices // 2} for instance, or rollout.max_staleness=0, or rollout.driver=servers"
        )
    gathered = hosts.all_gather_bytes(json.dumps(facts(config)).encode())
    if difference := differences([json.loads(text) for text in gathered]):
        raise ValueError(f"the hosts of this run are not alike: {difference}")


def facts(config: ConfigDict) -> dict[str, Any]:
    """Facts that must be the same in all processes of a run, by name; "host" alone may differ. Call `join` before."""
    made_with = run_folder.made_with()
    fields = run_folder.flat_fields(config)
    return {
        "host": socket.gethostname(),
        "platform": made_with["platform"],
        "local devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
        "commit": made_with["commit"],
        "python": made_with["python"],
        **{f"version of {name}": version for name, version in made_with["packages"].items()},
        "config hash": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12],
        **{f"config.{name}": value for name, value in fields.items()},
    }


def differences(all_facts: list[dict[str, Any]]) -> str:
    """A text with the differences between each process's `facts` and the first process's; "" without a difference."""
    first, named = all_facts[0], []
    for process, other in enumerate(all_facts[1:], start=1):
        named += [
            f"process {process} on {other['host']} has {name} {other.get(name)!r}, process 0 on {first['host']} "
            f"{first.get(name)!r}"
            for name in sorted({*first, *other} - {"host"})
            if first.get(name) != other.get(name)
        ]
    return "; ".join(named)


def device_holders(proc: Path = Path("/proc")) -> dict[int, str]:
    """{process id: command line} of other processes of this host that have a TPU's device file open. Processes of other
    users are not seen. `proc` is the folder of Linux's process files; {} without this folder."""
    holders = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            files = [os.readlink(file) for file in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # the process has ended, or belongs to another user
        if any(file.startswith(("/dev/accel", "/dev/vfio/")) and file != "/dev/vfio/vfio" for file in files):
            holders[int(folder.name)] = command
    return holders


SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOGETHER = 1.0  # seconds in which several signals are one request: `timeout` sends two, a notebook one of each kind
_LAST_WORDS = 1.0  # seconds that the last message may take


class StopRequest:
    """Whether the run was asked to end. `signal` is the number of the first SIGTERM, SIGINT or `request`, or None.

    Inside `listening` the first signal is the request. A signal more than 1 s later ends the process at once, with the
    exit code 128 + its number. A thread hears the signals. So a main thread in a compiled program delays neither the
    deadline nor the second signal.

    Args:
      seconds: the time from the request to the deadline. `saved` cancels the deadline.
      give_up: called at the deadline, to say what is saved. Then, even if `give_up` fails or hangs, the process ends
        with the exit code 128 + `signal`.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]):
        self.signal: int | None = None
        self._asked = threading.Event()  # set by threads only: a handler's `set` could wait on the thread it interrupts
        self._seconds, self._give_up = seconds, give_up
        self._deadline: threading.Timer | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Inside the block, SIGTERM and SIGINT ask the run to end. Outside the main thread it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        threading.Thread(target=self._hear, args=(ours,), name="signals", daemon=True).start()
        # The handlers do nothing. They are installed only while the thread listens, or a signal between would be lost.
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        previous = {}
        try:
            for number in SIGNALS:
                previous[number] = signal.signal(number, lambda *_: None)
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            theirs.close()

    def request(self, number: int = signal.SIGTERM) -> None:
        """Asks the run to end, as signal `number` would, and starts the deadline. A second call does nothing."""
        if self.signal is not None:
            return
        self.signal = number
        self._deadline = threading.Timer(self._seconds, self._out_of_time)
        self._deadline.daemon = True
        self._deadline.start()
        self._asked.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the run is asked to end, at most `seconds` (None: for ever). Returns whether it was asked."""
        return self._asked.wait(seconds)

    def agreed(self) -> int | None:
        """The largest signal that any process received, or None. Collective: all processes ask after the same steps."""
        return hosts.pmax(self.signal or 0) or None

    def saved(self) -> None:
        """Cancels the deadline of the request. Call it when the checkpoint of the last step is on disk."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _hear(self, ours: socket.socket) -> None:
        first = None
        while received := ours.recv(64):
            for number in received:
                if number not in SIGNALS:
                    continue
                now = time.monotonic()
                if first is not None and now - first > _TOGETHER:
                    os._exit(128 + number)
                first = first or now
                self.request(number)
        ours.close()

    def _out_of_time(self) -> None:
        def say() -> None:
            self._give_up()
            sys.stderr.flush()

        try:  # in a thread: a print to a pipe that nobody reads does not return
            words = threading.Thread(target=say, name="last words", daemon=True)
            words.start()
            words.join(_LAST_WORDS)
        finally:
            os._exit(128 + (self.signal or 0))


STALLED = 75
"""Exit code of a stalled run: a supervisor may start it again."""


class Watchdog:
    """A context that ends the process after `seconds` without a heartbeat, with the exit code `STALLED`. Before, it
    writes the stacks of all threads to `folder`/stall.txt, and then calls `last_words`. Every `heartbeat.beat` of this
    process counts, of any thread. If the interpreter itself is held, no Python thread runs; then C code writes the
    stacks a little later, and the exit code is 1. With several processes, the file of process N is stall-N.txt. At the
    end an empty file is deleted."""

    def __init__(self, folder: Path, seconds: float, last_words: Callable[[], None] = lambda: None):
        name = f"stall-{jax.process_index()}.txt" if jax.process_count() > 1 else "stall.txt"
        self._path, self._seconds, self._last_words = folder / name, seconds, last_words
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._file = self._path.open("a")
        heartbeat.beat()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()  # it must not arm the timer again
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def _watch(self) -> None:
        armed = -math.inf
        while True:
            if (beat := heartbeat.latest().time) > armed:
                faulthandler.dump_traceback_later(1.25 * self._seconds + 5, exit=True, file=self._file)
                armed = beat
            if self._done.wait(min(1.0, self._seconds / 4)):
                return
            latest = heartbeat.latest()
            silent = time.monotonic() - latest.time
            if silent > self._seconds:
                message = f"stalled: no heartbeat for {silent:.0f} s, during {latest.doing}; all stacks: {self._path}"
                print(f"{message}\n", file=self._file, flush=True)
                faulthandler.dump_traceback(file=self._file, all_threads=True)
                print(f"error: {message}", file=sys.stderr, flush=True)
                try:
                    self._last_words()  # if it hangs too, the timer in C still ends the process
                finally:
                    os._exit(STALLED)
