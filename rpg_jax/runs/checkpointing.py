"""How a run saves its state, resumes from it, or begins with the state of another run.

`run.start_from=runs/A@100` makes a new run, a branch, which begins after step 100 of the run A, its parent. The first
step of the branch is 101. The branch takes over weights, optimizer slots, the count of updates and the position in the
problems. It takes over the reference if the fields of `reference` are equal. With an equal config the branch computes
what the parent computes after that step, to the bit. Other fields may differ, as long as the arrays of the checkpoint
keep their shapes and meaning.

Somebody else may have written the parent. So only arrays, JSON, the typed config and the tokenizer are read; no code
that the parent's config names is imported.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from rpg_jax import losses, storage
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import INPUTS, PARENT
from rpg_jax.rollout import GroupJournal
from rpg_jax.runs import cli, run_folder
from rpg_jax.runs.layout import Layout
from rpg_jax.storage import integrity
from rpg_jax.storage.checkpoints import Checkpoints, Snapshots, read_record
from rpg_jax.storage.files import read_bytes, read_if_there
from rpg_jax.storage.journal import Journal
from rpg_jax.training.collect import Collector
from rpg_jax.training.optimizer import SCHEDULE_FREE
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState
from rpg_jax.types import Count

_SAME = ("optimizer.name", *(f"model.lora.{name}" for name in ("rank", "alpha", "targets", "int8")))
_OF_ADAPTERS = ("model.compute_dtype", "warm_start.enabled")  # they decide the frozen weights, and where they are kept
_INPUTS = {
    "model.path": "the shapes of the model are",
    "model.tokenizer": "the tokenizer is",
    "model.path (weights)": "the frozen weights beside the adapters are",
}


@dataclasses.dataclass(frozen=True)
class Parent:
    """A checkpoint of another run, with which a branch begins.

    Attributes:
      home: the absolute path of the run's folder, local or in a bucket. The folder is only read.
      step: the number of the checkpoint's step.
      config: every field of the run's config, {dotted name: value}.
      inputs: the object in the run's inputs.json, {"model.tokenizer": SHA-256, …}; {} without this file.
      identity: the config fields that decide the numbers of the run, {dotted name: value}, as the checkpoint has them.
      record: the record of the checkpoint, without arrays, as `Session.save` writes it.
    """

    home: epath.Path
    step: int
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    identity: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder of the run and the step, as "/home/me/runs/A@100": a value that `run.start_from` may have."""
        return f"{self.home}@{self.step}"

    def check(self, config: ConfigDict, inputs: Mapping[str, str]) -> None:
        """Raises ValueError, with the reason, if a branch with this `config` cannot begin with the checkpoint.

        The run must be of rpg_jax.train, `train.steps` above the step, and optimizer, adapters, learned advantage,
        tokenizer and frozen weights the parent's. Where steps decide the learning rate, the updates of a step must be
        too. No array is read: `state` compares the shapes of the arrays. `inputs`: the digests of the branch's inputs,
        as `inputs.check_inputs` returns them."""
        if not {"stream", "reference"} <= self.record.keys():
            raise ValueError(self._refused("it is no run of rpg_jax.train, and has no position to go on from"))
        if config.train.steps <= self.step:
            steps = self.step + config.train.steps
            raise ValueError(
                f"run.start_from={self.name} begins after step {self.step}, and train.steps={config.train.steps} is "
                f"the number of the last step: set train.steps={steps} for {config.train.steps} steps more"
            )
        own = run_folder.flat_fields(config)
        needed = [*_SAME, *(_OF_ADAPTERS if own["model.lora.rank"] else ())]
        if any(fields["loss.advantage"] in losses.LEARNED_ADVANTAGES for fields in (own, self.config)):
            needed.append("loss.advantage")
        if own["optimizer.name"] == SCHEDULE_FREE:
            needed.append("optimizer.b1")  # its average cannot be told from its weights with another
        for name in needed:
            if own[name] != self.config[name]:
                raise ValueError(self._refused(f"{name} is {self.config[name]!r} there and {own[name]!r} here"))
        for name, what in _INPUTS.items():
            if name in inputs and self.inputs.get(name, inputs[name]) != inputs[name]:
                raise ValueError(self._refused(f"{what} another there"))
        here, there = (fields["train.updates_per_step"] * fields["train.epochs"] for fields in (own, self.config))
        # A parent that is a branch has steps of its own parent, maybe with other updates, behind it.
        made = int(self.record["reference"]["updates"]) if PARENT in self.inputs else self.step * there
        warmup, falls = Count.parse(own["optimizer.warmup"]), own["optimizer.schedule"] != "constant"
        begun = 0 if falls else min(self.step, made // here)  # steps that both counts have behind them
        in_steps = falls and "step" in (own["optimizer.decay_until"] or "train.steps")
        in_steps |= warmup.unit == "steps" and warmup.number > begun
        if made != self.step * here and in_steps:
            reason = f"its {self.step} steps made {made} updates, and a step has {here} here. Steps decide the "
            fix = "learning rate: give optimizer.warmup and optimizer.decay_until in updates"
            raise ValueError(self._refused(reason + fix))

    def state(self, like: TrainState) -> TrainState:
        """The state in the checkpoint, laid out as the `ShapeDtypeStruct`s of `like`. All processes call together.
        Raises ValueError if the state is missing, damaged or has other arrays; StorageFailure if it cannot be read."""
        try:
            return integrity.restored(storage.absolute(self.home / "checkpoints" / str(self.step) / "state"), like)
        except integrity.Damaged:
            raise
        except integrity.Refused as error:
            raise ValueError(self._refused(f"its arrays are others than this config's ({error.reason})")) from error

    def base(self, like: Any) -> Any:
        """The frozen weights beside the parent's adapters, laid out as the `ShapeDtypeStruct`s of `like`. All processes
        call together. The errors are those of `state`."""
        return Snapshots(self.home / "base").restore(0, like)

    def move(self, config: ConfigDict, collector: Collector, reference: Reference) -> str:
        """Moves `collector` and `reference`, which are new, to the parent's position. All processes call together.

        If a field of `config` that decides the numbers differs, sampled groups are dropped; if the problems or their
        seed differ too, their order begins anew. If a field of `reference` differs, the branch's first policy is the
        reference. Returns a line that says what begins anew. Raises ValueError if the problems differ and no field
        does, or if the reference's snapshot is damaged or missing; StorageFailure if the snapshot cannot be read."""
        anew, now = [], {k: v for k, v in run_folder.identity(config).items() if k != run_folder.START_FROM}
        then = {k: v for k, v in run_folder.renewed(self.identity).items() if k != run_folder.START_FROM}
        if now == then:
            collector.restore(self.record)
        else:
            drawn = {**self.record, **(self.record["ahead"] or {})}
            if any(drawn.get(name) for name in ("pending", "partial", "batches", "carried")):
                anew.append("the completions that no step had trained yet, because fields differ")
            try:
                collector.stream.restore(self.record["stream"])
            except ValueError:
                anew.append("the order of the problems, which or whose seed are others")
        if all(then.get(name) == value for name, value in now.items() if name.startswith("reference.")):
            snapshots = Snapshots(self.home / "reference")
            reference.take_over(self.record["reference"], snapshots.restore)
        else:
            reference.begin_at(int(self.record["reference"]["updates"]))
            anew.append("the reference, because fields of reference differ")
        return f"begins after step {self.step} of {self.home}" + (f"; anew: {', '.join(anew)}" if anew else "")

    def _refused(self, reason: str) -> str:
        return (
            f"run.start_from={self.name}: {reason}. To begin with the weights alone: python -m rpg_jax.export "
            f"--run={self.home} --step={self.step} --out=FOLDER, then --config.model.path=FOLDER"
        )


def _parsed(text: str) -> tuple[str, int | None]:
    """("runs/A", 100) of "runs/A@100"; the step is None for "runs/A". Raises ValueError for an empty or broken text."""
    found = re.fullmatch(r"(.+?)(?:@(\d{1,12}))?", text)
    if not found:
        raise ValueError(f"run.start_from={text!r} is the folder of a run and a step, as runs/A@100")
    return found[1], None if found[2] is None else int(found[2])


def parent_of(config: ConfigDict, files: Path) -> Parent | None:
    """The parent that a new run begins from; None without `run.start_from`. All processes call together.

    If `run.start_from` names no step, the step is the last checkpoint of the parent. A branch that ended before its own
    first checkpoint begins once more from the step that inputs.json in `files`, the folder of the branch, names.

    Raises ValueError if the run or checkpoint is missing or its record is damaged, StorageFailure if storage fails."""
    if not config.run.start_from:
        return None
    address, step = _parsed(config.run.start_from)
    noted = str(read_if_there(files / INPUTS).get(PARENT, ""))
    with run_folder.opened(address) as folder:
        theirs = run_folder.read_config(folder.files)
        if step is None and re.fullmatch(rf"{re.escape(str(folder.home))}@\d+", noted):
            step = _parsed(noted)[1]
        step = run_folder.checkpoint_step(folder, step)
        step = int(hosts.all_gather_bytes(b"%d" % step)[0])  # only the first may have `files`; the parent may go on
        path = storage.absolute(folder.home / "checkpoints" / str(step))
        identity, record = integrity.by_all(lambda: read_record(path))
        inputs = read_if_there(folder.files / INPUTS)
        return Parent(folder.home, step, run_folder.flat_fields(theirs), inputs, identity, record)


def adopt_tokenizer(config: ConfigDict, files: Path) -> None:
    """Copies tokenizer.model, which the parent has trained, into `files`, the local folder of a branch with `config`.

    Does nothing without `run.start_from`, with `model.tokenizer` or `model.path`, if the parent trained none, or if
    `files` has one already. All processes call together, and the first writes."""
    own = files / "tokenizer.model"
    if not config.run.start_from or config.model.tokenizer or config.model.path or own.exists():
        return
    with run_folder.opened(_parsed(config.run.start_from)[0]) as folder:
        theirs = folder.files / own.name
        if hosts.is_first() and theirs.is_file():
            storage.write_atomically(own, read_bytes(theirs))


class Checkpointing:
    """Keeps the checkpoints of a run in `folder`, and knows which reference snapshot each checkpoint needs. All
    processes of the run make it, and call its methods, together. `journaled`: a journal is kept too, unless
    `checkpoint.journal_gib` is 0. Raises as `parent_of` for a new run.

    Attributes:
      checkpoints: the checkpoints, each with the state and the record.
      parent: the checkpoint of another run with which this run begins; None if this run has a checkpoint, or its config
        no `run.start_from`.
      journal: keeps the groups that were sampled after the newest complete checkpoint; None if no journal is kept.
    """

    def __init__(self, config: ConfigDict, folder: storage.Folder, *, journaled: bool):
        c = config.checkpoint
        self._folder, self.seconds = folder, 0.0
        self.checkpoints = Checkpoints(
            folder.home / "checkpoints",
            keep=c.keep,
            permanent_every=c.permanent_every,
            identity=run_folder.identity(config),
            renewed=run_folder.renewed,
            freed=cli.return_pages,  # on a CPU the memory of a save's copies would stay taken, more with each save
        )
        self.parent = parent_of(config, folder.files) if self.is_new else None
        limit = int(c.journal_gib * 2**30)
        self.journal = Journal(folder.home / "journal", max_bytes=limit) if limit and journaled else None
        self._references = {step: self._reference_of(step) for step in self.checkpoints.steps()}

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint yet. A damaged one counts as a checkpoint."""
        return self.checkpoints.latest_step() is None

    @property
    def needs_weights(self) -> bool:
        """Whether the first weights are those that the config names or draws, and not those of a checkpoint."""
        return self.is_new and self.parent is None

    def restore(self, like: TrainState, reference: Reference | None) -> tuple[int, TrainState, dict[str, Any]]:
        """(step, state, record) of the newest good checkpoint; `like` has the `ShapeDtypeStruct`s of the state.

        Moves damaged checkpoints aside, and raises, as `Checkpoints.restore_last`. A good checkpoint also has the
        snapshot that `reference` (None: the run has none) needs. The run must have a checkpoint. The journal loses the
        groups of the steps up to `step`."""

        def check(record: dict[str, Any]) -> None:
            if reference is not None:
                reference.check(record["reference"])

        last = self.checkpoints.restore_last(like, check)
        assert last is not None, "there was a checkpoint a moment ago"
        self._references = {step: self._reference_of(step) for step in self.checkpoints.steps()}
        self._prune_journal(last[0])
        return last

    def save(self, step: int, state: TrainState, record: Mapping[str, Any], reference: Reference | None) -> None:
        """Starts a checkpoint of `state` and `record` after step `step`; waits for the previous save first.

        `record` is JSON-able; the position of `reference` (None: the run has none) is added. Copies the run's files to
        its bucket, if any. Deletes the snapshots and the journal's groups that no checkpoint needs now. Raises
        StorageFailure as `Checkpoints.save`, or if the bucket cannot be written."""
        started, earlier = time.perf_counter(), self.checkpoints.steps()
        if reference is not None:
            record = {**record, "reference": reference.commit()}
        self._folder.push()  # whoever resumes from this checkpoint finds the logs up to it
        self.checkpoints.save(step, state, record)
        if reference is not None:
            self._references[step] = record["reference"]["number"]
            # Until this save is complete, a checkpoint that makes room for it is still the last good one.
            needed = [self._references[s] for s in (*earlier, step)]
            known = [number for number in needed if number is not None]
            if len(known) == len(needed):
                reference.prune(known)
        if earlier:
            self._prune_journal(earlier[-1])  # this checkpoint is complete: each save waits for the save before
        self.seconds = time.perf_counter() - started

    def group_journal(self, layout: Layout) -> GroupJournal | None:
        """The journal, as a rollout for training on `layout` uses it; None if no journal is kept."""
        c = layout.config
        if self.journal is None:
            return None
        settings = {"driver": c.rollout.driver, "int8_kv": c.rollout.int8_kv, "compute_dtype": c.model.compute_dtype}
        if c.model.replay_experts:
            settings |= {"experts": "recorded"}
        if c.environment.name is not None:
            names = ("name", "options", "max_turns", "turn_tokens")
            settings |= {f"environment.{name}": c.environment[name] for name in names}
        return GroupJournal(self.journal, settings)

    def finish(self, step: int) -> None:
        """Waits until the checkpoint of `step`, the last of this process, is on disk. Then the journal loses the groups
        of all steps up to `step`. Raises StorageFailure if the checkpoint could not be written."""
        self.checkpoints.wait()
        self._prune_journal(step)

    def take_seconds(self) -> float:
        """Seconds that the last call of `save` took; 0 if there was none since the last call of `take_seconds`."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def close(self) -> None:
        """Finishes the checkpoint and the journal, and ends their threads. Raises StorageFailure if the save failed."""
        try:
            self.checkpoints.close()
        finally:
            if self.journal is not None:
                self.journal.close()

    def _prune_journal(self, steps: int) -> None:
        if self.journal is not None:
            self.journal.prune(steps)  # the journal counts steps from 0

    def _reference_of(self, step: int) -> int | None:
        """The number of the reference snapshot that a checkpoint needs; None if its record names none or is refused."""
        try:
            return self.checkpoints.record(step).get("reference", {}).get("number")
        except integrity.Refused:
            return None
