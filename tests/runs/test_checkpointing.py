"""How a run keeps checkpoints and its journal; tests of whole runs resume from them (tests/end_to_end)."""

import numpy as np
import pytest

from configs import tiny
from rpg_jax import storage
from rpg_jax.runs.checkpointing import Checkpointing
from rpg_jax.runs.resolve import resolve
from rpg_jax.storage.errors import Kind, StorageFailure
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion


def test_a_save_that_fails_at_the_end_costs_no_group_of_the_journal(tmp_path):
    key = {"step": 0, "prompt_id": 3, "version": 1}
    with storage.Folder(tmp_path / "run") as folder:
        kept = Checkpointing(resolve(tiny.get_config()), folder, journaled=True)
        kept.journal.add(key, [Completion(np.array([1], np.int32), np.zeros(1, np.float32), "stop", 1)])
        close = kept.checkpoints.close

        def fail():
            close()
            raise StorageFailure("a checkpoint", "the disk is full", Kind.PERMANENT)

        kept.checkpoints.close = fail
        with pytest.raises(StorageFailure):
            kept.close()
    assert list(Journal(tmp_path / "run/journal", max_bytes=2**20).find([key])) == [0]
