"""The lockstep driver: the caller's thread prefills, fills free slots, dispatches, reads, and repeats.

All hosts hold the values on which every decision depends. So the same schedule runs on a mesh that spans hosts, for
models larger than one host. No other thread takes part, which makes it the fastest driver.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

import jax

from rpg_jax.rollout.chunks import Chunk, Finish, Planner
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.interface import Request, Rollout, Split
from rpg_jax.rollout.row import Row
from rpg_jax.rollout.schedule import Schedule, Usage
from rpg_jax.rollout.weights import Params, RolloutError, Staged
from rpg_jax.types import Completion


class LockstepRollout(Rollout):
    """Calls from several threads run one after the other."""

    split = Split.TOGETHER

    def __init__(self, engine: QwenEngine):
        self.engine, self.weights, self.usage = engine, engine.weights, Usage()
        self._planner = Planner(engine)
        self._busy = threading.Lock()

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        """Waits until no rollout runs, unless completions may mix weights (`mixed`, on one process only)."""
        with contextlib.nullcontext() if self.engine.decoding.mixed else self._busy:
            super().sync_weights(params, version)

    def generate(self, request: Request) -> list[list[Completion]]:
        if request.environment is not None and jax.process_count() > 1:
            raise ValueError("lockstep hosts cannot wait for an environment's replies: set rollout.driver=orchestrator")
        groups, chunks = self._planner.plan(request)
        with self._busy:
            version = self.weights.version
            try:
                self._run(deque(chunks), Finish(request, groups))
            except Exception as fault:
                failed = f"the rollout of step {request.step} failed: {type(fault).__name__}: {fault}"
                raise RolloutError(failed) from fault
        return self._planner.completions(request, groups, version)

    def _run(self, chunks: deque[Chunk], finish: Finish) -> None:
        engine = self.engine
        schedule = Schedule(engine, range(engine.decoding.slots), self.usage)

        def leave(ended: Sequence[tuple[int | None, Row]]) -> None:
            for slot, row in ended:
                schedule.free += [] if slot is None else [slot]
                finish.completed(row)

        while not finish.over:
            leave(schedule.resume())
            while schedule.hungry and chunks:
                chunk = chunks.popleft()
                schedule.add(engine.prefill(tokens=chunk.tokens, lengths=chunk.lengths), chunk.rows)
            schedule.fill()
            if schedule.live:
                leave(schedule.settle(schedule.advance(more=bool(chunks))))
            elif not finish.over:
                schedule.wait()
