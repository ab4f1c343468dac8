"""What an experiment makes of its config."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest
from ml_collections import ConfigDict

from configs import tiny
from rpg_jax.runs.experiment import make_scorer, make_stage
from rpg_jax.runs.memory import fitting_layout, make_decoding
from rpg_jax.runs.weights import init_params, no_params


def test_every_part_of_the_reward_gets_what_it_needs_from_the_config():
    config = tiny.get_config()
    config.rewards.parts = "exact:1,format:0.1,length:0.5"
    config.rewards.overlong_shaping, config.rewards.overlong_buffer = True, 2
    config.rollout.max_tokens = 10
    with make_scorer(config) as scorer:
        scores = scorer([SimpleNamespace(answer="7", source=None)] * 2, ["7", "8"], ["stop", "length"], [2, 10])
    assert scores.parts["length"] == pytest.approx([-0.2, -1.0])
    assert scores.parts["overlong"] == pytest.approx([0.0, -1.0])
    assert scores.accuracy == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(
    "field, value, said",
    [("rollout.tensor", 16, "does not divide 8 devices"), ("mesh.tensor", 32, "does not cover 8 devices"),
     ("rollout.devices", 12, "rollout.devices=12 of 8 devices"), ("rollout.expert", 3, "does not divide 8 devices")],
)  # fmt: skip
def test_a_config_of_a_larger_machine_is_laid_out_on_this_one_and_says_so(field, value, said, capsys):
    config = ConfigDict(json.loads(tiny.get_config().to_json_best_effort()))  # as a run's config.json is read
    config.update_from_flattened_dict({field: value})
    layout = fitting_layout(config, 32)
    assert layout.mesh.shape["fsdp"] == 8 and make_decoding(layout).mesh is layout.mesh
    error = capsys.readouterr().err
    assert error.startswith("using mesh.fsdp=8 instead of the config's layout: ") and said in error
    assert layout.config.rollout.devices == 0 and layout.config.rollout.tensor is None
    section, name = field.split(".")
    assert config[section][name] == value, "the config that was given is changed"


def test_the_weights_of_a_resumed_run_are_not_read_from_the_model_too():
    config = tiny.get_config()
    config.model.num_layers = 1
    layout = fitting_layout(config, 32)
    layout.config.model.path = "/nowhere/model"
    with pytest.raises(ValueError, match="/nowhere/model"):
        init_params(layout)
    params = no_params(layout)
    shapes, places = (jax.tree.map(of, params) for of in (lambda x: x.shape, lambda x: x.sharding))
    assert shapes == jax.tree.map(lambda x: x.shape, layout.param_shapes) and places == layout.param_shardings
    assert not any(x.any() for x in jax.tree.leaves(params))


def test_a_config_that_fits_is_left_as_it_is(capsys):
    config = tiny.get_config()
    config.rollout.tensor, config.mesh.tensor = 1, 2
    layout = fitting_layout(config, 32)
    assert (layout.mesh.shape["tensor"], make_decoding(layout).mesh.shape["tensor"]) == (2, 1)
    assert not capsys.readouterr().err
    config.model.num_layers = None
    with pytest.raises(ValueError, match="which model"):
        fitting_layout(config, 32)


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
