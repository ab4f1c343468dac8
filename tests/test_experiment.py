"""What an experiment makes of its config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from configs import tiny
from rpg_jax.experiment import Experiment


def test_every_part_of_the_reward_gets_what_it_needs_from_the_config():
    config = tiny.get_config()
    config.rewards.parts = "exact:1,format:0.1,length:0.5"
    config.rewards.overlong_shaping, config.rewards.overlong_buffer = True, 2
    config.rollout.max_tokens = 10
    with Experiment.make_scorer(SimpleNamespace(config=config)) as scorer:
        scores = scorer([SimpleNamespace(answer="7", source=None)] * 2, ["7", "8"], ["stop", "length"], [2, 10])
    assert scores.parts["length"] == pytest.approx([-0.2, -1.0])
    assert scores.parts["overlong"] == pytest.approx([0.0, -1.0])
    assert scores.accuracy == pytest.approx([1.0, 0.0])
