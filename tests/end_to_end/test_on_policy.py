"""Steps of one update, without a pass before the update, and with prompts that completions share: the same run."""

import numpy as np
import pytest

import rpg_jax
from rpg_jax.runs import reinforcement

SHARED_PROMPTS = {"train.packed_length": 30, "train.microbatch_size": 8}


def trained(folder, **overrides):
    config = {
        "run.dir": str(folder), "run.name": "r", "warm_start.enabled": False, "dynamic_sampling.enabled": False,
        "rewards.parts": "length", "rewards.accuracy": "exact", "optimizer.warmup": "0 updates",
        "train.steps": 3, "train.updates_per_step": 1, "evaluation.every": 3, "log.rollouts_every": 2,
        "reference.every": "1 step", **overrides,
    }  # fmt: skip
    return rpg_jax.train("tests/end_to_end/micro.py", overrides=config)


@pytest.mark.slow  # four runs of three steps; tests/training/test_second_steps.py has other methods and rows
@pytest.mark.parametrize(("method", "rows"), [("RPG-REINFORCE-URKL", SHARED_PROMPTS), ("GRPO", {})])
def test_a_step_of_one_update_needs_no_pass_before_the_update(method, rows, tmp_path, monkeypatch):
    passes = []
    monkeypatch.setattr(
        "rpg_jax.training.loop.Algorithm.logprobs",
        lambda self, params, rows: (passes.append(params), self.programs.logprobs(params, rows))[1],
    )
    on_policy = trained(tmp_path / "on", method=method, **rows)
    few = len(passes)
    monkeypatch.setattr(reinforcement, "is_on_policy", lambda layout: False)
    before = trained(tmp_path / "before", method=method)
    assert few < len(passes) - few, "steps that record rollouts pass, and a reference that is another policy"
    for now, then in zip(on_policy.metrics[1:], before.metrics[1:], strict=True):
        for name in ("loss", "entropy", "kl", "grad_norm", "sampler_ratio", "reward"):
            assert now[name] == pytest.approx(then[name], rel=2e-3, abs=2e-6), name  # f32, after up to three updates
        assert now["sampler_gap"] < 1e-5 and now["sampler_gap_max"] < 1e-4
    files = [sorted(path.name for path in (tmp_path / name / "r/rollouts").iterdir()) for name in ("on", "before")]
    assert files[0] == files[1] == ["000001.npz", "000002.npz"]
    read = [np.load(tmp_path / name / "r/rollouts/000002.npz")["tokens"] for name in ("on", "before")]
    np.testing.assert_allclose(*read, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_step_without_a_pass_before_it_publishes_no_weights_of_a_sampler_that_is_not_the_policy(
    tmp_path, monkeypatch
):
    published = []
    monkeypatch.setattr(
        "rpg_jax.training.collect.Collector.publish", lambda self, params, version: published.append(version)
    )
    with pytest.raises(RuntimeError, match="sampler and trainer disagree"):
        trained(tmp_path, **{"rollout.max_sampler_gap": 1e-12, "log.rollouts_every": 0})
    assert not published
