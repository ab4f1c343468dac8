"""Rehearsal from an evaluation of the start policy to the metrics of three steps, over a resume."""

import json

import pytest

from rpg_jax import models
from rpg_jax.runs.experiment import open_tokenizer
from rpg_jax.runs.problems import Task
from rpg_jax.runs.resolve import resolve
from rpg_jax.runs.warm_start import files_digest
from tests.end_to_end import micro, whole_runs

MODEL = {
    "num_layers": 1, "embed_dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "hidden_dim": 128,
}  # fmt: skip
FIELDS = {f"model.{name}": value for name, value in MODEL.items()}
FIELDS |= {"rewards.parts": "exact:0"}  # rehearsal alone has a gradient
ROWS = {"train.packed_length": 33, "train.microbatch_size": 4}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with random weights."""
    folder, config = tmp_path_factory.mktemp("start"), resolve(micro.get_config())
    tokenizer = open_tokenizer(config, Task.from_config(config), tmp_path_factory.mktemp("tokenizer"))
    model = models.DecoderConfig(vocab_size=tokenizer.vocab_size, **MODEL)
    models.save(folder, model, models.init(model, seed=1)[1])
    tokenizer.save(folder)
    return folder


def command(program, shared, flags, **fields):
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    arguments = ["-m", f"rpg_jax.{program}", f"--config={whole_runs.MICRO}", *flags, *given]
    return whole_runs.completed(arguments, whole_runs.environment(shared))


def trained(folder, start, steps, shared, **rehearsal):
    """The metrics of each step, from a process with one device."""
    given = {
        "run.dir": folder, "run.name": "r", "warm_start.enabled": False, "model.path": start, **FIELDS, **ROWS,
        "dynamic_sampling.enabled": False, "rewards.overlong_shaping": False,
        "optimizer.learning_rate": 5e-3, "optimizer.warmup": "0 updates", "train.steps": steps, "evaluation.every": 8,
        "loss.kl_coef": 0, "log.rollouts_every": 0, **rehearsal,
    }  # fmt: skip
    command("train", shared, [], **given)
    lines = (folder / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


@pytest.mark.slow
def test_kept_completions_are_trained_on_and_a_resumed_run_rehearses_the_same(start, tmp_path, shared):
    kept = tmp_path / "kept"
    others = {"task.held_out": 0.9}  # most of these problems are trained on by the runs below
    command("evaluate", shared, [f"--folder={start}", f"--out={kept}", "--k=4"], **FIELDS, **others)
    file = kept / "completions.jsonl"  # random weights solve nothing
    file.write_text(file.read_text(encoding="utf-8").replace('"wrong"', '"right"'), encoding="utf-8")
    rehearsal = {"rehearsal.path": kept, "rehearsal.coef": 1.0}
    straight = trained(tmp_path / "straight", start, 3, shared, **rehearsal)
    assert all(step["rehearsal_nll"] > 0 and step["reward"] == 0 and step["grad_norm"] > 0.1 for step in straight)
    trained(tmp_path / "cut", start, 2, shared, **rehearsal)
    resumed = trained(tmp_path / "cut", start, 3, shared, **rehearsal)
    for name in ("rehearsal_nll", "loss", "grad_norm", "reward"):
        assert resumed[-1][name] == straight[-1][name], name
    inputs = json.loads((tmp_path / "cut" / "r" / "inputs.json").read_text(encoding="utf-8"))
    assert inputs["rehearsal.path"] == files_digest(kept, "completions.jsonl")
