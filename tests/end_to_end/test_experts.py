"""Runs of a mixture of experts: the load of its experts, and training with those that the sampler chose."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from configs import reasoning
from rpg_jax import models
from rpg_jax.models import DecoderConfig, Experts, Rope
from rpg_jax.runs.reinforcement import make_training_rollout
from tests.end_to_end.whole_runs import ROOT, environment


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with random weights of two layers of 16 experts, of which four serve a token, and a tokenizer."""
    folder, start = tmp_path_factory.mktemp("mixture"), ROOT / "configs" / "chains_start"
    config = DecoderConfig(
        vocab_size=47, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, hidden_dim=64,
        rope=Rope(100.0), tie_embeddings=True, experts=Experts(16, 4, 32),
    )  # fmt: skip
    ids = {
        name: json.loads((start / "config.json").read_text(encoding="utf-8"))[name]
        for name in ("eos_token_id", "pad_token_id")
    }
    models.save(folder, config, models.init(config, seed=1)[1], dtype=jnp.float32, fields=ids)
    for file in start.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def trained(shared, mixture, out, devices=1, **changes):
    """A process that has run three steps of random completions, which differ in their lengths; metrics by step."""
    fields = {
        "model.path": mixture, "model.compute_dtype": "bfloat16", "method": "GRPO", "rollout.slots": 16,
        "rollout.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_tokens": 32, "rollout.max_sampler_gap": 1,
        "rewards.overlong_shaping": True, "rewards.overlong_buffer": 16, "dynamic_sampling.enabled": False,
        "train.steps": 3, "train.updates_per_step": 2, "train.microbatch_size": 8, "train.packed_length": 66,
        "evaluation.every": 9, "evaluation.problems": 2, "evaluation.drift": False,
        "run.dir": out, "run.name": "r", **changes,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "rpg_jax.train", "--config=configs/reasoning.py", *flags]
    env, pipes = environment(shared, devices=devices), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, **pipes)
    lines = (out / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if done.returncode == 0 else []
    return done, [json.loads(line) for line in lines][1:]


@pytest.mark.slow  # a run
def test_a_run_of_a_mixture_logs_the_load_of_its_experts(shared, mixture, tmp_path):
    done, records = trained(shared, mixture, tmp_path)
    assert done.returncode == 0, done.stdout
    for record in records:
        # Four of 16 experts serve a token: the fullest has at most all tokens, four times the mean.
        assert 0 < record["expert_load/max_violation"] <= record["expert_load/max_violation_worst"] <= 3
        assert 0 < record["expert_load/cv"] < 3**0.5, "a quarter of the experts has all tokens"


@pytest.mark.slow  # two runs each
@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (4, {"mesh.fsdp": 2, "mesh.expert": 2, "rollout.slots": 4, "rollout.driver": "lockstep"}),
        (1, {"rollout.max_staleness": 1, "loss.sampler_correction": "truncate"}),
    ],
    ids=["mesh", "ahead"],
)
def test_a_run_that_replays_experts_trains_with_those_of_the_sampler_and_resumes_to_the_same_bits(
    shared, mixture, tmp_path, devices, changes
):
    own = {"model.replay_experts": True, "checkpoint.every": 1, **changes}
    done, straight = trained(shared, mixture, tmp_path, devices, **own)
    assert done.returncode == 0, done.stdout
    for record in straight[: 1 if "rollout.max_staleness" in changes else 3]:
        # A token that goes to other experts is up to 0.5 nats off; rounding alone is not 0.1.
        assert 0 < record["sampler_gap"] < 0.01 and record["sampler_gap_max"] < 0.1
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "3")
    again, resumed = trained(shared, mixture, tmp_path, devices, **own)
    assert again.returncode == 0 and "after step 2" in again.stdout, again.stdout
    clocked = ("time/", "host/", "seconds", "tokens_per_second", "eval/")
    last = [{k: v for k, v in records[-1].items() if not k.startswith(clocked)} for records in (straight, resumed)]
    assert last[0] == last[1] and last[0]["step"] == 3
    checksums = [re.search(r"weights checksum: (\w+)", one.stdout)[1] for one in (done, again)]
    assert checksums[0] == checksums[1]


@pytest.mark.parametrize(
    ("changes", "has_experts", "said"),
    [
        ({}, False, "the model has no experts"),
        (
            {"rollout.driver": "servers"},
            True,
            "rollout.driver=servers samples on servers, whose replies have no experts",
        ),
        ({"environment.name": "a:B"}, True, "the experts of what environment.name=a:B writes are not recorded"),
    ],
)
def test_experts_that_nothing_records_cannot_be_replayed(changes, has_experts, said):
    config = reasoning.get_config()
    config.update_from_flattened_dict({"model.replay_experts": True, **changes})
    layout = SimpleNamespace(model=SimpleNamespace(experts=Experts(8, 2, 16) if has_experts else None))
    with pytest.raises(ValueError, match=f"model.replay_experts=True: {said}; leave it False"):
        make_training_rollout(SimpleNamespace(config=config, layout=layout), None)
