"""Which completion decodes in which slot, and how far a dispatch may run: the part that all drivers share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rpg_jax.rollout.decode_state import DecodeState, Prefix
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.jetstream_compat import engine_api
from rpg_jax.rollout.requests import Row, requests


class Schedule:
    """Slots, the rows in them, and the rows that wait for one; owns the decode state. Used by one thread.

    Args:
      engine: the engine to drive.
      free: slots to fill.
      idle: how many slots may stand free, while rows wait, before a dispatch ends early.
    """

    def __init__(self, engine: QwenEngine, free: Sequence[int], idle: int):
        self.engine, self.free, self.live = engine, list(free), dict[int, Row]()
        self._waiting: deque[tuple[Prefix, Row]] = deque()
        self._idle = idle
        self._state: DecodeState | None = None

    @property
    def empty(self) -> bool:
        return not (self.live or self._waiting)

    @property
    def hungry(self) -> bool:
        """More slots are free than rows wait."""
        return len(self._waiting) < len(self.free)

    def add(self, prefix: Prefix, rows: Sequence[Row]) -> None:
        self._waiting.extend((prefix, row) for row in rows)

    def release_state(self) -> None:
        """Frees the cache; the next `fill` allocates it again."""
        self._state = None

    def fill(self) -> list[tuple[int, Row]]:
        """Moves waiting rows into free slots, one insert per prefix, and ends cancelled ones; returns the new ones."""
        if self._state is None:
            self._state = self.engine.init_decode_state()
        if cancelled := [slot for slot, row in self.live.items() if row.cancelled]:
            self._state = self.engine.release(self._state, cancelled)
        filled: list[tuple[int, Row]] = []
        while self._waiting and self.free:
            prefix, batch = self._waiting[0][0], []
            while self._waiting and self.free and self._waiting[0][0] is prefix:
                row = self._waiting.popleft()[1]
                if not row.cancelled:
                    batch.append((self.free.pop(), row))
            if batch:
                self._state = self.engine.insert(prefix, self._state, requests(self.engine, batch))
            filled += batch
        self.live.update(filled)
        return filled

    def advance(self, *, more: bool) -> engine_api.ResultTokens:
        """One dispatch for the live slots, its result on the host.

        It ends early once enough slots are free for the rows that wait, here or (`more`) upstream.
        """
        k = self.engine.steps
        ends = (row.prompt_length + min(row.emitted + k, row.sampling.max_tokens) for row in self.live.values())
        floor = max(0, len(self.live) - self._idle) if more or self._waiting else 0
        self._state, result = self.engine.generate(
            self.engine.weights, self._state, floor=floor, attend_length=max(ends)
        )
        return self.engine.fetch(result)

    def settle(self, result: engine_api.ResultTokens) -> list[tuple[int, Row]]:
        """Takes the rows that are complete out of `live` and returns them with the slots they leave."""
        emitted, going_on = self.engine.progress(result)
        for slot, row in self.live.items():
            row.emitted = int(emitted[slot])
        finished = [(slot, row) for slot, row in self.live.items() if not going_on[slot]]
        for slot, _ in finished:
            del self.live[slot]
        return finished
