"""The trainer's side of a fleet: a rollout whose completions come from workers."""

import itertools
import sys
import time
from collections.abc import Callable

import jax

from rpg_jax.parallel import hosts
from rpg_jax.rollout.fleet.hub import Hub
from rpg_jax.rollout.fleet.link import Link, Unknown
from rpg_jax.rollout.fleet.published import Published
from rpg_jax.rollout.fleet.service import Service
from rpg_jax.rollout.fleet.shelf import Item, Shelf
from rpg_jax.rollout.interface import Request, Rollout
from rpg_jax.types import Completion

_LOOK = 1.0  # seconds between two looks at the workers
_FAREWELL = 10.0  # seconds in which every worker asks for work, or beats
_SAY_AFTER, _SAY_EVERY = 5.0, 60.0  # seconds without a worker


class FleetRollout(Rollout):
    """Lends the groups of each request to the workers of `hub`, and serves them the weights.

    Each process of the trainer has one, for its own share of the prompts; workers serve all of them. Weights are read
    by workers before they sample, so a sync never waits.

    Args:
      service: not started yet.
      advertised: its address for workers and for the other processes.
      connect: a link to another process of the trainer.
      waiting: called every second while there is no worker.
    """

    apart = True

    def __init__(
        self,
        hub: Hub,
        shelf: Shelf,
        service: Service,
        weights: Published,
        *,
        advertised: str,
        connect: Callable[[str], Link],
        waiting: Callable[[], None] = lambda: None,
    ):
        self.weights, self.address = weights, advertised
        self._hub, self._shelf, self._service, self._waiting = hub, shelf, service, waiting
        self._exchanges = itertools.count()
        trainers = [one.decode() for one in hosts.all_gather_bytes(advertised.encode())]
        self._peers = [None if i == jax.process_index() else connect(address) for i, address in enumerate(trainers)]
        service.start(trainers)

    def generate(self, request: Request) -> list[list[Completion]]:
        request.check_one_turn("a fleet")
        request.check_fits(capacity=self._hub.spec["capacity"], vocab_size=self._hub.spec["vocab_size"])
        groups: list[list[Completion]] = [[] for _ in request.prompts]
        if not request.prompts:
            return groups
        job = self._hub.begin(request, self.weights.checksum(), self.weights.version)
        patience = _Patience(self.address, self._waiting)
        try:
            while job.taken < job.wanted:
                for place, group in self._hub.take(job, _LOOK):
                    groups[place] = group
                    if request.on_group is not None:
                        request.on_group(place, group)
                patience.look(self._hub.alive)
        finally:
            self._hub.end()
        return groups

    def exchange(self, value: bytes) -> list[bytes]:
        """As `hosts.all_gather_bytes`, over the services: no program runs on a device, and any thread may call it.

        All processes exchange in the same order.
        """
        if len(self._peers) == 1:
            return [value]
        number = next(self._exchanges)
        self._shelf.put(f"exchange/{number}", Item({}, [memoryview(value)]))
        found = [value if peer is None else self._of_peer(peer, f"exchange/{number}") for peer in self._peers]
        # Who has all values of this exchange knows that all have begun it, and so that nobody reads those of the last.
        self._shelf.drop(f"exchange/{number - 1}")
        return found

    def take_counts(self) -> dict[str, float]:
        """Metrics of the workers since the last call."""
        return {f"fleet/{name}": value for name, value in self._hub.counts().items()}

    def dismiss(self) -> None:
        """Tells the workers that the run is over, so that they end."""
        self._hub.dismiss(_FAREWELL)

    def close(self) -> None:
        for peer in self._peers:
            if peer is not None:
                peer.close()
        self._service.stop()

    def _of_peer(self, peer: Link, name: str) -> bytes:
        while True:
            try:
                return bytes(peer.read(name)[1])
            except Unknown:  # it is not that far yet
                if not self._hub.alive:
                    self._waiting()


class _Patience:
    """Says that workers are missing, and how to start one."""

    def __init__(self, address: str, waiting: Callable[[], None]):
        self._address, self._waiting = address, waiting
        self._since = time.monotonic()
        self._say_at = self._since + _SAY_AFTER

    def look(self, workers: int) -> None:
        now = time.monotonic()
        if workers:
            self._since, self._say_at = now, now + _SAY_AFTER
            return
        self._waiting()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            print(
                f"waiting for workers since {now - self._since:.0f} s; start one: "
                f"python -m rpg_jax.rollout.worker --trainer={self._address}",
                file=sys.stderr,
                flush=True,
            )
