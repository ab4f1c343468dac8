"""The pretrained model that the configs name learns their tasks. Needs its folder, RPG_JAX_SMOLLM2=smollm2-135m."""

import os

import pytest

import rpg_jax

FOLDER = os.environ.get("RPG_JAX_SMOLLM2", "")
# config: the least and the largest score held out at the start, and the score to pass, which stands in the config too.
# A score has a standard error of about 0.06: 51 problems with one or four completions, or 46 with two.
TASKS = {"sums": (0.0, 0.2, 0.5), "stories": (0.2, 0.8, 0.45), "chain_sum": (0.2, 0.8, 0.45)}

pytestmark = [
    pytest.mark.soak,  # three to five minutes each on two CPU cores
    pytest.mark.skipif(not FOLDER, reason="RPG_JAX_SMOLLM2 names no folder of SmolLM2-135M-Instruct"),
]


@pytest.mark.parametrize("name", TASKS)
def test_smollm2_learns_the_task_of_its_config(name, tmp_path):
    if name == "chain_sum":
        pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    config = f"configs/smollm2_135m_{name}.py"
    result = rpg_jax.train(config, overrides={"model.path": FOLDER, "run.dir": str(tmp_path), "run.name": "r"})
    fewest, most, passed = TASKS[name]
    assert fewest <= result.metrics[0]["eval/accuracy"] <= most
    assert result.metrics[-1]["eval/accuracy"] >= passed
