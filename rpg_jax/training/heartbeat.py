"""The heartbeat of this process: every long piece of work calls `beat`, and the run's watchdog asks for the `latest`.

There is one heartbeat a process, so no function hands it on. Any thread may call `beat`, at any rate.
"""

import time
from typing import NamedTuple


class Heartbeat(NamedTuple):
    """A heartbeat: its time by `time.monotonic`, in seconds, and the work in progress, in words."""

    time: float
    doing: str


_latest = Heartbeat(time.monotonic(), "the start")


def beat(doing: str | None = None) -> None:
    """Records a heartbeat; `doing` names the work that begins. Without a name the work in progress goes on."""
    global _latest
    _latest = Heartbeat(time.monotonic(), _latest.doing if doing is None else doing)


def latest() -> Heartbeat:
    """Returns the newest heartbeat of any thread."""
    return _latest
