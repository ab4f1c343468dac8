"""Checkpoints of a run, and snapshots of weights: Orbax writes them, and they are verified when they are read.

On disk, checkpoints/STEP/state holds the arrays and a checksum of each. checkpoints/STEP/record holds everything else
under a digest, and commit_success.txt is written last. A damaged checkpoint is refused with a reason, and the
checkpoint before it is used. Then the damaged checkpoint is moved to checkpoints/refused, never deleted.

On disk, FOLDER/NUMBER holds a snapshot: weights with their checksums, and commit_success.txt. The reference policy, the
initial policy, warm starts and frozen weights are kept as snapshots.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.storage import errors, integrity
from rpg_jax.storage.errors import Kind, StorageFailure
from rpg_jax.storage.files import finite
from rpg_jax.storage.integrity import Damaged, Refused

Tree = Any
FORMAT = 2  # version of the record and of the folder


class Checkpoints:
    """The last few training states of a run, each with a JSON record of everything else that a resume needs.

    A save returns once the arrays have left the devices. An atomic rename completes the checkpoint; in a bucket, a
    marker file completes it. So a process that is killed at any moment leaves the previous checkpoint in place. All
    processes of the run make the object, save, read and wait together.

    Args:
      directory: the folder of the checkpoints, local or in a bucket. It is made if it is missing.
      keep: number of the newest checkpoints that stay.
      permanent_every: checkpoints at multiples of this step stay for ever. None: no checkpoint stays for ever.
      identity: the config fields that decide the numbers of the run. A checkpoint with other values is refused. None
        accepts any checkpoint.
      renewed: translates the identity of an older checkpoint into present fields and values.
      freed: called before a save, once the previous save has freed its copies of the arrays.
    """

    def __init__(
        self,
        directory: Path | epath.Path,
        *,
        keep: int,
        permanent_every: int | None = None,
        identity: Mapping[str, Any] | None = None,
        renewed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
        freed: Callable[[], object] = lambda: None,
    ):
        self._renewed, self._freed = renewed, freed
        self._directory = storage.absolute(directory)
        self._identity = None if identity is None else json.loads(json.dumps(finite(identity)))
        options = {"max_to_keep": keep, "keep_period": permanent_every, "enable_async_checkpointing": True}
        made = ocp.CheckpointManagerOptions(**options)
        alone = jax.process_count() == 1  # no second try: it has barriers, which hosts that begin again would miss
        open_once = functools.partial(ocp.CheckpointManager, self._directory, options=made)
        self._manager = errors.retried(open_once, self._directory) if alone else open_once()
        self._half_written = errors.retried(lambda: _half_written(self._directory), self._directory)
        self._last: tuple[int, Tree, dict[str, Any]] | None = None  # the save that may still be under way
        for path in self._half_written:
            _say(f"{path} is half-written: it is not used, and is deleted once there is a newer checkpoint")

    def latest_step(self) -> int | None:
        """Returns the newest step of a checkpoint on disk, damaged or not; None if there is none. A save that has not
        ended does not count, though Orbax counts it. Raises StorageFailure if storage does not answer."""
        last = "commit_success.txt" if storage.in_bucket(self._directory) else ""  # what the end of a save makes
        paths = {step: self._directory / str(step) / last for step in reversed(self.steps())}
        return errors.retried(lambda: next((n for n, path in paths.items() if path.exists()), None), self._directory)

    def steps(self) -> list[int]:
        """The step of every checkpoint that is kept or under way, damaged or not, oldest first; [] if there is none."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Tree, record: Mapping[str, Any]) -> None:
        """Starts writing `state` and the JSON-able `record` under `step`; waits for the previous save first. If a
        transient failure lost the previous save, stderr says so, and this save replaces it. Raises StorageFailure if
        the previous save failed otherwise, or this save cannot start; `wait` raises what fails later."""
        try:
            self.wait()
        except StorageFailure as error:
            if error.kind is not Kind.TRANSIENT:
                raise
            _say(f"{error.what}: {error.reason}; the checkpoint of step {step} replaces it")
        self._freed()
        self._clean_up()
        envelope = integrity.sealed({"format": FORMAT, "identity": self._identity, "record": record})
        self._write(step, state, envelope)
        self._last = step, state, envelope

    def _write(self, step: int, state: Tree, envelope: dict[str, Any]) -> None:
        """Starts a save. With one process, a transient error deletes the save's remains and starts the save again."""

        def write() -> None:
            self._drop(step)
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(integrity.signed(state)), record=ocp.args.JsonSave(envelope)
                ),
            )

        errors.written(write, self._directory / str(step), alone=jax.process_count() == 1)

    def _drop(self, step: int) -> None:
        """Deletes the remains of a failed save of `step`, and makes Orbax forget the step."""
        if step in self._manager.all_steps() and not _is_committed(path := self._directory / str(step)):
            if hosts.is_first() and path.exists():
                path.rmtree()
            self._manager.reload()

    def record(self, step: int) -> dict[str, Any]:
        """Returns the JSON record that `save` received for `step`, without reading its arrays. Waits for the last save.

        Raises:
          Damaged: the record is damaged, incomplete or missing.
          Refused: the record is of another run or format; the message names the difference.
          StorageFailure: the record could not be read, after retries, or the last save failed.
        """
        self.wait()
        return integrity.by_all(lambda: self._record(self._directory / str(step)))

    def _record(self, path: epath.Path) -> dict[str, Any]:
        identity, record = read_record(path)
        theirs, own = self._renewed(finite(identity)), self._identity or {}
        if differing := sorted(name for name, value in own.items() if theirs.get(name, ...) != value):
            named = "; ".join(f"{name} {theirs.get(name)!r}, here {own[name]!r}" for name in differing)
            raise Refused(path, f"it is foreign, of a run with {named}")
        return record

    def restore(self, step: int, like: Tree) -> Tree:
        """The state of `step`, laid out as the `ShapeDtypeStruct`s of `like`, on any mesh. Waits for the last save.

        Raises:
          Damaged: the state is damaged or missing; the message names arrays with other bits.
          Refused: the state has other arrays than `like`.
          StorageFailure: the state could not be read, after retries, or the last save failed.
        """
        self.wait()
        return integrity.restored(self._directory / str(step) / "state", like)

    def restore_last(
        self, like: Tree, accept: Callable[[dict[str, Any]], None] = lambda record: None
    ) -> tuple[int, Tree, dict[str, Any]] | None:
        """Returns (step, state, record) of the newest checkpoint that can be trusted; None if there is no checkpoint.

        A newer checkpoint that is damaged is named on stderr and moved to `refused`. The state is laid out as the
        `ShapeDtypeStruct`s of `like`. `accept(record)` raises Damaged if the record needs another file that is damaged.

        Raises:
          Refused: the newest undamaged checkpoint is of another run, or has other arrays than `like`.
          StorageFailure: storage failed, after retries.
          ValueError: all checkpoints are damaged. After a Refused or this ValueError, all stay where they are.
        """
        refused: list[tuple[int, str]] = []
        for step in json.loads(hosts.all_gather_bytes(json.dumps(self.steps()[::-1]).encode())[0]):
            try:
                record = self.record(step)
                accept(record)
                state = self.restore(step, like)
            except Damaged as error:
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
        """Returns once the last save is on disk. A save that failed transiently is repeated if its arrays still exist.
        Raises StorageFailure if the checkpoint could not be written."""
        where, last, self._last = self._newest(), self._last, None
        try:
            errors.written(self._manager.wait_until_finished, where, alone=False)
        except StorageFailure as error:
            deleted = last is not None and any(x.is_deleted() for x in jax.tree.leaves(last[1]))
            if error.kind is not Kind.TRANSIENT or last is None or deleted:
                raise
            _say(f"{error.what}: {error.reason}; writing it again")
            self._write(*last)
            errors.written(self._manager.wait_until_finished, where, alone=False)

    def close(self) -> None:
        """Finishes the last save and releases the background threads. Raises StorageFailure if the save failed."""
        errors.written(self._manager.close, self._newest(), alone=False)

    def _newest(self) -> Path:
        """Returns the folder of the last save; the folder of all checkpoints if this process has saved none."""
        return self._directory / str(self._last[0] if self._last else "")

    def _clean_up(self) -> None:
        """Deletes each half-written checkpoint, once a checkpoint of the same step or of a later step is complete."""
        latest = self.latest_step()
        superseded = [p for p in self._half_written if latest is not None and _step_of(p) <= latest]
        self._half_written = [p for p in self._half_written if p not in superseded]
        for path in superseded:
            rewritten = path.name.isdecimal() and _is_committed(path)
            if hosts.is_first() and path.exists() and not rewritten:
                errors.retried(path.rmtree, path)

    def _move_aside(self, step: int) -> None:
        if hosts.is_first():
            aside = self._directory / "refused"
            there = aside.iterdir() if aside.exists() else ()
            earlier = sum(path.name.partition("-")[0] == str(step) for path in there)
            target = aside / (f"{step}-{earlier}" if earlier else f"{step}")
            errors.retried(lambda: storage.move(self._directory / str(step), target), target)
        hosts.barrier(f"refused checkpoint {step}")
        self._manager.reload()


class Snapshots:
    """A folder of snapshots of weights, by number. All processes of the run save, read, rename and wait together."""

    def __init__(self, directory: Path | epath.Path):
        self._directory = storage.absolute(directory)
        self._checkpointer = ocp.StandardCheckpointer()

    def _path(self, number: int) -> epath.Path:
        return self._directory / f"{number:08d}"

    def exists(self, number: int) -> bool:
        """Whether there is a snapshot `number`, even a damaged one. Raises StorageFailure if storage does not say."""
        return errors.retried(self._path(number).exists, self._path(number))

    def save(self, number: int, params: Tree) -> None:
        """Starts writing `params` as snapshot `number`, in place of an earlier one; `wait` returns when it is on disk.
        First waits for the previous save. Raises StorageFailure if that save failed, or this one cannot start."""
        path = self._path(number)

        def write() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer.save(path, integrity.signed(params), force=True)

        self.wait()
        errors.written(write, path, alone=jax.process_count() == 1)

    def restore(self, number: int, like: Tree) -> Tree:
        """Returns the weights of snapshot `number`, laid out as the `ShapeDtypeStruct`s of `like`, on any mesh.

        Raises:
          Damaged: the snapshot is missing or damaged.
          Refused: the snapshot has other arrays than `like`.
          StorageFailure: the snapshot could not be read, after retries, or the last save failed.
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
        """Renames a snapshot that `restore` refused, so that its number is free. Returns the new path."""
        path, aside = self._path(number), ""
        if hosts.is_first():
            taken = sum(other.name.startswith(f"refused-{path.name}") for other in self._directory.iterdir())
            aside = f"refused-{path.name}" + (f"-{taken}" if taken else "")
            errors.retried(lambda: storage.move(path, self._directory / aside), path)
        return self._directory / hosts.all_gather_bytes(aside.encode())[0].decode()

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Deletes every snapshot except `numbers`. Process 0 deletes. Raises StorageFailure if that fails."""
        kept = {self._path(n).name for n in numbers}
        for path in self._directory.iterdir() if hosts.is_first() and self._directory.exists() else ():
            if path.name.isdecimal() and path.name not in kept:
                errors.retried(path.rmtree, path)

    def wait(self) -> None:
        """Returns once the last save is on disk. Raises StorageFailure if the snapshot could not be written."""
        errors.written(self._checkpointer.wait_until_finished, self._directory, alone=False)

    def close(self) -> None:
        """Finishes the last save and releases the background threads. Raises StorageFailure if the save failed."""
        errors.written(self._checkpointer.close, self._directory, alone=False)


def read_record(path: epath.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (identity, record) of the checkpoint at `path`, whichever run it is of, as dicts of JSON. The identity
    has the config fields that decide the numbers of the run, the record what a resume needs beside arrays. Raises
    Damaged if they are damaged or incomplete, Refused if of another format, StorageFailure if storage fails."""
    if not errors.retried(lambda: _is_committed(path), path):
        raise Damaged(path, "it is half-written: commit_success.txt is missing")
    with integrity.judged(path / "record"):
        stored = errors.retried(lambda: ocp.JsonCheckpointHandler().restore(path / "record"), path / "record")
    envelope = integrity.unsealed(path / "record", stored)
    if envelope["format"] != FORMAT:
        raise Refused(path / "record", f"it has format {envelope['format']}, this version reads {FORMAT}")
    return dict(envelope["identity"] or {}), dict(envelope["record"])


def committed_steps(directory: Path | epath.Path) -> list[int]:
    """Steps of the complete checkpoints in `directory`, oldest first; [] without the folder. A run may be writing."""
    there = directory.iterdir() if directory.exists() else ()
    return sorted(int(path.name) for path in there if path.name.isdecimal() and _is_committed(path))


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
    return int(step) if step.isdecimal() else -1


def _say(message: str) -> None:
    if hosts.is_first():
        errors.say(f"checkpoints: {message}")
