"""On-policy distillation: a teacher of another family and width, from its folder to the metrics, over a resume."""

import dataclasses
import json
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data, models
from rpg_jax.runs.experiment import open_tokenizer
from rpg_jax.runs.layout import make_layout, reference_layout
from rpg_jax.runs.learner import check_tokenizer
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import resolve
from tests.end_to_end import micro, whole_runs
from tests.end_to_end.test_processes import assert_same_run, reserve_port, run

WIDER = models.DecoderConfig(
    vocab_size=1, num_layers=1, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, hidden_dim=96, qkv_bias=True,
    qk_norm=False, tie_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    config = resolve(micro.get_config())
    return open_tokenizer(config, Task.from_config(config), tmp_path_factory.mktemp("tokenizer"))


def random_teacher(folder, tokenizer, vocab_size):
    model = dataclasses.replace(WIDER, vocab_size=vocab_size)
    params = models.init(model, seed=1)[1]
    params["lm_head"] = params["lm_head"] * 3  # a peaked policy
    models.save(folder, model, params)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(tokenizer, tmp_path_factory):
    """A folder with random weights, whose vocabulary has eight entries that no token has."""
    return random_teacher(tmp_path_factory.mktemp("teacher"), tokenizer, tokenizer.vocab_size + 8)


@pytest.fixture(scope="module")
def teacher_of_own_size(tokenizer, tmp_path_factory):
    """Servers cut off no entries of the vocabulary."""
    return random_teacher(tmp_path_factory.mktemp("teacher"), tokenizer, tokenizer.vocab_size)


def trained(folder, teacher, steps, shared, **changes):
    """The metrics of each step, from a process with one device."""
    given = {
        "run.dir": folder, "run.name": "r", "warm_start.enabled": False, "rewards.parts": "exact:0",
        "optimizer.learning_rate": 1e-2, "optimizer.warmup": "0 updates", "train.steps": steps, "method": "OPD-EXACT",
        "reference.path": teacher, "evaluation.every": 8, "log.rollouts_every": 2,
    } | changes  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in given.items()]
    command = ["-m", "rpg_jax.train", f"--config={whole_runs.MICRO}", *flags]
    whole_runs.completed(command, whole_runs.environment(shared))
    lines = (folder / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_and_goes_on_after_a_resume(teacher, tmp_path, shared):
    straight = trained(tmp_path / "straight", teacher, 6, shared)
    kl = [step["kl_exact"] for step in straight]
    assert kl[0] > 1 and kl[-1] < 0.8 * kl[0]
    assert all(step["reward"] == 0 for step in straight)
    trained(tmp_path / "cut", teacher, 3, shared)
    resumed = trained(tmp_path / "cut", teacher, 6, shared)
    for name in ("kl_exact", "loss", "grad_norm"):
        assert resumed[-1][name] == straight[-1][name], name


@pytest.fixture(scope="module")
def address(teacher_of_own_size, shared):
    """Of a server of the teacher."""
    reserved, port = reserve_port()
    reserved.close()
    command = [
        sys.executable,
        "-m",
        "rpg_jax.serve",
        f"--model={teacher_of_own_size}",
        "--port=0",
        f"--http_port={port}",
    ]
    how = {"cwd": whole_runs.ROOT, "env": whole_runs.environment(shared), "text": True}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    line = server.stdout.readline()
    assert f"over HTTP on port {port}" in line, line + server.communicate(timeout=60)[0]
    threading.Thread(target=server.stdout.read, daemon=True).start()
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(60)


@pytest.mark.slow
def test_servers_of_a_teacher_teach_as_the_teacher_here(teacher_of_own_size, address, tmp_path, shared):
    """The first steps, in which rounding has not yet chosen other tokens."""
    here = trained(tmp_path / "here", teacher_of_own_size, 2, shared, method="OPD")
    there = trained(tmp_path / "there", address, 2, shared, method="OPD")
    for name in ("loss", "kl", "grad_norm"):
        np.testing.assert_allclose([s[name] for s in there], [s[name] for s in here], rtol=2e-4, atol=1e-6)
    assert here[0]["kl"] > 0.5


@pytest.mark.slow
def test_two_processes_ask_a_teachers_servers_for_their_shares_and_train_as_one(address, tmp_path):
    flags = {
        "warm_start.enabled": False, "train.steps": 2, "method": "OPD", "reference.path": address, "mesh.replica": 1,
        "mesh.fsdp": 2, "rollout.driver": "lockstep", "log.samples_per_step": 1000,
    }  # fmt: skip
    for processes in (1, 2):
        given = [f"--config.{name}={value}" for name, value in flags.items()]
        run(tmp_path, processes, *given, f"--config.run.name={processes}", devices=2)
    assert_same_run(tmp_path / "1", tmp_path / "2")


def test_another_tokenizer_is_refused_by_its_first_other_token(tokenizer, tmp_path):
    other = data.train_sentencepiece(["zyx", "0123456789+="], tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match="reference.path=T has another tokenizer .*: token [0-9]+ is '.' there and '"):
        check_tokenizer("T", other, tokenizer)
    check_tokenizer("T", tokenizer, tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "OPD"}, "method=OPD needs both: add --config.reference.path=FOLDER"),
        ({"reference.rule": "fixed", "reference.path": "T"}, "a teacher never moves; leave out reference.rule"),
        ({"loss.estimator": "exact", "reference.rule": "behaviour"}, "or reference.path"),
    ],
)
def test_what_a_teacher_does_not_go_with_is_refused(change, message):
    config = micro.get_config()
    config.update_from_flattened_dict(change)
    with pytest.raises(ValueError, match=message):
        resolve(config)


def test_a_teacher_is_cut_to_the_policys_vocabulary_and_must_have_all_of_it(teacher, tokenizer):
    config = micro.get_config()
    config.reference.path = str(teacher)
    layout = make_layout(resolve(config), tokenizer.vocab_size)
    own = reference_layout(layout)
    assert own.weights["embed"].shape == own.weights["lm_head"].shape == (tokenizer.vocab_size, 64)
    assert own.weights["embed"].dtype == jnp.float32 and own.model.qkv_bias and not layout.model.qkv_bias
    with pytest.raises(ValueError, match="has 26 entries in its vocabulary, and the policy has 27"):
        reference_layout(make_layout(resolve(config), tokenizer.vocab_size + 9))
    config.task.max_prompt_tokens = 1_048_576
    with pytest.raises(ValueError, match="has positions for"):
        reference_layout(make_layout(resolve(config), tokenizer.vocab_size))
