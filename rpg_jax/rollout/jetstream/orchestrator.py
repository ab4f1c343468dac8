"""The orchestrator driver: JetStream's Driver in this process, and a rollout that uses the Driver's threads.

A fault of a thread, or a stop, raises an exception in each call that waits. One JetStream request is a chunk of
prompts. The generate thread gives each of its completions a slot, and tells the completion's channel of tokens and of
the end. JetStream's detokenize thread has nothing to do: text is made elsewhere.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rpg_jax.rollout.engine import DecodeEngine
from rpg_jax.rollout.jetstream.adapter import JetStreamEngine, JetstreamMetricsCollector, orchestrator
from rpg_jax.rollout.request import Request, Row
from rpg_jax.rollout.rollout import Feedable
from rpg_jax.rollout.schedule import Chunk, Finish, Schedule, Usage, completions_of, plan
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion

POLL = 0.2  # seconds between two looks at whether a wait has become pointless


class Channel(Protocol):
    """Hears of a request's rows. The driver's threads call the methods, which must not wait."""

    def note(self, row: Row, ended: bool) -> None:
        """Notes that `row.transcript` may have new tokens. With `ended` the row gets none: it is over or cancelled."""

    def set_exception(self, exception: BaseException) -> None:
        """Takes the RolloutError of a driver that has ended. No row gets further tokens."""


class GuardedDriver(orchestrator.Driver):
    """JetStream's Driver, but it neither kills the process nor leaves a caller waiting. It starts its threads at once.

    Args:
      engine: decodes.
      keep_state: whether the decode state stays allocated while there is nothing to decode.
      usage: the driver adds its work to this object.
      metrics_collector: JetStream's, for Prometheus; None for no metrics.
    """

    def __init__(self, engine: DecodeEngine, *, keep_state: bool, usage: Usage, metrics_collector):
        self._guard = threading.Lock()
        self._channels: set[Channel] = set()
        self._fault: BaseException | None = None
        self._placed = self._received = 0
        self._keep_state = keep_state
        self._schedule = Schedule(engine, usage, lambda row: row.channel.note(row, ended=True))
        adapter = JetStreamEngine(engine)
        super().__init__(
            prefill_engines=[adapter],
            generate_engines=[adapter],
            prefill_params=[engine.weights],
            generate_params=[engine.weights],
            interleaved_mode=True,
            jax_padding=False,
            metrics_collector=metrics_collector,
        )

    def submit(self, chunks: Sequence[Chunk], channel: Channel) -> None:
        """Queues chunks and returns at once. `channel` hears of a fault of the driver until `retire`; the `Row.channel`
        of each row hears of the row's tokens. Raises RolloutError if the driver has ended."""
        with self._guard:
            if not self.live:
                raise self._error()
            self._channels.add(channel)
            for chunk in chunks:
                self.place_request_on_prefill_queue(
                    orchestrator.ActiveRequest(max_tokens=0, return_channel=channel, prefill_content=chunk)
                )
                self._placed += 1  # afterwards: an interrupt in between must leave nothing to wait for

    def retire(self, channel: Channel) -> None:
        """Forgets `channel`: a later fault of the driver does not reach it. A second call does nothing."""
        with self._guard:
            self._channels.discard(channel)

    @property
    def has_room(self) -> bool:
        """Whether no row waits for its prefill or for a slot. Raises RolloutError as `check_alive` does."""
        self.check_alive()
        return self._placed == self._received and not self._schedule.waiting

    def check_alive(self) -> None:
        """Raises RolloutError if the driver or one of its threads has ended, because no result would come any more."""
        if not self.live or not all(thread.is_alive() for thread in self._all_threads):
            raise self._error()

    def on_fault(self, thread: str, fault: BaseException) -> None:
        """Ends the driver because of the exception `fault` in the thread of the name `thread`. All channels get a
        RolloutError whose cause is `fault`. Exceptions after the end are taken as consequences and dropped."""
        with self._guard:
            if self.live and not isinstance(fault, _Stopped):
                self._fault = fault
            self._end(thread)

    def stop(self) -> None:
        """Ends the driver: channels that are not retired get a RolloutError, and the threads end. Blocks until the
        threads have ended, except in a thread of the driver itself."""
        with self._guard:
            self._end("driver")
        # A callback, or the collection of garbage, may call this in one of the driver's own threads.
        if threading.current_thread() in self._all_threads:
            threading.Thread(target=super().stop, name="stop", daemon=True).start()
        else:
            super().stop()

    def _end(self, thread: str) -> None:
        self.live = False
        for channel in self._channels:
            channel.set_exception(self._error(thread))
        self._channels.clear()

    def _error(self, thread: str = "driver") -> RolloutError:
        if self._fault is None:
            return RolloutError("the rollout driver was stopped before this request was complete")
        error = RolloutError(f"the rollout's {thread} thread failed: {type(self._fault).__name__}: {self._fault}")
        error.__cause__ = self._fault
        return error

    def _process_prefill_content(self, request, tokenizer, is_bos, max_prefill_length):
        """Returns the tokens and lengths of the request's `Chunk`, which is padded and needs no BOS in front."""
        chunk = request.prefill_content
        over = all(row.cancelled for row in chunk.rows)  # then nobody reads the prefix: the schedule drops the rows
        return (chunk.tokens[:1, :16], chunk.lengths[:1].clip(max=16)) if over else (chunk.tokens, chunk.lengths)

    def _take(self, source: queue.Queue) -> Any:
        """Waits for an item of `source` and returns it. Raises _Stopped if the item is None or the driver ends."""
        while self.live:
            try:
                item = source.get(timeout=POLL)
            except queue.Empty:
                continue
            if item is None:
                break
            return item
        raise _Stopped

    def _generate_thread(self, idx: int) -> None:
        """Decodes until the driver ends. JetStream's own loop inserts one request per call, runs up to eight dispatches
        ahead of the thread that reads the results, and asserts that a slot is taken while another thread frees it."""
        schedule, slots = self._schedule, self._schedule.engine.decoding.slots
        if self._metrics_collector:
            gauge = self._metrics_collector.get_slots_available_percentage_metric(idx)
            gauge.set_function(lambda: len(schedule.free) / slots)
        while self.live:
            if schedule.empty and not self._keep_state and self._placed == self._received:
                schedule.release_state()
            while schedule.hungry and (self._placed > self._received or schedule.empty):
                request = self._take(self._generate_backlogs[idx])
                schedule.add(request.prefill_result, request.prefill_content.rows)
                self._received += 1
            schedule.round(more=self._placed > self._received)
            for row in schedule.live.values():
                row.channel.note(row, ended=False)


class _Stopped(Exception):
    """The driver ended while one of its threads waited."""


class Ticket:
    """The channel of a blocking call, which waits until all rows of `groups` have ended or a fault comes. `groups` are
    the rows of each prompt of `request`. The constructor makes this ticket the channel of each row."""

    def __init__(self, request: Request, groups: Sequence[Sequence[Row]]):
        self._finish, self._counting = Finish(request, groups), threading.Lock()
        self._ended = threading.Event()
        self._fault: BaseException | None = None
        self._rows = [row for rows in groups for row in rows]
        for row in self._rows:
            row.channel = self

    def note(self, row: Row, ended: bool) -> None:
        """Counts a row that has ended and was not cancelled. The last row of a group hands the group to `on_group`."""
        if not ended:
            return
        with self._counting:
            if not row.cancelled:
                self._finish.completed(row)
            if self._finish.over:
                self._ended.set()

    def set_exception(self, exception: BaseException) -> None:
        """Makes `wait` raise `exception`, unless all rows have ended."""
        if not self._ended.is_set():
            self._fault = exception
            self._ended.set()

    def abandon(self) -> None:
        """Cancels all rows: their slots are freed at the next dispatch, and `on_group` receives no further group."""
        with self._counting:
            for row in self._rows:
                row.cancelled = True

    def wait(self, driver: GuardedDriver) -> None:
        """Blocks until all rows have ended. Raises RolloutError if the rows' `driver` ends before, and the exception of
        `set_exception`."""
        while not self._ended.wait(POLL):
            driver.check_alive()
        if self._fault is not None:
            raise self._fault


class JetStreamRollout(Feedable):
    """The rollout that decodes in the threads of a `GuardedDriver`. Several threads may call `generate` at once.

    Args:
      engine: decodes, in the threads of the driver.
      keep_state: whether the decode state, with the cache, stays allocated between calls; by default it is freed.
      metrics_collector: JetStream's gauges, for a server; None for no metrics.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        *,
        keep_state: bool = False,
        metrics_collector: JetstreamMetricsCollector | None = None,
    ):
        self.engine, self.weights, self.usage = engine, engine.weights, Usage()
        self._options: dict[str, Any] = {"keep_state": keep_state, "metrics_collector": metrics_collector}
        self._lock = threading.Lock()
        self._drivers: list[GuardedDriver] = []
        # Threads hold the driver, never this object. So they stop when it is dropped, and at exit if it is still open.
        self._finalizer = weakref.finalize(self, _stop, self._drivers)

    @contextlib.contextmanager
    def begin(self, request: Request) -> Iterator[Callable[[], list[list[Completion]]]]:
        """A context that begins to sample, and gives its block a function that waits for the completions and returns
        those of each prompt in order, [] for a prompt in `request.done`. The function raises RolloutError if sampling
        fails. An exception in the block cancels the request. Entry raises ValueError if the request does not fit."""
        groups, chunks = plan(self.engine, request)
        version, driver, ticket = self.weights.version, self.driver(), Ticket(request, groups)

        def completions() -> list[list[Completion]]:
            if chunks:
                ticket.wait(driver)
            return completions_of(request, groups, version)

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
        """As `GuardedDriver.has_room`; True without a driver, before the first request and after `close`."""
        with self._lock:
            return not self._drivers or self._drivers[0].has_room

    def close(self) -> None:
        """Stops the threads and frees the cache. Calls that wait raise RolloutError; later calls start new threads."""
        with self._lock:
            _stop(self._drivers)

    def driver(self) -> GuardedDriver:
        """Returns the running driver; starts one if there is none, or if the last driver has failed or was stopped."""
        with self._lock:
            if not self._drivers or not self._drivers[0].live:
                _stop(self._drivers)
                self._drivers.append(GuardedDriver(self.engine, usage=self.usage, **self._options))
            return self._drivers[0]


def _stop(drivers: list[GuardedDriver]) -> None:
    while drivers:
        drivers.pop().stop()
