"""Snapshots of weights under a number, in which the reference policy and warm starts are kept."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.storage import errors, integrity
from rpg_jax.storage.integrity import Damaged

Tree = Any


class Snapshots:
    """A folder of snapshots of weights, written asynchronously and atomically, verified when they are read."""

    def __init__(self, directory: Path | epath.Path):
        self._directory = storage.absolute(directory)
        errors.retried(lambda: self._directory.mkdir(parents=True, exist_ok=True), self._directory)
        self._checkpointer = ocp.StandardCheckpointer()

    def _path(self, number: int) -> epath.Path:
        return self._directory / f"{number:08d}"

    def exists(self, number: int) -> bool:
        """Whether there is a snapshot `number`, good or bad."""
        return errors.retried(self._path(number).exists, self._path(number))

    def save(self, number: int, params: Tree) -> None:
        """Starts writing `params`; replaces one of the same number. Raises StorageFailure, of the last save too."""
        path = self._path(number)

        def write() -> None:
            self._checkpointer.save(path, integrity.signed(params), force=True)

        self.wait()
        errors.written(write, path, alone=jax.process_count() == 1)

    def restore(self, number: int, like: Tree) -> Tree:
        """The weights of snapshot `number`, laid out as the `ShapeDtypeStruct`s of `like`, on any mesh.

        Raises:
          Damaged: it is missing or damaged.
          Refused: it holds other arrays than `like`.
          StorageFailure: it could not be read, after retries.
        """
        self.wait()
        path = self._path(number)

        def check() -> None:
            if not errors.retried(path.exists, path):
                raise Damaged(path, "this snapshot is missing; it was deleted or the folder is incomplete")
            if not errors.retried((path / "commit_success.txt").exists, path):
                raise Damaged(path, "this snapshot is half-written: commit_success.txt is missing")

        integrity.by_all(check)
        return integrity.restored(path, like)

    def move_aside(self, number: int) -> epath.Path:
        """Renames a refused snapshot, so that its number is free, and returns its new path."""
        path = self._path(number)
        taken = sum(other.name.startswith(f"refused-{path.name}") for other in self._directory.iterdir())
        aside = self._directory / (f"refused-{path.name}" + (f"-{taken}" if taken else ""))
        errors.retried(lambda: storage.move(path, aside), aside)
        return aside

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Deletes every snapshot except `numbers`."""
        kept = {self._path(n).name for n in numbers}
        for path in self._directory.iterdir() if hosts.is_first() and self._directory.exists() else ():
            if path.name.isdigit() and path.name not in kept:
                errors.retried(path.rmtree, path)

    def wait(self) -> None:
        """Returns once the last save is on disk. Raises StorageFailure if it could not be written."""
        errors.written(self._checkpointer.wait_until_finished, self._directory, alone=False)

    def close(self) -> None:
        """Finishes the last save and releases the background threads."""
        errors.written(self._checkpointer.close, self._directory, alone=False)
