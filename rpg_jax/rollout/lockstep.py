"""The engine driven by one thread: prefill, fill free slots, dispatch, read, repeat.

Every decision is taken from values that all hosts hold alike, so the same scheduler runs over a mesh that spans hosts,
for models larger than one; and with no thread in between it is the fastest driver.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.requests import Chunk, Finish, OnGroup, check, completions, mean_lengths, plan
from rpg_jax.rollout.schedule import Schedule, Usage
from rpg_jax.rollout.weights import Params, RolloutError, Staged
from rpg_jax.types import Completion, Sampling


class LockstepRollout:
    """See `rpg_jax.rollout.Rollout`; calls from several threads run one after the other.

    Args:
      engine: the engine to drive.
      prefill_tokens: tokens, padding included, of one prefill.
      refill: fraction of the slots that may stand idle before a dispatch ends early to refill them.
      mixed: let weights be synced between two dispatches of a rollout; on one process.
    """

    def __init__(self, engine: QwenEngine, *, prefill_tokens: int = 2048, refill: float = 1 / 16, mixed: bool = False):
        self.engine, self.weights = engine, engine.weights
        self._prefill_tokens = prefill_tokens
        self._idle = max(1, int(engine.slots * refill))
        self._busy, self._mixed = threading.Lock(), mixed
        self._expected: dict[int, float] = {}
        self.usage = Usage()

    def stage_weights(self, params: Params) -> Staged:
        return self.weights.stage(params)

    def sync_weights(self, params: Params | Staged, version: int) -> None:
        with contextlib.nullcontext() if self._mixed else self._busy:
            self.weights.sync(params, version)

    def verify_weights(self, params: Params | Staged) -> None:
        self.weights.verify(params)

    def weights_checksum(self) -> int:
        return self.weights.checksum()

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        prompt_ids: Sequence[int],
        group_size: int,
        sampling: Sampling,
        seed: int,
        step: int,
        enough: int | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        limits = {"capacity": self.engine.capacity, "vocab_size": self.engine.config.vocab_size}
        check(prompts, prompt_ids, group_size, sampling, enough, **limits)
        order = {"prefill_tokens": self._prefill_tokens, "expected": self._expected if enough is None else {}}
        groups, chunks = plan(self.engine, prompts, prompt_ids, group_size, sampling, seed=seed, step=step, **order)
        with self._busy:
            version = self.weights.version
            try:
                self._run(deque(chunks), Finish(groups, enough, on_group))
            except Exception as fault:
                raise RolloutError(f"the rollout of step {step} failed: {type(fault).__name__}: {fault}") from fault
        made = completions(groups, version, mixed=self._mixed)
        self._expected |= mean_lengths(prompt_ids, made)
        return made

    def close(self) -> None:
        pass

    def _run(self, chunks: deque[Chunk], finish: Finish) -> None:
        engine = self.engine
        schedule = Schedule(engine, range(engine.slots), self._idle, self.usage)
        while not finish.over:
            while schedule.hungry and chunks:
                chunk = chunks.popleft()
                prefix = engine.prefill(params=self.weights, padded_tokens=chunk.tokens, true_length=chunk.lengths)
                schedule.add(prefix, chunk.rows)
            schedule.fill()
            live = dict(schedule.live)
            result = schedule.advance(more=bool(chunks))
            tokens, logprobs, counts = engine.parse(result)
            for slot, row in live.items():
                row.extend(tokens[slot, : counts[slot]].copy(), logprobs[slot, : counts[slot]].copy())
            for slot, row in schedule.settle(result):
                schedule.free.append(slot)
                finish.completed(row)
