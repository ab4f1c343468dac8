"""A worker at its work: it joins a trainer, reads weights, takes groups, samples and returns them, until the end."""

import contextlib
import functools
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.fleet.link import Link, Unknown, Unreachable
from rpg_jax.rollout.fleet.post import Loan, Post, RunIsOver
from rpg_jax.rollout.fleet.published import assembled, name_of
from rpg_jax.rollout.fleet.worker_engine import WorkerEngine
from rpg_jax.rollout.weights import Params, RolloutError
from rpg_jax.types import Completion

_BEAT = 2.0  # seconds between two signs of life
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two questions for work
_FAULTS = 6  # in a row, after which a worker ends

Connect = Callable[[str, threading.Event], Link]


class Worker:
    """Works for the trainer at `address` until the run is over or `stop` is called.

    Args:
      connect: a link to the process of a trainer at an address; it gives up when the event is set.
      make_engine: makes the engine from the trainer's spec.
      name: of this worker, for people.
      run: the only run to work for; None for any.
      lanes: loans at one time, so that slots that one loan leaves are filled by the next.
    """

    def __init__(
        self,
        address: str,
        *,
        connect: Connect,
        make_engine: Callable[[Mapping[str, Any]], WorkerEngine],
        name: str,
        run: str | None = None,
        lanes: int = 2,
    ):
        self._address, self._connect, self._make_engine, self._lanes = address, connect, make_engine, lanes
        self._hello = {"name": name, "run": run, "versions": messages.versions()}
        self._engine: WorkerEngine | None = None
        self._spec: Mapping[str, Any] | None = None
        self._stopping = threading.Event()

    def work(self) -> None:
        """Works to the end. A trainer that was started again is joined again, for another config with a new engine.

        Raises:
          ValueError: the trainer refuses this worker or what it returned.
          RolloutError: the engine failed several times in a row.
          Unreachable: the trainer does not answer.
        """
        while not self._stopping.is_set():
            with contextlib.ExitStack() as closing:
                try:
                    posts = self._join(closing)
                    spec = posts[0].spec
                    if any(post.spec != spec for post in posts):
                        self._stopping.wait(_LONGEST_PAUSE)
                        raise Unknown("its processes are not of one config yet")
                    if self._engine is None or self._spec != spec:
                        self._engine = None  # frees the weights
                        self._engine, self._spec = self._make_engine(spec), spec
                    self._say(f"works for run {spec['run']!r} at {self._address}")
                    _Shift(posts, self._engine, self._stopping).run(self._lanes)
                    return
                except Unknown as error:
                    self._say(f"the trainer has changed ({error})")
                    self._stopping.wait(_FIRST_PAUSE)
                except Unreachable:
                    if not self._stopping.is_set():
                        raise
        if self._engine is not None:
            self._engine.close()

    def stop(self) -> None:
        """Asks `work` to return soon; what it has taken goes back to the trainer."""
        self._stopping.set()

    def _join(self, closing: contextlib.ExitStack) -> list[Post]:
        """A post at every process of the trainer."""
        worker, posts = secrets.token_hex(8), list[Post]()
        addresses = [self._address]
        for place in range(2**16):
            if place == len(addresses):
                break
            link = self._connect(addresses[place], self._stopping)
            closing.callback(link.close)
            posts.append(Post(link, worker, self._hello))
            addresses[1:] = posts[0].trainers[1:]
        return posts

    def _say(self, text: str) -> None:
        print(f"worker {self._hello['name']}: {text}", file=sys.stderr, flush=True)


class _Shift:
    """The work for one start of a trainer, in threads: `lanes` that sample, and one that returns groups.

    Each of the trainer's processes has a thread that beats. So those that answer hear of the worker while another does
    not, and the worker hears from them that the trainer has changed.
    """

    def __init__(self, posts: list[Post], engine: WorkerEngine, stopping: threading.Event):
        self._posts, self._engine, self._stopping = posts, engine, stopping
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._returns: queue.Queue[tuple[Post, Loan, int, list[Completion]]] = queue.Queue()
        self._moved, self._faults = 0, 0

    def run(self, lanes: int) -> None:
        """Works until the run is over or the worker is asked to stop. Raises what ended it otherwise."""
        beats = [functools.partial(self._beat, post) for post in self._posts]
        loops = [self._lane] * lanes + [self._return_groups, *beats]
        threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        while not self._ended.wait(0.1):
            if self._stopping.is_set():
                self._end(None)
        self._engine.close()  # a driver with threads drops what it samples
        for post in self._posts:
            with contextlib.suppress(LookupError, OSError, ValueError):  # what ended the shift says more
                post.leave()
        if isinstance(self._error, Unknown):
            for thread in threads:  # the next shift has the engine for itself
                thread.join()
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except RunIsOver:
            self._end(None)
        except BaseException as error:
            self._end(error)

    @property
    def _progress(self) -> int:
        return self._moved + self._engine.progress

    def _beat(self, post: Post) -> None:
        while not self._ended.wait(_BEAT):
            post.beat(self._progress)

    def _lane(self) -> None:
        pause = _FIRST_PAUSE
        while not self._ended.is_set():
            loans = 0
            for post in self._posts:
                if (loan := post.lease(self._engine.slots, self._progress)) is not None:
                    self._sample(post, loan)
                    loans += 1
            if loans:
                pause = _FIRST_PAUSE
            elif not self._ended.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _sample(self, post: Post, loan: Loan) -> None:
        left = set(loan.places)

        def note(place: int, group: list[Completion]) -> None:
            left.discard(place)
            self._returns.put((post, loan, place, group))

        others = frozenset(range(len(loan.request.prompts))) - left
        try:
            with self._engine.holding(loan.checksum, lambda: self._weights(loan.checksum)) as rollout:
                rollout.generate(replace(loan.request, done=others, on_group=note))
            self._faults = 0
        except Unknown:  # other weights have taken the place of these: nobody waits for the groups
            post.release(loan, sorted(left), None)
        except (RolloutError, ValueError) as fault:
            if self._ended.is_set():
                return
            post.release(loan, sorted(left), str(fault))
            self._faults += 1
            if self._faults >= _FAULTS:
                raise

    def _weights(self, checksum: int) -> Params:
        """The weights as host arrays, from all processes of the trainer."""

        def moved(size: int) -> None:
            self._moved += size

        return assembled(self._engine.shapes, [post.weights(name_of(checksum), moved) for post in self._posts])

    def _return_groups(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(queue.Empty):
                post, loan, place, group = self._returns.get(timeout=0.2)
                post.complete(loan, place, group)
