"""The drivers of a rollout, each declared once; and the lockstep driver.

The lockstep driver works in the caller's thread: it prefills, fills free slots, dispatches, reads, and repeats. All
hosts hold the values on which every decision depends. So the same schedule runs on a mesh that spans hosts, for models
larger than one host. No other thread takes part, so lockstep is the fastest driver."""

import dataclasses
import functools
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import nnx

from rpg_jax.models import Base, DecoderConfig
from rpg_jax.rollout.decoding import Decoding
from rpg_jax.rollout.engine import DecodeEngine
from rpg_jax.rollout.request import Request
from rpg_jax.rollout.rollout import Rollout, Split
from rpg_jax.rollout.schedule import Chunk, Finish, Schedule, Usage, completions_of, plan
from rpg_jax.rollout.weights import Params, RolloutError, Staged, Weights
from rpg_jax.types import Completion


class LockstepRollout(Rollout):
    """The rollout that decodes in the thread that calls `generate`. Calls from several threads run one after the other.
    `usage` has the work of all calls."""

    split = Split.TOGETHER

    def __init__(self, engine: DecodeEngine):
        self.engine, self.weights, self.usage = engine, engine.weights, Usage()
        self._busy = threading.Lock()

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        """Waits until no call samples, then makes `params` the rollout's weights, with the number `version`."""
        with self._busy:
            super().sync_weights(params, version)

    def sample(self, request: Request) -> list[list[Completion]]:
        """Decodes until all completions have ended; returns those of each prompt in order, [] for a prompt in
        `request.done`. Raises ValueError if the request does not fit the engine, or has an environment while several
        hosts decode; RolloutError if decoding or `on_group` fails, with the fault as its cause, or as
        `completions_of` does."""
        if request.environment is not None and jax.process_count() > 1:
            raise ValueError("lockstep hosts cannot wait for an environment's replies: set rollout.driver=orchestrator")
        groups, chunks = plan(self.engine, request)
        with self._busy:
            version = self.weights.version
            try:
                for _ in self._run(deque(chunks), Finish(request, groups)):
                    pass
            except Exception as fault:
                failed = f"the rollout of step {request.step} failed: {type(fault).__name__}: {fault}"
                raise RolloutError(failed) from fault
        return completions_of(request, groups, version)

    def stream(self, request: Request) -> Iterator[np.ndarray]:
        """Yields the tokens i32[n] of the request's only completion, dispatch by dispatch. A dispatch begins when the
        caller asks for more. Other calls wait until the iterator ends or is closed. The first `next` raises ValueError
        if the request does not fit the engine or asks for several completions. A fault in decoding is not wrapped."""
        groups, chunks = plan(self.engine, request)
        [[row]], taken = groups, 0
        with self._busy:
            for _ in self._run(deque(chunks), Finish(request, groups)):
                pieces = row.transcript.tokens
                yield from pieces[taken:]
                taken = len(pieces)

    def _run(self, chunks: deque[Chunk], finish: Finish) -> Iterator[None]:
        """Decodes until all completions have ended; yields after each round of the schedule."""
        schedule = Schedule(self.engine, self.usage, finish.completed)
        while not finish.over:
            while schedule.hungry and chunks:
                chunk = chunks.popleft()
                schedule.add(self.engine.prefill(tokens=chunk.tokens, lengths=chunk.lengths), chunk.rows)
            schedule.round(more=bool(chunks))
            yield


@dataclasses.dataclass(frozen=True)
class Driver:
    """One way to run a rollout. Code that treats drivers differently asks this declaration, not the name.

    Attributes:
      make: makes the `Rollout` around an engine; None if `remote`.
      spans_hosts: whether one rollout decodes all prompts on a mesh over all hosts. Otherwise each host decodes a part
        of the prompts, on its own devices.
      needs: the name of a Python package without which lockstep takes over; "" if the driver needs none.
      remote: whether servers sample for a trainer, in other processes.
    """

    make: Callable[[DecodeEngine], Rollout] | None
    spans_hosts: bool = False
    needs: str = ""
    remote: bool = False


def _orchestrator(engine: DecodeEngine) -> Rollout:
    """Makes a `JetStreamRollout`, which other drivers do not import. Raises ValueError if JetStream lacks a package."""
    try:
        from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
    except ModuleNotFoundError as error:
        fix = "pip install 'rpg_jax[jetstream]' brings what JetStream needs; or choose rollout.driver=lockstep"
        raise ValueError(f"rollout.driver=orchestrator: {error}; {fix}") from error
    return JetStreamRollout(engine)


DRIVERS = {
    "orchestrator": Driver(_orchestrator, needs="jetstream"),
    "lockstep": Driver(LockstepRollout, spans_hosts=True),
    "servers": Driver(None, remote=True),
}
"""The drivers by the value of the config field `rollout.driver`."""

LOCAL_DRIVERS = [name for name, driver in DRIVERS.items() if not driver.remote]
"""The names of the drivers that `make_rollout` makes."""


def find_driver(name: str) -> Driver:
    """Returns the driver `name` of `DRIVERS`; or lockstep, if the package that the driver needs is not installed. The
    first such call of the process says so on stderr. Raises ValueError for an unknown name."""
    if name not in DRIVERS:
        raise ValueError(f"unknown rollout driver {name!r}; known: {', '.join(DRIVERS)}")
    found = DRIVERS[name]
    if found.needs and importlib.util.find_spec(found.needs) is None:
        _say_that_lockstep_takes_over(name)
        return DRIVERS["lockstep"]
    return found


@functools.cache  # once a process
def _say_that_lockstep_takes_over(name: str) -> None:
    from rpg_jax.rollout.jetstream import INSTALL

    print(f"rollout.driver=lockstep takes over: {name} needs JetStream ({INSTALL})", file=sys.stderr)


def make_rollout(
    driver: str,
    config: DecoderConfig,
    graphdef: nnx.GraphDef,
    params: Params,
    decoding: Decoding,
    *,
    base: Base | None = None,
    merge: bool = False,
) -> Rollout:
    """Makes a rollout in this process, with the trainer's `params` as version 0 of its weights. Raises ValueError if
    the driver is unknown or remote, if JetStream lacks a package that it needs, or if the mesh of `decoding` does not
    divide the slots or the heads.

    Args:
      driver: one of `LOCAL_DRIVERS`. If the driver needs a package that is not installed, lockstep takes over.
      config, graphdef: of the model; `nnx.merge(graphdef, params)` gives the module.
      decoding: the slots and devices, and the dtype and layout of the rollout's weights.
      base, merge: the frozen weights if `params` are adapters, else None; and whether a sync merges both (`Weights`).
    """
    make = find_driver(driver).make
    if make is None:
        raise ValueError(f"rollout.driver={driver} needs a trainer; choose orchestrator or lockstep")
    how = {"dtype": decoding.dtype, "shardings": decoding.shardings, "int8": decoding.int8}
    weights = Weights(params, **how, base=base, merge=merge)
    return make(DecodeEngine(config, graphdef, weights, decoding))
