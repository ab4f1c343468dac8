"""Stopping early: by a signal, by a preemption notice, or by the watchdog of a run that has stalled.

A signal or a notice ends a run within seconds; a second signal ends it at once.

The run finishes and saves the step in progress if that ends in time. It leaves an evaluation that is due after the step
to the run that continues. No step is saved halfway. A step that does not end within `run.stop_seconds` is lost: the
process ends at that deadline, and the next run repeats every step since the last complete checkpoint, to the same bits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from rpg_jax.parallel import hosts
from rpg_jax.training import heartbeat

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TOGETHER = 1.0  # seconds in which several signals are one request: `timeout` sends two, a notebook one of each kind
_LAST_WORDS = 1.0  # seconds that the last message may take


class StopRequest:
    """Whether the run has been asked to end.

    A thread of its own hears the signals. So a main thread that is deep in a compiled program delays neither the
    deadline nor the second signal.

    Args:
      seconds: the longest time from the request to the end of the process.
      give_up: called at the deadline, before the process ends, to say what stands. The process ends even if it fails or
        hangs.
    """

    def __init__(self, seconds: float, give_up: Callable[[], None]):
        self.signal: int | None = None
        self._asked = threading.Event()  # set by threads only: a handler's `set` could wait on the thread it interrupts
        self._seconds, self._give_up = seconds, give_up
        self._deadline: threading.Timer | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While entered, SIGTERM and SIGINT are requests; in another thread than the main one, which gets none, not."""
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
        """Asks the run to end, as the first signal does. Only two real signals end it at once."""
        if self.signal is not None:
            return
        self.signal = number
        self._deadline = threading.Timer(self._seconds, self._out_of_time)
        self._deadline.daemon = True
        self._deadline.start()
        self._asked.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns once the run has been asked to end, or after so many seconds; whether it has been asked."""
        return self._asked.wait(seconds)

    def agreed(self) -> int | None:
        """The signal that any process of the run has received. Collective: all processes ask after the same steps."""
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


def watch_machine(url: str, stop: StopRequest) -> None:
    """Watches for a preemption on a TPU VM, unless `url` is ""."""
    if url and jax.default_backend() == "tpu":
        watch_preemption(url, stop)


def watch_preemption(url: str, stop: StopRequest, *, retry_seconds: float = 5.0) -> None:
    """Starts a thread that requests a stop once the machine's metadata server answers TRUE at `url`.

    The server answers when its value changes, so the notice arrives within a second.
    """

    def watch() -> None:
        state = "?last_etag=0"
        while stop.signal is None:
            request = urllib.request.Request(
                f"{url}{state}&wait_for_change=true&timeout_sec=60", headers={"Metadata-Flavor": "Google"}
            )
            try:
                with urllib.request.urlopen(request, timeout=90) as answer:
                    state = f"?last_etag={answer.headers.get('ETag', '0')}"
                    preempted = answer.read().strip().upper() == b"TRUE"
            except OSError:
                threading.Event().wait(retry_seconds)
                continue
            if preempted and stop.signal is None:
                print("preemption notice: saving and stopping", file=sys.stderr, flush=True)
                stop.request()

    threading.Thread(target=watch, name="preemption", daemon=True).start()


STALLED = 75
"""Exit code of a stalled run: a supervisor may start it again."""


class Watchdog:
    """Writes all stacks to stall.txt in `folder` and exits with `STALLED` after `seconds` without a heartbeat.

    Every `heartbeat.beat` of this process counts, of any thread. `last_words` is called
    once stall.txt is complete, before the exit. If the interpreter itself is held, no Python thread runs; then C code
    writes the stacks a little later, and the exit code is 1.
    """

    def __init__(self, folder: Path, seconds: float, last_words: Callable[[], None] = lambda: None):
        if seconds <= 0:
            raise ValueError(f"run.stall_seconds must be above 0, got {seconds}")
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
