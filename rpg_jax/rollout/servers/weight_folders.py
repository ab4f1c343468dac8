"""The trainer's weights as servers read them: a folder in Hugging Face layout for each version."""

import dataclasses
import json
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from rpg_jax.models import Base, Saving
from rpg_jax.models.hf_saving import LAST
from rpg_jax.parallel import hosts
from rpg_jax.rollout.servers.protocol import Loadable, Probe
from rpg_jax.rollout.weights import Params, RolloutError, Weights, weights_checksum
from rpg_jax.storage import errors


@dataclasses.dataclass(frozen=True, eq=False)
class PendingFolder:
    """Weights on their way into a folder.

    Attributes:
      checksum: the 64-bit checksum of the weights.
      folder: the future of the path of the complete folder. It raises StorageFailure if the folder was not written.
      probe: a question, and its answer by these weights; None where servers prove their weights otherwise.
    """

    checksum: int
    folder: Future[Path]
    probe: Probe | None = None


class WeightFolders(Weights):
    """Writes the trainer's weights into folders `weights-CHECKSUM` below `home`, with 16 hexadecimal digits. Nothing is
    decoded here.

    `stage` copies the weights to host memory, and a thread writes the files while training goes on. Each process copies
    and writes its own part. `sync` waits until every process has written. The file config.json comes last: a folder
    without config.json is not complete. The constructor writes nothing; the first `stage` or `sync` does.

    There is one folder for the present weights, and one folder for each `PendingFolder` that a caller still holds. All
    other such folders are deleted before the next folder is written.

    Args:
      params: the trainer's weights, version 0.
      home: a folder that all processes write and all servers read, under the same path. Each run has its own `home`.
      saving: writes a version of the weights into a folder, each process its own part.
      use: receives the folder of each synced version, which servers load from then on.
      dtype: the dtype of the weights in the folder, the same as that of `saving`; None if `params` have it already.
      base: the frozen weights, if `params` are adapters; the folder has both, merged.
      probe: makes a question, and its answer by the weights; None where servers prove their weights otherwise.
    """

    def __init__(
        self,
        params: Params,
        home: Path,
        saving: Saving,
        use: Callable[[Loadable], None],
        *,
        dtype: Any = None,
        base: Base | None = None,
        probe: Callable[[Params], Probe] | None = None,
    ):
        self._home, self._saving, self._use, self._probe = home, saving, use, probe
        self._exchange = hosts.Exchange()
        self._alive = weakref.WeakSet[PendingFolder]()  # the folders that may be synced, because a caller holds them
        self._last: PendingFolder | None = None
        self._counts, self._counting = Counter[str](), threading.Lock()
        self._begun = False
        super().__init__(params, dtype=dtype, base=base, merge=True)
        self._begun = True

    def stage(self, params: Params) -> PendingFolder:  # type: ignore[override]  # on no device
        """Copies this process's part to host memory, and returns while a thread writes it. All processes call this
        together, on the main thread. For the same weights as in the call before, it returns the same object, and
        nothing is written. If `dtype` or `base` is set, the devices hold all weights once more during the copy, in
        `dtype`, split as the trainer's weights are. `Saving.fetch` says how much memory it needs besides."""
        began = time.perf_counter()
        converted = self._converted(params)
        checksum = weights_checksum(converted)
        if self._last is None or self._last.checksum != checksum:
            blocks, before = list(self._saving.fetch(converted)), self._last and self._last.folder
            self._last = PendingFolder(checksum, Future(), None if self._probe is None else self._probe(converted))
            self._alive.add(self._last)
            # A daemon: where another process never comes, this one must be able to end.
            work = (self._last.folder, before, checksum, blocks)
            threading.Thread(target=self._run, args=work, name="rpg-weights", daemon=True).start()
            self._count(copy_seconds=time.perf_counter() - began)
        return self._last

    def sync(self, params: Params | PendingFolder, version: int) -> None:  # type: ignore[override]
        """Waits until the folder of `params` is complete, sets `version`, and hands the folder to `use`. Weights that
        are not staged are staged first. Raises StorageFailure if a process could not write its part of this folder or
        of a folder before."""
        if not self._begun:  # a run that continues has not read its weights yet
            self.version, self._checksum = version, None
            return
        copy = params if isinstance(params, PendingFolder) else self.stage(params)
        began = time.perf_counter()
        folder = copy.folder.result()
        self._count(wait_seconds=time.perf_counter() - began)
        with self.lock:
            self.version, self._checksum = version, copy.checksum
        self._use(Loadable(str(folder), f"{copy.checksum:016x}", copy.checksum, copy.probe))

    def checksum(self) -> int:
        """The 64-bit checksum of the weights of the last sync, which servers load. It fails before the first sync."""
        assert self._checksum is not None, "a sync sets it"
        return self._checksum

    def verify(self, params: Params | PendingFolder) -> None:  # type: ignore[override]
        """Raises RolloutError if the weights of the last sync are not `params` in `dtype`, by their checksums. It asks
        no server, and reads no folder."""
        own = params.checksum if isinstance(params, PendingFolder) else weights_checksum(self._converted(params))
        if own != self.checksum():
            raise RolloutError(f"the servers' folder has weights {self.checksum():016x}, and the trainer {own:016x}")

    def take_counts(self) -> dict[str, float]:
        """Metrics for the time since the last call, each named servers/weights_NAME and a sum over folders. NAME is
        `bytes`, written by all processes; `bytes_of_a_process`, by the process with the most; `copy_seconds` to host
        memory and `wait_seconds` of `sync`, of this process; and `write_seconds`, of the slowest process."""
        with self._counting:
            taken, self._counts = self._counts, Counter()
        names = ("bytes", "bytes_of_a_process", "copy_seconds", "write_seconds", "wait_seconds")
        return {f"servers/weights_{name}": taken[name] for name in names}

    def _count(self, **values: float) -> None:
        with self._counting:
            self._counts.update(values)

    def _run(self, done: Future[Path], before: Future[Path] | None, checksum: int, blocks: list[np.ndarray]) -> None:
        """Waits for the folder `before`, then writes this folder, and gives `done` its path, or the exception of either
        folder. So all processes write the folders in one order."""
        try:
            if before is not None:
                before.result()
            done.set_result(self._deploy(checksum, blocks))
        except BaseException as error:
            done.set_exception(error)

    def _deploy(self, checksum: int, blocks: list[np.ndarray]) -> Path:
        """All processes write a folder together, unless the first process finds that it is complete already. Returns
        its path. Deletes the folders of weights that no process wants any more."""
        folder = self._home / _name(checksum)
        wanted = [one.checksum for one in list(self._alive)]
        present = self._checksum
        wanted += [checksum] if present is None else [checksum, present]
        begun = self._together(folder, lambda: {"wanted": wanted, "there": self._begin(folder)})
        keep, there = {_name(one) for own in begun for one in own["wanted"]}, begun[0]["there"]
        said = self._together(folder, lambda: self._write(folder, [] if there else blocks, keep))
        if not there:
            self._together(folder, lambda: self._complete(folder))
            sizes = [own["bytes"] for own in said]
            seconds = max(own["seconds"] for own in said)
            self._count(bytes=sum(sizes), bytes_of_a_process=max(sizes), write_seconds=seconds)
        return folder

    def _together(self, folder: Path, own: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """The JSON objects that `own` returns in all processes, in the order of processes. If `own` raises in one
        process, all processes raise StorageFailure, which names `folder`."""
        try:
            said = own()
        except Exception as error:
            fault = errors.failure(folder, error)
            said = {"reason": fault.reason, "kind": fault.kind.value}
        everyone = [json.loads(one) for one in self._exchange.all_gather_bytes(json.dumps(said).encode())]
        for process, one in enumerate(everyone):
            if "reason" in one:
                who = f" by process {process}" if len(everyone) > 1 else ""
                raise errors.StorageFailure(f"{folder}, written{who}", one["reason"], errors.Kind(one["kind"]))
        return everyone

    def _begin(self, folder: Path) -> bool:
        """In the first process: whether the folder is complete; if it is not, makes an empty folder in place of what an
        earlier attempt left. In other processes: False, and nothing is done."""
        if not hosts.is_first():
            return False
        there = (folder / LAST).exists()
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        return there

    def _write(self, folder: Path, blocks: list[np.ndarray], keep: set[str]) -> dict[str, float]:
        began = time.perf_counter()
        for other in self._home.glob("weights-*") if hosts.is_first() else ():
            if other.name not in keep:
                (other / LAST).unlink(missing_ok=True)  # first: a folder without config.json is not complete
                shutil.rmtree(other, ignore_errors=True)
        written = errors.retried(lambda: self._saving.write(folder, blocks), folder) if blocks else 0
        return {"bytes": written, "seconds": time.perf_counter() - began}

    def _complete(self, folder: Path) -> dict[str, Any]:
        if hosts.is_first():
            self._saving.complete(folder)
        return {}


def _name(checksum: int) -> str:
    return f"weights-{checksum:016x}"
