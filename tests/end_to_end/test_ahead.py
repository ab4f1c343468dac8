"""Whole runs that sample ahead of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("swap", ["between", "midway"])
def test_a_policy_learns_from_batches_that_are_a_step_old(tmp_path, swap):
    command = [sys.executable, "-m", "rpg_jax.train", "--config=configs/tiny.py", f"--config.run.dir={tmp_path}"]
    command += [f"--config.warm_start.dir={tmp_path}/warm", "--config.run.name=ahead", "--config.train.steps=40"]
    command += ["--config.rollout.max_staleness=1", f"--config.rollout.swap={swap}"]
    plain = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/accuracy"] > lines[0]["eval/accuracy"] + 0.05
    ages = [line["staleness_updates_max"] for line in lines[2:]]
    assert max(ages) == 2  # the updates of one step
