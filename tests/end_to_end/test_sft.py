"""Own rows with demonstrations: supervised training, killed and continued, its export, and RL that begins there."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MICRO = Path(__file__).with_name("micro.py")


def rows(path, count, seed):
    random.seed(seed)
    words = dict.fromkeys("".join(random.choices("abcd", k=4)) for _ in range(count))
    rows = [
        {"question": word, "answer": "".join(sorted(word)), "demonstration": "".join(sorted(word))} for word in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path, popen):
    train, held_out = rows(tmp_path / "t.jsonl", 120, 0), rows(tmp_path / "h.jsonl", 20, 1)
    fields = {
        "task.name": "files", "task.train": train, "task.held_out_sets": f"words={held_out}",
        "task.template": "{question}=", "task.max_prompt_tokens": 5, "rollout.max_tokens": 5,
        "warm_start.batch_size": 16, "warm_start.epochs": 6, "warm_start.schedule": "cosine",
        "warm_start.dir": tmp_path / "warm", "checkpoint.every": 9, "evaluation.every": 12, "evaluation.problems": 8,
        "run.dir": tmp_path, "run.compilation_cache": tmp_path / "cache",
    }  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}

    def run(command, *flags, **changes):
        overrides = [f"--config.{name.replace('__', '.')}={value}" for name, value in {**fields, **changes}.items()]
        argv = [sys.executable, "-m", f"rpg_jax.{command}", f"--config={MICRO}", *overrides, *flags]
        return popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return run


def records(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow  # four processes, each compiles
def test_supervised_training_resumes_to_the_same_bits_and_rl_begins_with_its_export(tmp_path, run):
    straight = run("sft", f"--out={tmp_path / 'out'}", run__name="straight").communicate()[0]
    assert re.search(r"the policy after update \d+ is in", straight), straight
    killed = run("sft", run__name="killed")
    while len(records(tmp_path / "killed")) < 15 and killed.poll() is None:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again = run("sft", run__name="killed").communicate()[0]
    assert re.search(r"continuing .* after update (9|18|27|36)", again), again
    checksums = [re.search(r"weights checksum: (\w+)", text)[1] for text in (straight, again)]
    assert checksums[0] == checksums[1]
    losses = [[r.get("nll") for r in records(tmp_path / name)] for name in ("straight", "killed")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][1] / 2
    last = records(tmp_path / "straight")[-1]
    assert last["held_out_nll"] < records(tmp_path / "straight")[0]["held_out_nll"] / 2 and last["epoch"] == 6
    assert last["learning_rate"] < 1e-4, "the schedule ends with the last pass"
    trained = run("train", run__name="rl", model__path=tmp_path / "out", warm_start__enabled=False).communicate()[0]
    first = records(tmp_path / "rl")[0]
    assert first["eval/accuracy"] == pytest.approx(last["eval/accuracy"], abs=0.2), trained
    warm = run("train", run__name="warm").communicate()[0]
    assert abs(records(tmp_path / "warm")[0]["eval/accuracy"] - last["eval/accuracy"]) < 0.2, warm
