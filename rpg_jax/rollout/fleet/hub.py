"""The trainer's list of workers and of groups that they sample. It knows neither gRPC nor arrays of weights.

A group is waiting, lent to one or several workers, or complete. A worker that is not heard of, or that makes no
progress, loses its loans to the others. Its results still count if they come first: a group is a function of its
request and weights, whoever samples it. So the first valid group of a place is kept, and later ones are only compared.
"""

import collections
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rpg_jax.rollout.fleet.job import Job, fault_of
from rpg_jax.rollout.fleet.messages import difference, versions
from rpg_jax.rollout.interface import Request
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion


class Refused(ValueError):
    """The trainer does not take a worker, or what it sent; the message has the reason."""


class Stranger(LookupError):
    """A worker or session that this process does not know."""


@dataclasses.dataclass
class Member:
    """A worker as the trainer knows it.

    Attributes:
      name: host and process, for people.
      seen: time of its last sign of life. moved: time at which `progress` last changed.
      loans: groups that it has not returned.
      told: whether it knows that the run is over.
    """

    name: str
    seen: float
    moved: float
    progress: int = -1
    loans: int = 0
    told: bool = False


class Hub:
    """All methods may be called by any thread.

    Args:
      spec: what workers must know and have in common with this trainer, JSON-able.
      lost_seconds: a worker is lost after this long without a sign of life.
      stall_seconds: and after this long without progress while it has loans.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        lost_seconds: float = 20.0,
        stall_seconds: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.spec, self._clock = dict(spec), clock
        self._lost, self._stall = lost_seconds, stall_seconds
        self._changed = threading.Condition()
        self._members: dict[str, Member] = {}
        self._job: Job | None = None
        self._jobs, self._over = 0, False
        self._counts: collections.Counter[str] = collections.Counter()

    def join(self, worker: str, hello: Mapping[str, Any]) -> None:
        """Takes a worker; other methods raise Stranger for one that has not joined.

        Raises Refused if it is of another program, or was started for another run.
        """
        if found := difference(versions(), hello["versions"]):
            raise Refused(f"the worker {hello['name']} has another program: {found}. Start both from one installation")
        if hello["run"] not in (None, self.spec["run"]):
            raise Refused(
                f"this is the trainer of run {self.spec['run']!r}, and the worker {hello['name']} was started with "
                f"--run={hello['run']}"
            )
        with self._changed:
            now = self._clock()
            self._members[worker] = Member(hello["name"], now, now)
            self._counts["joined"] += 1
            self._changed.notify_all()

    def leave(self, worker: str) -> None:
        """Forgets a worker; its loans go to others."""
        with self._changed:
            self._take_back(worker)
            self._members.pop(worker, None)

    def beat(self, worker: str, progress: int) -> bool:
        """A sign of life, with any number that changes while the worker works. Returns whether the run is over."""
        with self._changed:
            member, now = self._member(worker), self._clock()
            if member.progress != progress or not member.loans:
                member.progress, member.moved = progress, now
            member.told = self._over
            return self._over

    def lease(self, worker: str, room: int) -> tuple[Job, list[int]] | None:
        """Lends groups of up to `room` completions, of the request in progress; None if there are none.

        A worker gets no more than half of its part of what waits, so that all end at nearly the same time.
        """
        with self._changed:
            member = self._member(worker)
            self._expire()
            job = self._job
            if job is None or not job.waiting or self._over:
                return None
            part = -(-len(job.waiting) // (2 * max(1, self._alive())))
            most = room // job.request.group_size
            places = job.lend(worker, max(1, min(most, part)))
            member.loans += len(places)
            member.moved = self._clock()
            return job, places

    def complete(self, worker: str, key: Mapping[str, Any], group: Sequence[Completion]) -> bool:
        """Takes a group that a worker sampled; returns whether it counts, or came too late.

        Raises Refused if it is of other weights, or no group of its request.
        """
        with self._changed:
            member, job, place = self._member(worker), self._job, int(key["place"])
            if job is None or job.number != key["job"] or not 0 <= place < len(job.request.prompts):
                self._counts["late"] += 1
                return False
            if key["weights"] != f"{job.checksum:016x}":
                mine = f"{job.checksum:016x}, version {job.version}"
                raise Refused(f"{member.name} sampled with weights {key['weights']}, and the trainer has {mine}")
            if fault := fault_of(group, job.request, self.spec["vocab_size"]):
                raise Refused(f"{member.name} returned no group of prompt {job.request.prompt_ids[place]}: {fault}")
            member.loans -= job.returned(worker, place)
            if job.keep(place, group):
                self._counts["groups"] += 1
                self._changed.notify_all()
                return True
            self._counts["duplicates"] += 1
            if job.differs(place, group):
                self._counts["differing"] += 1
                self._say_that_it_differs(member.name, job, place)
            return False

    def release(self, worker: str, number: int, places: Sequence[int], fault: str | None) -> None:
        """Takes back groups that a worker does not sample; `fault` says why, if it failed."""
        with self._changed:
            member, job = self._member(worker), self._job
            if job is None or job.number != number:
                return
            for place in places:
                self._take_back(worker, place)
                if fault is not None:
                    job.failed(worker, place, f"{member.name}: {fault}")
            self._changed.notify_all()

    def begin(self, request: Request, checksum: int, version: int) -> Job:
        """Opens a request to the workers. One at a time: raises RuntimeError if another is open."""
        with self._changed:
            if self._job is not None:
                raise RuntimeError("the fleet samples one request at a time")
            self._jobs += 1
            self._job = Job(self._jobs, request, checksum, version)
            return self._job

    def take(self, job: Job, seconds: float) -> list[tuple[int, list[Completion]]]:
        """The groups, up to those wanted, that were completed since the last call; waits for one, but not for ever.

        Raises RolloutError if a group failed twice, and at two workers where there are two: no one worker is at fault.
        """
        with self._changed:
            self._expire()
            if not job.has_news:
                self._changed.wait(seconds)
            if fault := job.fault(workers=self._alive()):
                raise RolloutError(fault)
            return job.take()

    def end(self) -> None:
        """Closes the request in progress; what workers still return of it is late."""
        with self._changed:
            self._job = None
            for member in self._members.values():
                member.loans = 0

    def dismiss(self, seconds: float) -> None:
        """Tells all workers that the run is over; waits until every one that is alive knows, at most `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._over = True
            while time.monotonic() < deadline and not all(m.told for m in self._members.values() if self._is_alive(m)):
                self._changed.wait(0.05)

    @property
    def alive(self) -> int:
        """The number of workers that are neither lost nor stalled."""
        with self._changed:
            return self._alive()

    def counts(self) -> dict[str, float]:
        """Workers, groups that are lent, and what happened since the last call."""
        with self._changed:
            taken, self._counts = self._counts, collections.Counter()
            lent = sum(member.loans for member in self._members.values())
            names = ("joined", "lost", "reassigned", "late", "duplicates", "differing", "groups")
            return {"workers": self._alive(), "lent": lent, **{name: taken[name] for name in names}}

    def _member(self, worker: str) -> Member:
        member = self._members.get(worker)
        if member is None:
            raise Stranger(f"worker {worker} has not joined")
        member.seen = self._clock()
        return member

    def _is_alive(self, member: Member) -> bool:
        now = self._clock()
        return now - member.seen <= self._lost and (not member.loans or now - member.moved <= self._stall)

    def _alive(self) -> int:
        return sum(map(self._is_alive, self._members.values()))

    def _expire(self) -> None:
        """Takes the loans of lost workers back."""
        for worker, member in self._members.items():
            if member.loans and not self._is_alive(member):
                self._counts["lost"] += 1
                self._take_back(worker)

    def _take_back(self, worker: str, only: int | None = None) -> None:
        member, job = self._members.get(worker), self._job
        if job is None or member is None:
            return
        for place in [only] if only is not None else list(job.lent):
            if job.returned(worker, place):
                member.loans -= 1
                self._counts["reassigned"] += job.wait(place)
        self._changed.notify_all()

    def _say_that_it_differs(self, name: str, job: Job, place: int) -> None:
        prompt_id = job.request.prompt_ids[place]
        print(
            f"fleet: {name} sampled other tokens for prompt {prompt_id} of step {job.request.step} than the worker "
            "whose group counts: workers of different devices or slots round differently",
            file=sys.stderr,
            flush=True,
        )
