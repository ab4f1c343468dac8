"""Saving and resuming a run: its checkpoints, the reference's snapshots that they need, and the journal after them."""

import time
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from rpg_jax import storage
from rpg_jax.rollout import GroupJournal
from rpg_jax.runs import branching, cli, run_folder
from rpg_jax.runs.layout import Layout
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.integrity import Refused
from rpg_jax.storage.journal import Journal
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState


class Checkpointing:
    """Keeps the checkpoints of a run in its folder, and knows which reference snapshot each checkpoint needs.

    A run without a reference policy, as supervised training is, needs no snapshots.

    Attributes:
      parent: the checkpoint of another run that this run begins with; None for a run that begins anew or goes on.
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
        self.parent = branching.parent_of(config, folder.files) if self.is_new else None
        limit = int(c.journal_gib * 2**30)
        self.journal = Journal(folder.home / "journal", max_bytes=limit) if limit and journaled else None
        self._references = {step: self._reference_of(step) for step in self.checkpoints.steps()}

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint yet."""
        return self.checkpoints.latest_step() is None

    @property
    def needs_weights(self) -> bool:
        """Whether the run begins with the weights of its config, and not with those of a checkpoint."""
        return self.is_new and self.parent is None

    def restore(self, like: TrainState, reference: Reference | None) -> tuple[int, TrainState, dict[str, Any]]:
        """(step, state, record) of the newest checkpoint that can be trusted. Raises ValueError if there is none."""

        def check(record: dict[str, Any]) -> None:
            if reference is not None:
                reference.check(record["reference"])

        last = self.checkpoints.restore_last(like, check)
        assert last is not None, "there was a checkpoint a moment ago"
        self._references = {step: self._reference_of(step) for step in self.checkpoints.steps()}
        self._prune_journal(last[0])
        return last

    def save(self, step: int, state: TrainState, record: Mapping[str, Any], reference: Reference | None) -> None:
        """Starts a checkpoint of everything that a resume needs, and deletes snapshots that nobody needs any more."""
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
        """The journal of the training rollout; None if there is no journal."""
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
        """Waits for the checkpoint of `step`, the last of this process, and drops the journal of the steps before."""
        self.checkpoints.wait()
        self._prune_journal(step)

    def take_seconds(self) -> float:
        """Seconds that the last start of a checkpoint took; 0 if none has started since the last call."""
        taken, self.seconds = self.seconds, 0.0
        return taken

    def close(self) -> None:
        """Finishes the checkpoint and the journal, and ends their threads."""
        self.checkpoints.close()
        if self.journal is not None:
            self.journal.close()

    def _prune_journal(self, steps: int) -> None:
        if self.journal is not None:
            self.journal.prune(steps)  # the journal counts steps from 0

    def _reference_of(self, step: int) -> int | None:
        """The reference snapshot that a checkpoint needs; None where its record names none or cannot be read."""
        try:
            return self.checkpoints.record(step).get("reference", {}).get("number")
        except Refused:
            return None
