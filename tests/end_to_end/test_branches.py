"""A run that begins where another run stood (`run.start_from`) takes over all that a resume takes over."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax.report.run_files import INPUTS, PARENT, START, Run
from rpg_jax.runs import checkpointing, config_files, run_folder

MICRO = "tests/end_to_end/micro.py"
CLOCKED = ("time/", "host/", "seconds", "tokens_per_second", "eval/")


def trained(folder, name, **overrides):
    config = {
        "run.dir": str(folder), "run.name": name, "warm_start.enabled": False, "dynamic_sampling.enabled": False,
        "rewards.parts": "length", "rewards.accuracy": "exact", "optimizer.warmup": "0 updates", "train.steps": 4,
        "checkpoint.every": 1, "checkpoint.keep": 4, "evaluation.every": 4, "log.rollouts_every": 0, **overrides,
    }  # fmt: skip
    return rpg_jax.train(MICRO, overrides=config)


def numbers(run):
    """{step: metrics that no clock measured}, of the steps that trained."""
    return {
        r["step"]: {k: v for k, v in r.items() if not k.startswith(CLOCKED)} for r in run.metrics if "grad_norm" in r
    }


def assert_same_weights(one, other):
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("parents"), "p", **{"reference.rule": "fixed"})


def test_a_branch_with_an_equal_config_repeats_its_parent_to_the_bit(parent, tmp_path):
    branch = trained(tmp_path, "b", **{"reference.rule": "fixed", "run.start_from": f"{parent.folder}@2"})
    assert list(numbers(branch)) == [3, 4]
    assert all(numbers(parent)[step] == found for step, found in numbers(branch).items())
    assert_same_weights(parent, branch)
    assert [r["step"] for r in branch.metrics] == [2, 3, 4], "one row a step"
    begun = branch.metrics[0]
    assert begun["step"] == 2 and "eval/accuracy" in begun and "reward" not in begun, "its start is evaluated"
    inputs = json.loads((tmp_path / "b" / INPUTS).read_text(encoding="utf-8"))
    assert inputs[PARENT] == f"{parent.folder}@2" and len(inputs[START]) == 16
    assert f"{parent.folder}@2" in (tmp_path / "b/summary.md").read_text(encoding="utf-8")
    assert [r["step"] for r in Run.read(tmp_path / "b").trained] == [3, 4]


def test_every_process_begins_with_the_checkpoint_that_the_first_chose(parent, tmp_path, monkeypatch):
    """The parent may have gone on, and a bucket's inputs.json is read by the first process alone."""
    config = run_folder.read_config(Path(parent.folder))
    config = config_files.changed(config, {"run.start_from": parent.folder})
    assert checkpointing.parent_of(config, tmp_path).step == 4
    monkeypatch.setattr(checkpointing.hosts, "all_gather_bytes", lambda own: [b"2" if own.isdigit() else own])
    assert checkpointing.parent_of(config, tmp_path).step == 2


@pytest.mark.slow  # compiles, or waits, for seconds
def test_a_branch_that_is_stopped_continues_to_the_same_bits_without_its_parent(parent, tmp_path):
    change = {"method": "GRPO", "optimizer.learning_rate": 1e-3, "rollout.group_size": 2, "seed": 5}
    straight = trained(tmp_path, "straight", **change, **{"run.start_from": f"{parent.folder}@2", "train.steps": 5})
    begun = trained(tmp_path, "b", **change, **{"run.start_from": f"{parent.folder}@2", "train.steps": 3})
    assert [*numbers(begun)] == [3]
    with pytest.raises(ValueError, match=r"run.start_from was '.*@2', now '.*@1'"):
        trained(tmp_path, "b", **change, **{"run.start_from": f"{parent.folder}@1", "train.steps": 5})
    there, away = parent.folder, f"{parent.folder}-away"
    Path(there).rename(away)
    try:
        resumed = trained(tmp_path, "b", **change, **{"run.start_from": f"{there}@2", "train.steps": 5})
    finally:
        Path(away).rename(there)
    assert numbers(resumed) == numbers(straight) and [*numbers(resumed)] == [3, 4, 5]
    assert_same_weights(resumed, straight)


def test_what_a_branch_begins_anew_is_said(parent, tmp_path, capsys):
    change = {"seed": 1, "reference.rule": "kl", "evaluation.drift": True}
    branch = trained(tmp_path, "b", **change, **{"run.start_from": parent.folder, "train.steps": 5})
    said = capsys.readouterr().out
    assert f"begins after step 4 of {parent.folder}; anew: the order of the problems" in said
    assert "the reference, because fields of reference differ" in said
    assert Run.read(tmp_path / "b").trained[0]["reference_update"] == 8, "two updates a step: the policy after step 4"
    drift = [row["eval/held out/initial_kl"] for row in branch.metrics]
    assert abs(drift[0]) < 1e-4 < abs(drift[1]), "measured from the policy with which the branch begins"


@pytest.mark.slow  # compiles, or waits, for seconds
@pytest.mark.parametrize(
    "drawn", [{"rollout.max_staleness": 1, "rollout.devices": 4}, {"rollout.partial_tokens": 2}], ids=["ahead", "parts"]
)
def test_a_branch_of_another_config_says_that_completions_drawn_before_are_left_out(tmp_path, capsys, drawn):
    parent = trained(tmp_path, "p", **drawn, **{"train.steps": 2})
    branch = {"run.start_from": f"{parent.folder}@1", "train.steps": 2}
    trained(tmp_path, "equal", **drawn, **branch)
    assert "anew" not in capsys.readouterr().out
    trained(tmp_path, "other", **drawn, **branch, **{"optimizer.learning_rate": 1e-5})
    assert "; anew: the completions that no step had trained yet, because fields differ\n" in capsys.readouterr().out


@pytest.mark.slow  # three runs with a compiled adapter each
def test_a_branch_of_adapters_keeps_the_frozen_weights_of_its_parent(tmp_path):
    adapters = {"model.lora.rank": 2, "optimizer.learning_rate": 3e-3}
    parent = trained(tmp_path, "p", **adapters, **{"train.steps": 2})
    equal = trained(tmp_path, "e", **adapters, **{"train.steps": 3, "run.start_from": f"{parent.folder}@1"})
    other = {"warm_start.seed": 7}  # of random weights: they would be others
    branch = trained(tmp_path, "b", **adapters, **other, **{"train.steps": 3, "run.start_from": f"{parent.folder}@1"})
    assert numbers(equal)[2] == numbers(parent)[2]
    assert_same_weights(branch, equal)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train.steps": 4}, r"set train.steps=8 for 4 steps more"),
        ({"optimizer.name": "lion"}, "optimizer.name is 'adamw' there and 'lion' here. To begin with the weights"),
        ({"model.lora.rank": 2}, "model.lora.rank is 0 there and 2 here"),
        ({"model.num_layers": 3}, "the shapes of the model are another there"),
        ({"method": "PPO"}, "loss.advantage is .* there and 'gae' here"),
        (
            {"train.updates_per_step": 1, "optimizer.schedule": "linear"},
            "its 4 steps made 8 updates, and a step has 1 here.*decay_until in updates",
        ),
        ({"train.epochs": 2, "optimizer.warmup": "5 steps"}, "its 4 steps made 8 updates, and a step has 4 here"),
    ],
)
def test_a_branch_that_cannot_take_over_its_parent_is_refused_by_name(parent, tmp_path, change, said):
    with pytest.raises(ValueError, match=said):
        trained(tmp_path, "b", **{"run.start_from": f"{parent.folder}@4", "train.steps": 8, **change})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"optimizer.warmup": "4 steps"}, False),
        ({"optimizer.warmup": "9 updates"}, False),
        ({"optimizer.warmup": "5 steps"}, True),
        ({"optimizer.warmup": "4 steps", "train.updates_per_step": 4}, True),  # 8 updates are 2 of its steps
        ({"optimizer.schedule": "cosine", "optimizer.decay_until": "12 updates"}, False),
        ({"optimizer.schedule": "cosine", "optimizer.decay_until": "12 steps"}, True),
        ({"optimizer.schedule": "cosine", "optimizer.decay_until": "12 steps", "train.updates_per_step": 2}, False),
        ({"optimizer.schedule": "cosine", "optimizer.decay_until": "12 updates", "optimizer.warmup": "1 step"}, True),
    ],
)
def test_other_updates_in_a_step_need_a_schedule_that_does_not_count_steps(parent, tmp_path, change, refused):
    config = run_folder.read_config(Path(parent.folder))
    begun = checkpointing.parent_of(config_files.changed(config, {"run.start_from": f"{parent.folder}@4"}), tmp_path)
    branch = config_files.changed(config, {"train.steps": 8, "train.updates_per_step": 1, **change})
    with pytest.raises(ValueError, match="in updates") if refused else contextlib.nullcontext():
        begun.check(branch, {})


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_a_branch_of_a_branch_counts_the_updates_of_all_its_steps(parent, tmp_path, schedule):
    """Three of its four steps made one update each, and one made two: the count of updates is that of step 2.5."""
    config = run_folder.read_config(Path(parent.folder))
    begun = checkpointing.parent_of(config_files.changed(config, {"run.start_from": f"{parent.folder}@4"}), tmp_path)
    record = {**begun.record, "reference": {**begun.record["reference"], "updates": 5}}
    begun = dataclasses.replace(begun, record=record, inputs={**begun.inputs, PARENT: "runs/A@3"})
    branch = config_files.changed(config, {"train.steps": 8, "optimizer.schedule": schedule})
    with pytest.raises(ValueError, match="made 5 updates") if schedule == "linear" else contextlib.nullcontext():
        begun.check(branch, {})


def test_a_branch_of_schedule_free_needs_the_b1_of_its_parent(parent, tmp_path):
    """Its average is computed with b1 from weights and slots, which the parent made with its own b1."""
    config = config_files.changed(
        run_folder.read_config(Path(parent.folder)), {"optimizer.name": "schedule_free_adamw"}
    )
    begun = checkpointing.parent_of(config_files.changed(config, {"run.start_from": f"{parent.folder}@4"}), tmp_path)
    begun = dataclasses.replace(begun, config=run_folder.flat_fields(config))
    with pytest.raises(ValueError, match="optimizer.b1 is 0.9 there and 0.5 here"):
        begun.check(config_files.changed(config, {"train.steps": 8, "optimizer.b1": 0.5}), {})
    begun.check(config_files.changed(config, {"train.steps": 8}), {})


def test_a_parent_that_is_not_there_is_refused_with_what_there_is(parent, tmp_path):
    with pytest.raises(ValueError, match=r"does not have the checkpoint of step 9; it keeps steps \[1, 2, 3, 4\]"):
        trained(tmp_path, "b", **{"run.start_from": f"{parent.folder}@9"})
    with pytest.raises(ValueError, match="is not a run folder"):
        trained(tmp_path, "b", **{"run.start_from": str(tmp_path / "none")})


def test_nothing_that_a_parents_config_names_is_imported(parent, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    shutil.copytree(parent.folder, tmp_path / "p")
    config = json.loads((tmp_path / "p/config.json").read_text(encoding="utf-8"))
    config["rewards"]["parts"], config["loss"]["name"] = "theirs:reward", "theirs:loss"
    (tmp_path / "p/config.json").write_text(json.dumps(config), encoding="utf-8")
    trained(tmp_path, "b", **{"run.start_from": str(tmp_path / "p"), "train.steps": 5})


def test_a_run_that_begins_once_more_begins_from_the_step_that_it_noted(parent, tmp_path):
    (tmp_path / INPUTS).write_text(json.dumps({PARENT: f"{parent.folder}@3"}), encoding="utf-8")
    config = rpg_jax.runs.config_files.changed(
        rpg_jax.runs.config_files.load(MICRO).config, {"run.start_from": parent.folder}
    )
    assert checkpointing.parent_of(config, tmp_path).step == 3
    assert checkpointing.parent_of(config, tmp_path / "new").step == 4
