"""The load of experts and the agreement of sampler and trainer, against sets and counts by hand and in a whole run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from configs import reasoning
from rpg_jax import models
from rpg_jax.models import DecoderConfig, Experts, Rope
from rpg_jax.runs.reinforcement import make_routing
from rpg_jax.training.routing import Routing, agreement, expert_load, load_metrics
from tests.end_to_end.whole_runs import ROOT, environment


def test_the_load_counts_each_trained_token_at_each_of_its_experts():
    draw = np.random.default_rng(0)
    experts = np.stack([draw.permutation(5)[:2] for _ in range(2 * 4 * 3)]).reshape(2, 4, 3, 2).astype(np.uint8)
    mask = draw.integers(0, 2, (2, 4)).astype(np.float32)
    expected = np.zeros((3, 5), int)
    for b, c in np.argwhere(mask):
        for layer in range(3):
            for expert in experts[b, c, layer]:
                expected[layer, expert] += 1
    np.testing.assert_array_equal(expert_load(jnp.asarray(experts), jnp.asarray(mask), count=5), expected)


def test_the_violation_is_the_excess_of_the_fullest_expert_and_the_variation_that_of_all():
    found = load_metrics(np.array([[4, 4, 4, 4], [0, 0, 8, 8]]))
    assert found == {
        "expert_load/max_violation": 0.5,  # of the layers' 0 and 8 / 4 - 1
        "expert_load/max_violation_worst": 1.0,
        "expert_load/cv": 0.5,  # of the layers' 0 and 4 / 4
    }


def test_agreement_compares_sets_of_experts_and_splits_the_gap_by_tokens():
    sampler = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 1], [2, 3]]], np.uint8)
    trainer = np.array([[[1, 0], [3, 2]], [[0, 2], [2, 4]], [[1, 4], [3, 2]]], np.uint8)
    found = agreement(sampler, trainer, np.array([0.1, 0.5, 0.3]))
    assert found == pytest.approx(
        {
            "routing/pairs_differing": 2 / 6,
            "routing/tokens_differing": 1 / 3,
            "routing/gap_differing": 0.5,
            "routing/gap_same": 0.2,
        }
    )
    assert "routing/gap_differing" not in agreement(sampler, sampler, np.zeros(3))


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


def trained(shared, mixture, out, **changes):
    """A process that has run three steps of random completions, which differ in their lengths; metrics by step."""
    fields = {
        "model.path": mixture, "model.compute_dtype": "bfloat16", "method": "GRPO", "rollout.slots": 16,
        "rollout.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_tokens": 32, "rollout.max_sampler_gap": 1,
        "rewards.overlong_shaping": True, "rewards.overlong_buffer": 16, "dynamic_sampling.enabled": False,
        "train.steps": 3, "train.updates_per_step": 2, "train.microbatch_size": 8, "train.packed_length": 66,
        "evaluation.every": 9, "evaluation.problems": 2, "evaluation.drift": False, "log.rollouts_every": 2,
        "run.dir": out, "run.name": "r", **changes,
    }  # fmt: skip
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "rpg_jax.train", "--config=configs/reasoning.py", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(shared), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = (out / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if done.returncode == 0 else []
    return done, [json.loads(line) for line in lines][1:]


@pytest.mark.slow  # a run
def test_a_run_in_bfloat16_logs_the_load_and_the_experts_that_sampler_and_trainer_choose_differently(
    shared, mixture, tmp_path
):
    done, records = trained(shared, mixture, tmp_path)
    assert done.returncode == 0, done.stdout
    assert ["routing/replay_gap" in record for record in records] == [True, True, False], "step 1 and every second"
    for record in records:
        # Four of 16 experts serve a token: the fullest has at most all tokens, four times the mean.
        assert 0 < record["expert_load/max_violation"] <= record["expert_load/max_violation_worst"] <= 3
        assert 0 < record["expert_load/cv"] < 3**0.5, "a quarter of the experts has all tokens"
    for record in records[:2]:
        # The replay repeats the sampler's own numbers; another program that rounds once to bfloat16 is 4e-3 off.
        assert record["routing/replay_gap"] < 1e-5
        assert 0 < record["routing/pairs_differing"] < record["routing/tokens_differing"] < 0.5
        assert record["routing/gap_differing"] > 2 * record["routing/gap_same"] > 0, "other experts cost more"


@pytest.mark.parametrize(
    ("changes", "experts", "engine"),
    [
        ({"rollout.driver": "servers"}, 8, False),
        ({"rollout.max_staleness": 1}, 8, True),
        ({"log.rollouts_every": 0}, 8, True),
        ({}, None, True),
    ],
)
def test_experts_are_compared_only_where_this_process_samples_with_the_present_weights(changes, experts, engine):
    config = reasoning.get_config()
    config.update_from_flattened_dict(changes)
    model = SimpleNamespace(experts=experts and Experts(experts, 2, 16))
    experiment = SimpleNamespace(config=config, layout=SimpleNamespace(model=model))
    own = SimpleNamespace(engine=object() if engine else None)
    assert make_routing(experiment, own) == (experts and Routing(experts))
