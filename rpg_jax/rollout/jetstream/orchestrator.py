"""The orchestrator driver: a rollout over JetStream's threads, in process."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rpg_jax.rollout.chunks import Finish, Planner, Row
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.interface import Feedable, Request
from rpg_jax.rollout.jetstream.compat import JetstreamMetricsCollector
from rpg_jax.rollout.jetstream.guarded import POLL, GuardedDriver
from rpg_jax.rollout.schedule import Usage
from rpg_jax.types import Completion


class Ticket:
    """The channel of a blocking call: counts its rows down, or takes the fault that ends the wait."""

    def __init__(self, request: Request, groups: Sequence[Sequence[Row]]):
        self._left, self._finish = sum(map(len, groups)), Finish(request, groups)
        self._counting = threading.Lock()
        self._ended = threading.Event()
        self._fault: BaseException | None = None
        self._rows = [row for rows in groups for row in rows]
        for row in self._rows:
            row.channel = self

    def add_result(self, result: tuple[np.ndarray, np.ndarray]) -> None:
        """Does nothing: the rows keep their tokens themselves."""

    def close(self, row: Row) -> None:
        with self._counting:
            if not row.cancelled:
                self._finish.completed(row)
            self._left -= 1
            if self._left == 0:
                self._ended.set()

    def set_exception(self, exception: BaseException) -> None:
        if not self._ended.is_set():
            self._fault = exception
            self._ended.set()

    def abandon(self) -> None:
        """Cancels the rows; `on_group` receives no further group."""
        with self._counting:
            for row in self._rows:
                row.cancelled = True

    def wait(self, driver: GuardedDriver) -> None:
        """Returns when all rows have ended. Raises the fault, or RolloutError if the driver has ended."""
        while not self._ended.wait(POLL):
            driver.check_alive()
        if self._fault is not None:
            raise self._fault


class JetStreamRollout(Feedable):
    """Decodes in the threads of a `GuardedDriver`. Several threads may call `generate` at once.

    Args:
      engine: shared with the `GuardedDriver`.
      keep_state: keep the decode state allocated between calls; by default a rollout phase leaves no cache behind.
      metrics_collector: JetStream's gauges, for a server.
    """

    def __init__(
        self,
        engine: QwenEngine,
        *,
        keep_state: bool = False,
        metrics_collector: JetstreamMetricsCollector | None = None,
    ):
        self.engine, self.weights, self.usage = engine, engine.weights, Usage()
        self._planner = Planner(engine)
        self._options: dict[str, Any] = {"keep_state": keep_state, "metrics_collector": metrics_collector}
        self._lock = threading.Lock()
        self._drivers: list[GuardedDriver] = []
        # Threads hold the driver, never this object. So they stop when it is dropped, and at exit if it is still open.
        self._finalizer = weakref.finalize(self, _stop, self._drivers)

    def generate(self, request: Request) -> list[list[Completion]]:
        with self.begun(request) as completions:
            return completions()

    @contextlib.contextmanager
    def begun(self, request: Request) -> Iterator[Callable[[], list[list[Completion]]]]:
        groups, chunks = self._planner.plan(request)
        version, driver, ticket = self.weights.version, self.driver(), Ticket(request, groups)

        def completions() -> list[list[Completion]]:
            if chunks:
                ticket.wait(driver)
            return self._planner.completions(request, groups, version)

        try:
            if chunks:
                driver.submit(chunks, ticket)
            yield completions
        except BaseException:
            ticket.abandon()
            raise
        finally:
            driver.retire(ticket)

    @property
    def has_room(self) -> bool:
        with self._lock:
            return not self._drivers or self._drivers[0].has_room

    def close(self) -> None:
        """Stops the threads and frees the cache; a later `generate` starts them again."""
        with self._lock:
            _stop(self._drivers)

    def driver(self) -> GuardedDriver:
        """The running driver: a fresh one if the last one has failed or was closed."""
        with self._lock:
            if not self._drivers or not self._drivers[0].live:
                _stop(self._drivers)
                self._drivers.append(GuardedDriver(self.engine, usage=self.usage, **self._options))
            return self._drivers[0]


def _stop(drivers: list[GuardedDriver]) -> None:
    while drivers:
        drivers.pop().stop()
