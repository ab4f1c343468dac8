"""A fleet in one process: the trainer's hub, and workers whose engines compute what they return from the request."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from rpg_jax.rollout import Request
from rpg_jax.rollout.fleet.fleet_rollout import FleetRollout
from rpg_jax.rollout.fleet.hub import Hub
from rpg_jax.rollout.fleet.link import Link
from rpg_jax.rollout.fleet.published import Published
from rpg_jax.rollout.fleet.service import Service
from rpg_jax.rollout.fleet.shelf import Shelf
from rpg_jax.rollout.fleet.working import Worker
from rpg_jax.rollout.serving.access import Access
from rpg_jax.types import Completion, Sampling

SPEC = {"run": "r", "capacity": 64, "vocab_size": 1000}
PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "layer": {"b": np.ones(3, np.float32)}}
REQUEST = Request(
    [np.arange(1, 2 + i % 5, dtype=np.int32) for i in range(12)],
    prompt_ids=range(100, 112),
    group_size=2,
    sampling=Sampling(max_tokens=4, stop_token_ids=(0,)),
    seed=1,
    step=6,
)


def group_of(request, place):
    """The group that every engine here returns."""
    return [
        Completion(
            np.array([request.prompt_ids[place], len(request.prompts[place]), request.step, i + 1], np.int32),
            np.full(4, -0.5 - place, np.float32),
            "length",
            0,
        )
        for i in range(request.group_size)
    ]


class FakeEngine:
    """Samples at once, or holds each loan until `go` is set; `fault` is raised in place of sampling."""

    slots, progress = 4, 0

    def __init__(self, shapes, go=None, fault=None):
        self.shapes, self._go, self._fault, self.read, self.places = shapes, go, fault, [], []
        self.begun, self.specs = threading.Event(), []

    @contextlib.contextmanager
    def holding(self, checksum, fetch):
        self.read.append(fetch())
        yield self

    def generate(self, request):
        self.begun.set()
        if self._go is not None:
            assert self._go.wait(20)
        if self._fault is not None:
            raise self._fault
        for place in sorted(set(range(len(request.prompts))) - request.done):
            self.places.append(place)
            request.on_group(place, group_of(request, place))

    def close(self):
        pass


class Fleet:
    """A trainer's process and any number of workers in threads."""

    def __init__(self, **options):
        import jax

        self.params = jax.tree.map(jax.numpy.asarray, PARAMS)
        key = options.pop("key", None)
        self.key, self.shelf, self.hub = key, Shelf(), Hub(SPEC, **options)
        self.service = Service(self.hub, self.shelf, Access(key=key))
        self.address = f"127.0.0.1:{self.service.port}"
        self.weights = Published(self.params, self.shelf)
        self.waited = threading.Event()
        self.rollout = FleetRollout(
            self.hub,
            self.shelf,
            self.service,
            self.weights,
            advertised=self.address,
            connect=self.connect,
            waiting=self.waited.set,
        )
        self.workers, self.errors, self.threads = [], [], []

    def connect(self, address, stopped=None):
        return Link(address, key=self.key, patience=10.0, stopped=stopped)

    def start(self, name="w", run=None, connect=None, **options):
        """A worker in a thread, and its engine, which notes for which specs it was made."""
        engine = FakeEngine(self.params, **options)

        def make_engine(spec):
            engine.specs.append(spec)
            return engine

        worker = Worker(self.address, connect=connect or self.connect, make_engine=make_engine, name=name, run=run)

        def work():
            try:
                worker.work()
            except Exception as error:
                self.errors.append(error)

        self.workers.append(worker)
        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()
        return engine

    def ended(self):
        """Waits for all workers, and returns what they raised."""
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        return self.errors

    def close(self):
        for worker in self.workers:
            worker.stop()
        self.ended()
        self.rollout.close()


@pytest.fixture
def make_fleet():
    made = []

    def make(**options):
        made.append(Fleet(**options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
