"""What an experiment makes of its config."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from configs import tiny
from rpg_jax.runs.experiment import evaluation_generator, make_scorer, make_stage
from rpg_jax.types import Sampling
from tests.training.test_generate import PROBLEMS, FakeRollout


def test_every_part_of_the_reward_gets_what_it_needs_from_the_config():
    config = tiny.get_config()
    config.rewards.parts = "exact:1,format:0.1,length:0.5"
    config.rewards.overlong_shaping, config.rewards.overlong_buffer = True, 2
    config.rollout.max_tokens = 10
    with make_scorer(config) as scorer:
        scores = scorer([SimpleNamespace(answer="7", source=None)] * 2, ["7", "8"], [2, 10])
    assert scores.parts["length"] == pytest.approx([-0.2, -1.0])
    assert scores.parts["overlong"] == pytest.approx([0.0, -1.0])
    assert scores.accuracy == pytest.approx([1.0, 0.0])


def test_an_evaluation_samples_in_an_order_that_no_earlier_call_changes(monkeypatch):
    """Sets number their problems alike, and a process that goes on after a kill knows no lengths."""
    asked = []
    generated = FakeRollout.generate
    monkeypatch.setattr(FakeRollout, "generate", lambda *given: asked.append(given[1].expected) or generated(*given))
    tokenizer = SimpleNamespace(chat=None, encode=lambda text: [1] * len(text), decode=lambda ids: "7")
    fields = {"config": tiny.get_config(), "stage": None, "tokenizer": tokenizer}
    with make_scorer(fields["config"]) as scorer:
        experiment = SimpleNamespace(**fields, sampling=lambda temperature: Sampling())
        generate = evaluation_generator(experiment, FakeRollout(), scorer)
        for step in (0, 1):
            generate(PROBLEMS, step=step)
    assert asked == [[None, None]] * 2


def test_lockstep_on_several_processes_has_no_environment_and_an_experiment_without_one_no_stage(monkeypatch):
    config = tiny.get_config()
    assert make_stage(config) is None
    config.environment.name, config.rollout.driver = "module:Class", "lockstep"
    with make_stage(config) as stage:
        assert stage.name == "module:Class"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="lockstep on 2 processes .*environment.name=module:Class: choose orchestrator"
    ):
        make_stage(config)
