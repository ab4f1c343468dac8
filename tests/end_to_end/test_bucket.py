"""A run whose folder is in a bucket survives the loss of its machine."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.end_to_end.test_train import ROOT, checksum, command, environment, metrics, run
from tests.fake_gcs import bucket_of

SETTINGS = ("--config.train.steps=6", "--config.reference.every=3updates", "--config.run.name=r")


@pytest.mark.soak  # four processes
def test_a_run_in_a_bucket_whose_machine_is_lost_ends_as_one_on_disk_that_was_not(tmp_path):
    pytest.importorskip("gcsfs")
    straight = run(tmp_path, tmp_path / "straight", *SETTINGS)
    with bucket_of("bucket") as gcs:
        (machine := tmp_path / "machine").mkdir()
        bucket = ("gs://bucket/runs", *SETTINGS)
        where = {"TMPDIR": str(machine), "JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}
        env = environment(tmp_path) | gcs.environment | where
        first = subprocess.Popen(command(tmp_path, *bucket), cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
        while not any(name.startswith("runs/r/checkpoints/2/commit") for name in gcs.objects):
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait()
        shutil.rmtree(machine)
        machine.mkdir()
        assert {"config.json", "versions.json", "tokenizer.model", "metrics.jsonl", "samples.jsonl"} <= {
            name.removeprefix("runs/r/") for name in gcs.objects
        }
        assert any(name.startswith("cache/") for name in gcs.objects)
        assert any(name.startswith("runs/warm_starts/") for name in gcs.objects)

        second = subprocess.run(command(tmp_path, *bucket), cwd=ROOT, env=env, capture_output=True, text=True)
        assert second.returncode == 0, second.stdout + second.stderr
        assert "continuing gs://bucket/runs/r after step " in second.stdout and "summary: gs://" in second.stdout
        assert checksum(second) == checksum(straight)
        (copy := tmp_path / "copy").mkdir()
        (copy / "metrics.jsonl").write_bytes(gcs.objects["runs/r/metrics.jsonl"])
        assert metrics(copy) == metrics(tmp_path / "straight" / "r")
        assert {"curves.png", "summary.md"} <= {name.removeprefix("runs/r/") for name in gcs.objects}
        assert not any(machine.glob("rpg-jax-*")), "nothing is left on a machine after a run's end"

        for module, *flags in (("export", f"--out={tmp_path / 'exported'}"), ("evaluate", "--problems=4", "--k=2")):
            asked = [sys.executable, "-m", f"rpg_jax.{module}", "--run=gs://bucket/runs/r", *flags]
            done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "exported" / "config.json").exists()
        assert any(name.startswith("runs/r/evaluations/") and name.endswith("scores.md") for name in gcs.objects)
    assert not os.path.exists(ROOT / "gs:")
