"""A run tells its watchdog of everything that moves, so that a step may take longer than `run.stall_seconds`."""

from collections import Counter

import jax
import pytest

from rpg_jax.runs import evaluation, session
from rpg_jax.training import generate, loop, step
from tests.end_to_end.test_apart import finished


@pytest.mark.slow
def test_groups_and_updates_of_steps_and_groups_of_evaluations_are_heartbeats(tmp_path, monkeypatch):
    beats, doing = Counter(), []

    def beat(name=None):
        doing.extend([name] if name else [])
        beats[doing[-1] if doing else ""] += 1

    for module in (session, evaluation, generate, loop, step):
        monkeypatch.setattr(module, "beat", beat)
    finished(tmp_path, "r", jax.devices()[:1], {"train.steps": 1})
    before, after = (f"the evaluation of held out after step {step}" for step in (0, 1))
    assert doing == [before, "step 1", "the checkpoint of step 1", after]
    assert beats[before] > 8 and beats[after] > 8, "eight problems"
    assert beats["step 1"] > 8 + 2 + 2, "eight groups, the log-probs of two mini-batches and their updates"
