"""Stopping early: a signal ends a run after the step in progress, the second one at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class StopRequest:
    """Whether SIGTERM or SIGINT has asked the run to end; `signal` is its number, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While entered, the first signal is a request; the second raises SystemExit wherever the run is."""

        def stop(number: int, _: Any) -> None:
            if self.signal is not None:
                raise SystemExit(128 + number)
            self.signal = number

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
