"""Checkpoints and weight snapshots through Orbax: asynchronous, atomic, verified on the way back in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

Tree = Any


def abstract(tree: Tree, shardings: Tree) -> Tree:
    """Shapes, dtypes and shardings of `tree`, which is what Orbax restores into."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


class Checkpoints:
    """The last few training states of a run, each with a JSON record of everything else a resume needs.

    A save returns once the arrays have left the devices and is committed by an atomic rename, so that a process
    killed at any moment leaves the previous checkpoint in place.
    """

    def __init__(self, directory: Path, *, keep: int):
        self._manager = ocp.CheckpointManager(
            epath.Path(Path(directory).resolve()),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
        )

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Every committed step that is still kept, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, record: dict[str, Any]) -> None:
        """Starts writing `state` and the JSON-able `record` under `step`; waits for the previous save first."""
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        )

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record of `step` alone."""
        return dict(self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"])

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of `step`, laid out as the `ShapeDtypeStruct`s of `like`.

        Raises:
          ValueError: the checkpoint holds other arrays than `like`: it names them.
        """
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
            return self._manager.restore(step, args=args)["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint {self._manager.directory / str(step)} does not fit this config: {_first_line(error)}; "
                "was it written with another model or optimizer? Choose another --config.run.name"
            ) from error

    def wait(self) -> None:
        """Returns once the last save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes the last save and releases the background threads."""
        self._manager.close()


class Snapshots:
    """Weights alone, under a number: what the reference policy and the warm start are kept in."""

    def __init__(self, directory: Path):
        self._directory = epath.Path(Path(directory).resolve())
        self._directory.mkdir(parents=True, exist_ok=True)
        self._checkpointer = ocp.StandardCheckpointer()

    def _path(self, number: int) -> epath.Path:
        return self._directory / f"{number:08d}"

    def exists(self, number: int) -> bool:
        """Whether snapshot `number` is complete on disk."""
        return self._path(number).exists()

    def save(self, number: int, params: Tree) -> None:
        """Starts writing `params`; replaces a snapshot of the same number."""
        self._checkpointer.save(self._path(number), params, force=True)

    def restore(self, number: int, like: Tree) -> Tree:
        """The weights of snapshot `number`, laid out as the `ShapeDtypeStruct`s of `like`.

        Raises:
          ValueError: it is missing, or holds other arrays than `like`.
        """
        self.wait()
        path = self._path(number)
        if not path.exists():
            raise ValueError(f"snapshot {path} is missing; it was deleted or the run folder is incomplete")
        try:
            return self._checkpointer.restore(path, like)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"snapshot {path} does not fit this model: {_first_line(error)}") from error

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Deletes every snapshot but these."""
        kept = {self._path(n).name for n in numbers}
        for path in self._directory.iterdir():
            if path.name.isdigit() and path.name not in kept:
                path.rmtree()

    def wait(self) -> None:
        """Returns once the last save is on disk."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Finishes the last save and releases the background threads."""
        self._checkpointer.close()


def bit_checksum(tree: Tree) -> str:
    """Hexadecimal digest of the exact bits, shapes and dtypes of `tree`."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
