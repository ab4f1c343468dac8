"""Snapshots of weights under a number, in which the reference policy and warm starts are kept."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.storage import integrity
from rpg_jax.storage.integrity import Refused

Tree = Any


class Snapshots:
    """A folder of snapshots of weights, written asynchronously and atomically, verified when they are read."""

    def __init__(self, directory: Path | epath.Path):
        self._directory = storage.absolute(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.StandardCheckpointer()

    def _path(self, number: int) -> epath.Path:
        return self._directory / f"{number:08d}"

    def exists(self, number: int) -> bool:
        """Whether there is a snapshot `number`, good or bad."""
        return self._path(number).exists()

    def save(self, number: int, params: Tree) -> None:
        """Starts writing `params`; replaces a snapshot of the same number."""
        with integrity.writing(self._path(number)):
            self._checkpointer.save(self._path(number), integrity.signed(params), force=True)

    def restore(self, number: int, like: Tree) -> Tree:
        """The weights of snapshot `number`, laid out as the `ShapeDtypeStruct`s of `like`, on any mesh.

        Raises:
          Refused: it is missing, damaged, or holds other arrays than `like`.
        """
        self.wait()
        path = self._path(number)

        def check() -> None:
            if not path.exists():
                raise Refused(path, "this snapshot is missing; it was deleted or the folder is incomplete")
            if not (path / "commit_success.txt").exists():
                raise Refused(path, "this snapshot is half-written: commit_success.txt is missing")

        integrity.by_all(check)
        return integrity.restored(path, like)

    def move_aside(self, number: int) -> epath.Path:
        """Renames a refused snapshot, so that its number is free, and returns its new path."""
        path = self._path(number)
        taken = sum(other.name.startswith(f"refused-{path.name}") for other in self._directory.iterdir())
        aside = self._directory / (f"refused-{path.name}" + (f"-{taken}" if taken else ""))
        storage.move(path, aside)
        return aside

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Deletes every snapshot except `numbers`."""
        kept = {self._path(n).name for n in numbers}
        for path in self._directory.iterdir() if hosts.is_first() and self._directory.exists() else ():
            if path.name.isdigit() and path.name not in kept:
                path.rmtree()

    def wait(self) -> None:
        """Returns once the last save is on disk. Raises OSError if it could not be written."""
        with integrity.writing(self._directory):
            self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Finishes the last save and releases the background threads."""
        with integrity.writing(self._directory):
            self._checkpointer.close()
