"""A run's policy leaves as a folder that loads back bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import tiny
from rpg_jax import Policy, data, export, models
from rpg_jax.runs import resolve, run_folder
from rpg_jax.runs.experiment import open_experiment
from rpg_jax.runs.learner import init_params, make_learner
from rpg_jax.runs.problems import Task
from rpg_jax.storage.checkpoints import Checkpoints

ROOT = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with one checkpoint, of step 3, and its weights."""
    config = tiny.get_config()
    config.run.dir, config.run.name = str(tmp_path_factory.mktemp("runs")), "exported"
    for name, value in dict(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32).items():
        config.model[name] = value
    config = resolve.resolve(config)
    run_folder.open_run(config, folder := run_folder.of(config))
    run_dir = folder.files
    layout = open_experiment(config, run_dir).layout
    params = init_params(layout)
    weights = jax.tree.map(np.asarray, params)
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=1)
    checkpoints.save(3, make_learner(layout).create(params), {})
    checkpoints.close()
    return run_dir, layout.model, weights


def test_what_was_trained_is_what_loads(run, tmp_path):
    run_dir, model, weights = run
    policy = Policy.from_run(run_dir)
    policy.export(tmp_path / "out")
    assert policy.step == 3
    assert models.read_config(tmp_path / "out") == model
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "out", model), weights)
    own, again = policy.experiment.tokenizer, data.load_tokenizer(tmp_path / "out")
    assert again.encode("12+3=15") == own.encode("12+3=15") and again.stop_token_ids == own.stop_token_ids
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["eos_token_id"] is not None


def test_half_the_bytes_on_request(run, tmp_path):
    Policy.from_run(run[0]).export(tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"


def test_no_task_is_made(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Task, "from_config", None)
    Policy.from_run(run[0])


@pytest.mark.parametrize(
    "overrides, error",
    [
        ({"rollout.max_tokns": 3}, r"^no config field 'rollout\.max_tokns'; did you mean rollout\.max_tokens\?"),
        ({"rollout.max_tokens": "three"}, r"^rollout\.max_tokens='three' must be of the type int"),
    ],
)
def test_an_override_that_no_run_has_is_named(run, overrides, error):
    with pytest.raises(ValueError, match=error):
        Policy.from_run(run[0], overrides=overrides)


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("module", ["export", "evaluate"])
def test_a_bucket_to_write_to_is_one_line_with_the_fix(run, module, tmp_path):
    command = [sys.executable, "-m", f"rpg_jax.{module}", f"--run={run[0]}", "--out=gs://bucket/out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.returncode == 2 and not (tmp_path / "gs:").exists()
    assert done.stderr == (
        "error: 'gs://bucket/out' is no local folder: give one here, and copy it with gcloud storage cp -r\n"
    )


def test_a_missing_checkpoint_and_a_full_folder_are_refused(run, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"does not have the checkpoint of step 7; it keeps steps \[3\]"):
        Policy.from_run(run[0], step=7)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert export.main([f"--run={run[0]}", f"--out={tmp_path}"]) == 2
    assert "already holds files" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_of_a_model_and_the_next_try_succeeds(run, tmp_path, monkeypatch, capsys):
    out, write = tmp_path / "out", models.hf_saving.Saving.complete

    def full(self, folder):
        assert folder.name == ".out.partial" and any(folder.iterdir())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.hf_saving.Saving, "complete", full)
    assert export.main([f"--run={run[0]}", f"--out={out}"]) == 1
    assert capsys.readouterr().err == f"error: No space left on device: {out}\n" and not list(tmp_path.iterdir())
    monkeypatch.setattr(models.hf_saving.Saving, "complete", write)
    out.mkdir()
    assert export.main([f"--run={run[0]}", f"--out={out}"]) == 0
    assert (out / "config.json").stat().st_size > 100 and [p.name for p in tmp_path.iterdir()] == ["out"]


ANSWER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
found = []
for prompt in prompts:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=5)[0].tolist()
    prompt_ids = ids["input_ids"][0].tolist()
    found.append([prompt_ids, out[len(prompt_ids):], tokenizer.decode(out, skip_special_tokens=True)])
print(json.dumps(found))
"""


@pytest.mark.slow  # needs torch and transformers, here or under the Python that RPG_JAX_TRANSFORMERS_PYTHON names
def test_transformers_loads_the_folder_whole_and_answers_with_the_same_tokens(run, tmp_path):
    python = os.environ.get("RPG_JAX_TRANSFORMERS_PYTHON")
    if python is None:
        pytest.importorskip("torch", reason="needs torch and transformers")
        pytest.importorskip("transformers", reason="needs torch and transformers")
    address = os.environ.get("RPG_JAX_EXPORTED_RUN", run[0])
    policy = Policy.from_run(address)
    policy.export(tmp_path / "out")
    prompts = [f"{a}+{b}=" for a in (1, 7, 23, 48, 99) for b in (2, 30, 57)]
    command = [python or sys.executable, "-c", ANSWER, str(tmp_path / "out"), json.dumps(prompts)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = policy.sample(prompts, temperature=0, max_tokens=5)
    for prompt, ids, [sample], (their_ids, tokens, text) in zip(
        prompts, policy.encode(prompts), ours, theirs, strict=True
    ):
        assert their_ids == ids.tolist()
        assert tokens == sample.tokens.tolist() and text == prompt + sample.text
