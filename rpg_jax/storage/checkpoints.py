"""Checkpoints of a run through Orbax: written asynchronously and atomically, verified when they are read.

On disk, checkpoints/STEP/state holds the arrays and a checksum of each. checkpoints/STEP/record holds everything else
under a digest, and commit_success.txt is written last. A checkpoint that cannot be trusted is refused with a reason and
moved to checkpoints/refused, never deleted. The checkpoint before it is used.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.storage import integrity
from rpg_jax.storage.integrity import Refused
from rpg_jax.storage.json_files import plain

Tree = Any
FORMAT = 2  # version of the record and of the folder


class Checkpoints:
    """The last few training states of a run, each with a JSON record of everything else that a resume needs.

    A save returns once the arrays have left the devices. An atomic rename commits it, or in a bucket a marker. So a
    process that is killed at any moment leaves the previous checkpoint in place.

    Args:
      keep: number of the newest checkpoints that stay.
      permanent_every: checkpoints of multiples of this step stay for ever; None: none does.
      identity: what the run computes, by field. A checkpoint with other values is foreign. None reads any checkpoint.
    """

    def __init__(
        self,
        directory: Path | epath.Path,
        *,
        keep: int,
        permanent_every: int | None = None,
        identity: Mapping[str, Any] | None = None,
    ):
        self._directory = storage.absolute(directory)
        self._identity = None if identity is None else json.loads(json.dumps(plain(identity)))
        options = {"max_to_keep": keep, "keep_period": permanent_every, "enable_async_checkpointing": True}
        self._manager = ocp.CheckpointManager(self._directory, options=ocp.CheckpointManagerOptions(**options))
        self._half_written = _half_written(self._directory)
        for path in self._half_written:
            _say(f"{path} is half-written: it is not used, and is deleted once there is a newer checkpoint")

    def latest_step(self) -> int | None:
        """The newest step on disk, trusted or not, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Every step that is still kept, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, record: Mapping[str, Any]) -> None:
        """Starts writing `state` and the JSON-able `record` under `step`; waits for the previous save first.

        Raises OSError if one of them cannot be written.
        """
        self.wait()
        self._clean_up()
        envelope = {"format": FORMAT, "identity": self._identity, "record": record}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(integrity.signed(state)),
            record=ocp.args.JsonSave(integrity.sealed(envelope)),
        )
        with integrity.writing(self._directory):
            self._manager.save(step, args=arguments)

    def record(self, step: int) -> dict[str, Any]:
        """The JSON record of `step` alone. Collective, as `restore` is.

        Raises:
          Refused: it is damaged, incomplete, or of another run or format; the message says which.
        """
        self.wait()
        return integrity.by_all(lambda: self._record(self._directory / str(step)))

    def _record(self, path: epath.Path) -> dict[str, Any]:
        if not _is_committed(path):
            raise Refused(path, "it is half-written: commit_success.txt is missing")
        with integrity.named(path / "record"):
            envelope = integrity.unsealed(ocp.JsonCheckpointHandler().restore(path / "record"))
            if envelope["format"] != FORMAT:
                raise ValueError(f"it has format {envelope['format']}, this version reads {FORMAT}")
        theirs, own = plain(envelope["identity"] or {}), self._identity or {}
        if differing := sorted(name for name, value in own.items() if theirs.get(name, ...) != value):
            named = "; ".join(f"{name} {theirs.get(name)!r}, here {own[name]!r}" for name in differing)
            raise Refused(path, f"it is foreign, of a run with {named}")
        return dict(envelope["record"])

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of `step`, laid out as the `ShapeDtypeStruct`s of `like`, on any mesh.

        Raises:
          Refused: it is damaged, or holds other arrays than `like`; the message names them.
        """
        self.wait()
        return integrity.restored(self._directory / str(step) / "state", like)

    def restore_last(
        self, like: Tree, accept: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> tuple[int, Tree, dict[str, Any]] | None:
        """(step, state, record) of the newest checkpoint that can be trusted; None if there is no checkpoint.

        A newer checkpoint that cannot be trusted is named on stderr and moved to `refused`. `accept` raises a
        ValueError if a record needs something that is missing.

        Raises:
          ValueError: there are checkpoints, and none can be trusted; all stay where they are.
        """
        refused: list[tuple[int, str]] = []
        for step in json.loads(hosts.all_gather_bytes(json.dumps(self.steps()[::-1]).encode())[0]):
            try:
                record = self.record(step)
                accept(record)
                state = self.restore(step, like)
            except ValueError as error:
                refused.append((step, str(error)))
                _say(f"refused: {error}")
                continue
            for newer, _ in refused:
                self._move_aside(newer)
            if refused:
                _say(f"using the checkpoint of step {step} instead; the refused are in {self._directory / 'refused'}")
            return step, state, record
        if refused:
            raise ValueError(
                f"no checkpoint in {self._directory} can be trusted: {'; '.join(reason for _, reason in refused)}. "
                "Nothing was deleted; copy a good one there, or start over with another --config.run.name"
            )
        return None

    def wait(self) -> None:
        """Returns once the last save is on disk. Raises OSError if it could not be written."""
        with integrity.writing(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes the last save and releases the background threads. Raises OSError if it could not be written."""
        with integrity.writing(self._directory):
            self._manager.close()

    def _clean_up(self) -> None:
        """Deletes half-written checkpoints, once a checkpoint of that step or a later one is complete."""
        latest = self.latest_step()
        superseded = [p for p in self._half_written if latest is not None and _step_of(p) <= latest]
        self._half_written = [p for p in self._half_written if p not in superseded]
        for path in superseded:
            rewritten = path.name.isdigit() and _is_committed(path)
            if hosts.is_first() and path.exists() and not rewritten:
                path.rmtree()

    def _move_aside(self, step: int) -> None:
        if hosts.is_first():
            aside = self._directory / "refused"
            there = aside.iterdir() if aside.exists() else ()
            earlier = sum(path.name.partition("-")[0] == str(step) for path in there)
            storage.move(self._directory / str(step), aside / (f"{step}-{earlier}" if earlier else f"{step}"))
        multihost_utils.sync_global_devices(f"refused checkpoint {step}")
        self._manager.reload()


def committed_steps(directory: Path | epath.Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, oldest first; a run that writes there is not disturbed."""
    there = directory.iterdir() if directory.exists() else ()
    return sorted(int(path.name) for path in there if path.name.isdigit() and _is_committed(path))


def _half_written(directory: epath.Path) -> list[epath.Path]:
    """Checkpoints that a kill cut short: on disk they have a temporary name, in a bucket they lack the marker."""
    steps = [path for path in (directory.iterdir() if directory.exists() else ()) if _step_of(path) >= 0]
    if storage.in_bucket(directory):
        return sorted(path for path in steps if not _is_committed(path))
    return sorted(path for path in steps if ".orbax-checkpoint-tmp" in path.name)


def _is_committed(path: Path | epath.Path) -> bool:
    return (path / "commit_success.txt").exists()


def _step_of(half_written: epath.Path) -> int:
    step = half_written.name.partition(".")[0]
    return int(step) if step.isdigit() else -1


def _say(message: str) -> None:
    if hosts.is_first():
        print(f"checkpoints: {message}", file=sys.stderr, flush=True)
