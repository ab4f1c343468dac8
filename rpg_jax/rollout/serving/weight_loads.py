"""Other weights for a running server: read while the present ones draw completions, then put in their place."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol


class Disk(Protocol):
    """Where weights come from. One thread at a time calls the methods, any one."""

    def read(self, folder: str) -> Any:
        """The weights of a folder in host memory, with their `nbytes`. Raises ValueError or OSError."""

    def swap(self, weights: Any) -> int:
        """Makes them those that draw, while none draw; returns their checksum."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a load did.

    Attributes:
      nbytes: in host memory.
      read: seconds of reading; 0 where the weights had been read before.
      drain: seconds until the last completion of the weights before had ended.
      swap: seconds on the way to the devices, and for the checksum.
      checksum: of the weights that draw now; None if they have only been read.
    """

    nbytes: int
    read: float
    drain: float = 0.0
    swap: float = 0.0
    checksum: int | None = None


@dataclasses.dataclass(frozen=True)
class _Held:
    """Weights in host memory, and the folder and label that they were asked for by."""

    key: tuple[str, str]
    weights: Any
    loaded: Loaded


class Loads:
    """The loads of one server, one after the other. All coroutines run in one event loop.

    A label stands for the contents of its folder: what was loaded or read under it is not read again.

    Args:
      quiet: a context in which no completion is drawn; it waits for those under way.
      version: of the weights that draw; a change says that somebody else has replaced them.
    """

    def __init__(self, disk: Disk, quiet: Callable[[], AbstractAsyncContextManager[None]], version: Callable[[], int]):
        self._disk, self._quiet, self._version = disk, quiet, version
        self._turn = asyncio.Lock()
        self._ahead: _Held | None = None
        self._present: tuple[tuple[str, str], int, Loaded] | None = None  # key, version, answer

    async def load(self, folder: str, label: str = "", *, prefetch: bool = False) -> Loaded:
        """Reads the folder, then replaces the weights by those, or with `prefetch` keeps them for a later load.

        One prefetched version is kept, the last. Raises ValueError and OSError of `Disk`; the weights stay then.
        """
        key = folder, label
        async with self._turn:
            if label and self._present is not None and self._present[:2] == (key, self._version()):
                return self._present[2]
            held = self._ahead
            if label and held is not None and held.key == key:
                if prefetch:
                    return held.loaded
                held = dataclasses.replace(held, loaded=dataclasses.replace(held.loaded, read=0.0))
            else:
                if prefetch:
                    self._ahead = None  # host memory has room for one
                held = await self._read(key)
            if prefetch:
                self._ahead = held
                return held.loaded
            if self._ahead is not None and self._ahead.key == key:
                self._ahead = None
            began = time.perf_counter()
            async with self._quiet():
                drained = time.perf_counter()
                checksum = await asyncio.to_thread(self._disk.swap, held.weights)
                swap = time.perf_counter() - drained
            loaded = dataclasses.replace(held.loaded, drain=drained - began, swap=swap, checksum=checksum)
            self._present = key, self._version(), loaded
            return loaded

    async def _read(self, key: tuple[str, str]) -> _Held:
        began = time.perf_counter()
        weights = await asyncio.to_thread(self._disk.read, key[0])
        return _Held(key, weights, Loaded(weights.nbytes, time.perf_counter() - began))
