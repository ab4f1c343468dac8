"""The watchdog: ends a run that has stalled and leaves the stacks of all threads behind."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from rpg_jax.training import heartbeat

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
