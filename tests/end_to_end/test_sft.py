"""Own rows with demonstrations: supervised training, killed and continued, its export, and RL that begins there."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from rpg_jax.storage.checkpoints import committed_steps
from tests.end_to_end.whole_runs import ROOT, environment

STOPPED = """
import os, signal, sys, threading, time
from rpg_jax import sft
from rpg_jax.runs import evaluation, supervised

def at(call, owner, name, do):
    original, left = getattr(owner, name), [call]
    def entered(*arguments):
        left[0] -= 1
        if left[0] == 0:
            do()
        return original(*arguments)
    setattr(owner, name, entered)

def told():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)  # another thread hears it

if sys.argv.pop(1) == "evaluation":
    at(2, evaluation, "records", threading.Event().wait)  # the first is before the first update
else:
    at(4, supervised.Demonstrations, "__next__", told)
sys.exit(sft.main())
"""


@pytest.fixture
def run(shared, tmp_path, popen):
    """Runs a command with the files of docs/own_data.md, with fewer rows and weights."""
    blocks = re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8"), re.DOTALL
    )
    for name, text in blocks:
        (tmp_path / name).write_text(
            text.replace("rows[:1500]", "rows[:120]").replace("rows[1500:1700]", "rows[120:140]"), encoding="utf-8"
        )
    subprocess.run([sys.executable, "rows.py"], cwd=tmp_path, check=True)
    fields = {
        "model.num_layers": 2, "model.embed_dim": 64, "model.hidden_dim": 128, "train.steps": 1, "method": "GRPO",
        "rollout.slots": 16, "rollout.prompts_per_step": 8,
        "warm_start.batch_size": 16, "warm_start.epochs": 6, "checkpoint.every": 9, "evaluation.every": 12,
        "evaluation.problems": 8, "evaluation.temperature": 0.0,
        "warm_start.dir": tmp_path / "warm", "run.dir": tmp_path,
    }  # fmt: skip

    (tmp_path / "stopped.py").write_text(STOPPED, encoding="utf-8")

    def run(command, *flags, **changes):
        """`command` is the name of one of ours, or the arguments of Python."""
        overrides = [f"--config.{name.replace('__', '.')}={value}" for name, value in {**fields, **changes}.items()]
        program = ["-m", f"rpg_jax.{command}"] if isinstance(command, str) else command
        argv = [sys.executable, *program, "--config=mine.py", *overrides, *flags]
        return popen(
            argv, cwd=tmp_path, env=environment(shared), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return run


def records(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


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
    assert re.search(r"continuing .* after update (9|18|27|36|45)", again), again
    checksums = [re.search(r"weights checksum: (\w+)", text)[1] for text in (straight, again)]
    assert checksums[0] == checksums[1]
    losses = [[r.get("nll") for r in records(tmp_path / name)] for name in ("straight", "killed")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][1] / 2
    last = records(tmp_path / "straight")[-1]
    assert last["held_out_nll"] < records(tmp_path / "straight")[0]["held_out_nll"] / 2 and last["epoch"] == 6
    assert last["learning_rate"] < 1e-4, "the schedule ends with the last pass"
    trained = run("train", run__name="rl", model__path=tmp_path / "out").communicate()[0]
    first = records(tmp_path / "rl")[0]
    assert first["eval/accuracy"] == last["eval/accuracy"] > 0, trained  # greedy: the same weights
    warm = run("train", run__name="warm", warm_start__enabled=True).communicate()[0]
    assert records(tmp_path / "warm")[0]["eval/accuracy"] == last["eval/accuracy"], warm
    checksums = [re.search(r"weights checksum: (\w+)", text)[1] for text in (trained, warm)]
    assert checksums[0] == checksums[1], "RL from the export and RL with a warm start are the same run"


def unclocked(folder):
    """The metrics that no clock measured, and the completions that were kept."""
    own = ("seconds", "tokens_per_second", "time/", "host/")
    metrics = [{k: v for k, v in record.items() if not k.startswith(own)} for record in records(folder)]
    return metrics, (folder / "samples.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow  # five processes, each compiles
def test_an_update_is_saved_before_its_evaluation_which_a_stop_leaves_to_the_run_that_continues(tmp_path, run):
    short = {"warm_start__epochs": 1, "checkpoint__every": 4, "evaluation__every": 4}
    straight = run("sft", run__name="straight", **short).communicate()[0]
    expected = unclocked(tmp_path / "straight")
    assert [r["step"] for r in expected[0]] == [*range(9)] and "eval/accuracy" in expected[0][4], straight

    checkpoints, end = tmp_path / "evaluation" / "checkpoints", time.monotonic() + 120
    process = run(["stopped.py", "evaluation"], run__name="evaluation", run__stop_seconds=1, **short)
    while 4 not in committed_steps(checkpoints) and process.poll() is None:
        assert time.monotonic() < end, "no checkpoint before the evaluation"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # the evaluation of update 4 never ends
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM and "the checkpoint of update 4 stands" in said, said

    process = run(["stopped.py", "update"], run__name="update", run__stop_seconds=300, **short)
    said = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM and "stopped after update 4 and saved" in said, said

    for name in ("evaluation", "update"):
        assert [r["step"] for r in records(tmp_path / name)] == [0, 1, 2, 3], name
        said = run("sft", run__name=name, **short).communicate()[0]
        assert "after update 4" in said and "weights checksum" in said, said
        assert said[said.index("weights checksum") :] == straight[straight.index("weights checksum") :], name
        assert unclocked(tmp_path / name) == expected, name
