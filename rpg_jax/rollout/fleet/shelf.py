"""Named bytes that a trainer's process holds for others: its part of the weights, and what its peers wait for."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rpg_jax.rollout.fleet.messages import CHUNK


class Item(NamedTuple):
    """A JSON-able head, and pieces of bytes that are read one after the other."""

    head: Mapping[str, Any]
    pieces: Sequence[memoryview]

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def chunks(self, offset: int) -> Iterator[bytes]:
        """The bytes from `offset` on, at most `CHUNK` at a time."""
        for piece in self.pieces:
            if offset >= len(piece):
                offset -= len(piece)
                continue
            for start in range(offset, len(piece), CHUNK):
                yield bytes(piece[start : start + CHUNK])
            offset = 0


class Shelf:
    """Items by name. Any thread may call its methods."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._changed = threading.Condition()

    def put(self, name: str, item: Item) -> None:
        with self._changed:
            self._items[name] = item
            self._changed.notify_all()

    def drop(self, name: str) -> None:
        with self._changed:
            self._items.pop(name, None)

    def get(self, name: str, seconds: float) -> Item | None:
        """The item; None if it does not come within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while name not in self._items:
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)
            return self._items[name]
