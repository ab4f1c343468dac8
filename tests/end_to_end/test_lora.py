"""A run of adapters: interrupted and continued to the bit, one base, small checkpoints, and exports of both kinds."""

import re

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax import Policy
from rpg_jax.export import export_adapters
from rpg_jax.models.lora import load_adapters, merged
from rpg_jax.runs import reinforcement, run_folder
from rpg_jax.runs.learner import init_params, open_base
from rpg_jax.runs.policy import of_run
from tests.end_to_end.test_resume import metrics, rollouts
from tests.end_to_end.whole_runs import completed, environment


def test_an_adapter_that_is_missing_ends_the_run_before_its_warm_start(tmp_path, monkeypatch):
    monkeypatch.setattr(reinforcement, "drawn_base", lambda *_: pytest.fail("the warm start has begun"))
    adapter = {"model.lora.rank": 2, "model.lora.path": str(tmp_path), "run.dir": str(tmp_path / "runs")}
    with pytest.raises(ValueError, match=r"has no adapter_config.json: model.lora.path is the folder of an adapter"):
        rpg_jax.train("tests/end_to_end/micro.py", overrides=adapter)


@pytest.mark.slow  # a warm start and two runs
def test_a_run_of_adapters_resumes_to_the_same_bits_and_leaves_as_an_adapter_and_as_weights(warm, tmp_path):
    arguments = "-m", "tests.end_to_end.every_variant", tmp_path, warm / "warm_starts", "lora"
    done = completed(arguments, environment(warm))
    assert len(set(re.findall(r"weights checksum: (\w+)", done.stdout))) == 1
    straight, resumed = tmp_path / "lora-straight", tmp_path / "lora-resumed"
    assert metrics(straight) == metrics(resumed) and rollouts(straight) == rollouts(resumed)
    assert all(r["grad_norm"] > 0 and r["sampler_gap"] < 1e-4 for r in metrics(straight)[1:])
    size = {name: sum(f.stat().st_size for f in (straight / name).rglob("*")) for name in ("base", "checkpoints/3")}
    assert size["checkpoints/3"] < size["base"]

    assert export_adapters(str(straight), str(tmp_path / "adapter")) == 3
    policy = Policy.from_run(straight)
    with run_folder.opened(str(straight)) as folder:
        trained = of_run(folder, merge=False)
        layout = trained.experiment.layout
        base = open_base(layout, folder, init_params, begins=False)
    adapters = load_adapters(tmp_path / "adapter", layout.model, layout.lora)
    jax.tree.map(np.testing.assert_array_equal, adapters, trained.params)
    assert all(float(abs(x).max()) > 0 for x in jax.tree.leaves(adapters))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), merged(base.policy(trained.params)), policy.params
    )
