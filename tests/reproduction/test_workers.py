import json
import os
import subprocess
import sys

import pytest

from rpg_jax.reproduction.run_tables import locked, train_in_worker
from rpg_jax.reproduction.workers import Task, run_tasks
from tests.end_to_end.whole_runs import MICRO, environment

SHORT = (f"--config={MICRO}", "--config.train.steps=2")
WORKER = (sys.executable, "-m", "rpg_jax.reproduction.workers")


def order(folder, seed, *more):
    name = f"{folder}/seed{seed}"
    settings = f"--config.seed={seed}", f"--config.run.dir={folder}", f"--config.run.name=seed{seed}"
    function = f"{train_in_worker.__module__}:{train_in_worker.__name__}"
    return {"function": function, "argument": [*SHORT, *settings, *more], "log": f"{name}.log"}


def last_line(file):
    return file.read_text(encoding="utf-8").splitlines()[-1]


@pytest.mark.slow  # four runs in two processes
def test_a_run_has_the_same_bits_alone_and_after_others_in_one_process(warm, tmp_path):
    alone, after, env = tmp_path / "alone", tmp_path / "after", environment(warm, optimised=True)
    for folder, seeds in ((alone, [2]), (after, [1, 3, 2])):
        folder.mkdir()
        orders = "".join(
            json.dumps(order(folder, seed, f"--config.warm_start.dir={warm}/warm_starts")) + "\n" for seed in seeds
        )
        done = subprocess.run(WORKER, input=orders, capture_output=True, text=True, check=True, env=env)
        assert done.stdout == "0\n" * len(seeds)
    first, second = last_line(alone / "seed2.log"), last_line(after / "seed2.log")
    assert first.startswith("weights checksum: ") and first == second
    steps = [json.loads(line) for line in (after / "seed2" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sum(step.get("time/compilations", 0) for step in steps) == 0


@pytest.mark.slow  # a process that starts JAX
def test_a_worker_ends_with_the_code_of_the_run_that_failed_and_its_log_says_why(tmp_path):
    orders = json.dumps(order(tmp_path, 1, "--config.method=nonsense")) + "\n" + json.dumps(order(tmp_path, 2)) + "\n"
    done = subprocess.run(WORKER, input=orders, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in (tmp_path / "seed1.log").read_text(encoding="utf-8") and not (tmp_path / "seed2.log").exists()


def halves(numbers):
    """A task of the test below, in a worker process."""
    return {"halves": [1 / number for number in numbers], "process": os.getpid()}


@pytest.mark.slow  # processes that start JAX
def test_a_result_comes_back_and_a_task_that_raises_ends_no_other(tmp_path):
    numbers = ([1, 2], [0], [4], [8])
    tasks = [Task(str(i), halves, own, tmp_path / f"{i}.log") for i, own in enumerate(numbers)]
    with locked(tmp_path) as lock:
        done = list(run_tasks(tasks, jobs=1, inherited=lock))
        assert [d.code for d in done] == [0, 1, 0, 0]
        assert [d.result["halves"] for d in done if not d.code] == [[1, 0.5], [0.25], [0.125]]
        assert done[2].result["process"] == done[3].result["process"] != done[0].result["process"]
        assert "ZeroDivisionError" in (tmp_path / "1.log").read_text(encoding="utf-8")
        failed_first = list(run_tasks(tasks[1:], jobs=2, inherited=lock, first_alone=True))
    assert [(d.task.name, d.code) for d in failed_first] == [("1", 1)], "no other task starts"
