"""Whole runs that sample on devices of their own, against runs whose devices do both."""

import contextlib
import json
import shutil

import jax
import pytest

from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import run_folder
from rpg_jax.runs.experiment import Experiment, open_tokenizer
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.problems import Task
from rpg_jax.runs.reinforcement import make_trainer
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.session import Session
from tests.end_to_end import micro

FOUR = {"rollout.devices": 4, "rollout.tensor": 2}


def finished(runs, name, devices, changes):
    """(weights checksum, unclocked metrics) of a run of three steps on `devices`; where each half of it was is
    checked on the way."""
    config = micro.get_config()
    config.run.dir, config.run.name = str(runs), name
    config.update_from_flattened_dict(
        {
            "method": "GRPO",
            "model.num_layers": 1,
            "model.num_kv_heads": 2,
            "warm_start.enabled": False,
            "rewards.overlong_shaping": True,  # random weights differ in nothing but lengths
            "rewards.overlong_buffer": 5,
            "evaluation.problems": 8,
            "checkpoint.every": 1,
            "train.steps": 3,
            **changes,
        }
    )
    config = resolve(config)
    with run_folder.of(config) as folder:
        run_folder.open_run(config, folder)
        task = Task.from_config(config)
        tokenizer = open_tokenizer(config, task, folder.files)
        task = task.encoded(tokenizer, config)
        experiment = Experiment(make_layout(config, tokenizer.vocab_size, devices), tokenizer, task)
        with experiment.layout.activate(), contextlib.ExitStack() as closing:
            session = Session(experiment, folder, closing, journaled=True)
            session.begin(*make_trainer(experiment, session))
            assert session.to_the_end() == 0
            k, rollout = config.rollout.devices, session.trainer.algorithm.collector.rollout
            assert where(session.now.state) == set(devices[: len(devices) - k])
            with rollout.weights.pinned() as held:
                assert where((held, rollout.engine.init_decode_state())) == set(devices[-k:])
    records = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clocked = ("time/", "host/", "seconds", "tokens_per_second")
    unclocked = [{k: v for k, v in r.items() if not k.startswith(clocked)} for r in records]
    return weights_checksum(session.now.state), unclocked


def where(tree):
    return set().union(*(x.sharding.device_set for x in jax.tree.leaves(tree)))


def resumed(runs, name, *arguments):
    """The run of that name again, from its first checkpoint."""
    shutil.copytree(runs / name, runs / f"{name}-resumed")
    for step in (2, 3):
        shutil.rmtree(runs / f"{name}-resumed" / "checkpoints" / str(step))
    return finished(runs, f"{name}-resumed", *arguments)


@pytest.mark.slow
def test_stale_batches_from_devices_of_their_own_are_those_of_one_device(tmp_path):
    stale = {"rollout.max_staleness": 1}
    apart = finished(tmp_path, "apart", jax.devices()[:2], {**stale, "rollout.devices": 1})
    together = finished(tmp_path, "together", jax.devices()[:1], stale)
    assert apart == together
    assert [r["staleness_updates_max"] for r in apart[1][1:]] == [0, 2, 2]


@pytest.mark.slow
def test_by_turns_on_two_meshes_is_by_turns_on_one(tmp_path):
    assert finished(tmp_path, "apart", jax.devices(), FOUR) == finished(
        tmp_path, "together", jax.devices()[:4], {"rollout.tensor": 2}
    )


@pytest.mark.slow
def test_two_meshes_at_once_resume_to_the_same_bits(tmp_path):
    arguments = jax.devices(), {**FOUR, "rollout.max_staleness": 1}
    straight = finished(tmp_path, "straight", *arguments)
    assert resumed(tmp_path, "straight", *arguments) == straight
    assert straight[1][-1]["grad_norm"] > 0
