"""Whole runs that sample ahead of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rpg_jax.losses import SAMPLER_CORRECTIONS, carried_ratio
from tests.end_to_end.test_apart import finished

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, *SAMPLER_CORRECTIONS])
def test_stale_tokens_keep_their_ratio_to_the_sampler_in_the_loss_or_in_the_correction(tmp_path, kind):
    """One update a step: w is 1 where π_old is the policy at the beginning of the step, and π_old/π_s is 1 where π_old
    is the sampler. The drift of a step is beyond `rollout.max_sampler_gap`, and no run ends by it."""
    changes = {"rollout.max_staleness": 1, "train.updates_per_step": 1}
    changes |= {"optimizer.learning_rate": 2e-3, "optimizer.warmup": "0 updates", "rollout.max_sampler_gap": 1e-3}
    changes |= {"loss.sampler_correction": kind} if kind else {}
    first, *stale = finished(tmp_path, "run", jax.devices()[:1], changes)[1][1:]
    assert len(stale) == 2 and all(r["grad_norm"] > 0 for r in (first, *stale))
    assert first["sampler_gap"] < 1e-5 and [r["staleness_updates_max"] for r in stale] == [1, 1]
    assert not any("sampler_gap" in r for r in stale)
    for r in stale:
        if carried_ratio(kind):
            assert r["log_ratio_max"] < 1e-4 and r["sampler_ess"] < 1 - 1e-5, r
        else:
            assert r["sampler_ess"] == pytest.approx(1, abs=1e-6) and r["log_ratio_max"] > 1e-2, r
        if kind == "geometric":
            assert r["sampler_rejected_fraction"] == 0


@pytest.mark.soak
def test_a_policy_learns_from_batches_that_are_a_step_old(tmp_path):
    command = [sys.executable, "-m", "rpg_jax.train", "--config=configs/tiny.py", f"--config.run.dir={tmp_path}"]
    command += [f"--config.warm_start.dir={tmp_path}/warm", "--config.run.name=ahead", "--config.train.steps=40"]
    command += ["--config.rollout.max_staleness=1"]
    plain = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [
        json.loads(line) for line in (tmp_path / "ahead" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.05
    ages = [line["staleness_updates_max"] for line in lines[2:]]
    assert max(ages) == 2  # the updates of one step
