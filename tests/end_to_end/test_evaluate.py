"""The same policy evaluated as a run, as an exported folder and behind a server; and an evaluation that is killed."""

import json
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.whole_runs import MICRO, ROOT, environment

pytestmark = pytest.mark.slow  # every evaluation is a process that starts JAX
CONFIG = f"--config={MICRO}"
FILES = ("completions.jsonl", "scores.json", "scores.md")


def options(shared):
    return {
        "cwd": ROOT,
        "env": environment(shared),
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }


def command(module, *arguments):
    return [sys.executable, "-m", f"rpg_jax.{module}", *arguments]


def run(shared, module, *arguments, code=0):
    done = subprocess.run(command(module, *arguments), **options(shared), timeout=600)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def trained(warm, tmp_path_factory):
    """(shared folder, run folder) of a run of two steps."""
    folder = tmp_path_factory.mktemp("evaluated")
    settings = (f"--config.run.dir={folder}", "--config.run.name=r", f"--config.warm_start.dir={warm}/warm_starts")
    every = "--config.checkpoint.every=1"
    (folder / "r.txt").write_text(run(warm, "train", CONFIG, every, *settings), encoding="utf-8")
    return warm, folder / "r"


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory):
    shared, run_dir = trained
    out = tmp_path_factory.mktemp("out")
    printed = run(shared, "evaluate", f"--run={run_dir}", "--k=8", f"--out={out}")
    assert "Mean@8" in printed and "maj@8" in printed
    return out


def test_an_evaluation_names_the_weights_as_the_run_that_trained_them_did(trained, evaluated):
    last = (trained[1].parent / "r.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert (
        last
        == "weights checksum: "
        + json.loads((evaluated / "scores.json").read_text(encoding="utf-8"))["settings"]["weights"]
    )


def test_schedule_free_prints_the_checksum_of_the_average_that_evaluations_use(trained, tmp_path):
    shared, _ = trained
    settings = ("--config.optimizer.name=schedule_free_adamw", f"--config.warm_start.dir={shared}/warm_starts")
    printed = run(shared, "train", CONFIG, *settings, f"--config.run.dir={tmp_path}", "--config.run.name=r")
    run(shared, "evaluate", f"--run={tmp_path / 'r'}", "--k=1", f"--out={tmp_path / 'out'}")
    weights = json.loads((tmp_path / "out" / "scores.json").read_text(encoding="utf-8"))["settings"]["weights"]
    assert f"weights checksum: {weights} (of the average" in printed.splitlines()[-1]


KILLED = """
import os, signal
from rpg_jax import evaluate
from rpg_jax.runs import evaluation
records, calls = evaluation.records, []

def killed_at_the_second(*arguments):
    calls.append(None)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return records(*arguments)

evaluation.records = killed_at_the_second
raise SystemExit(evaluate.main())
"""


def test_an_evaluation_killed_in_the_middle_ends_with_the_same_bytes(trained, evaluated, tmp_path):
    shared, run_dir = trained
    arguments = (f"--run={run_dir}", "--k=8", f"--out={tmp_path}")
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], **options(shared), timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stdout
    at_the_kill = (tmp_path / "completions.jsonl").read_bytes()
    assert 0 < len(at_the_kill) < (evaluated / "completions.jsonl").stat().st_size
    run(shared, "evaluate", *arguments)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (evaluated / name).read_bytes(), name


def write_sums(file, sums):
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule"},
        }
        for prompt, answer in sums
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_problems_that_a_file_repeats_are_sampled_as_often(trained, tmp_path):
    shared, run_dir = trained
    sums = [("1+2=", "3"), ("12+9=", "12"), ("1+2=", "3"), ("1+2=", "3"), ("12+9=", "12")]
    file = write_sums(tmp_path / "sums.jsonl", sums)
    sets = (f"--sets=sums={file},again={file}", "--rewards=by_source", f"--out={tmp_path / 'out'}")
    printed = run(shared, "evaluate", f"--run={run_dir}", *sets)
    assert "Mean@2–3" in printed
    records = [
        json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(r["set"], r["prompt"], r["index"]) for r in records] == [
        (name, prompt, i) for name in ("sums", "again") for prompt, k in (("1+2=", 3), ("12+9=", 2)) for i in range(k)
    ]


def test_all_problems_of_a_named_set_are_scored_unless_problems_says_how_many(trained, tmp_path):
    file = write_sums(tmp_path / "sums.jsonl", [(f"{n}+1=", str(n + 1)) for n in range(40)])
    for wanted, scored in ((), 40), (("--problems=3",), 3):  # the run's own evaluation.problems is 32
        out = tmp_path / str(scored)
        run(trained[0], "evaluate", f"--run={trained[1]}", f"--sets=sums={file}", "--k=1", f"--out={out}", *wanted)
        assert len((out / "completions.jsonl").read_text(encoding="utf-8").splitlines()) == scored


def test_another_evaluation_is_not_mixed_in(trained, evaluated):
    output = run(trained[0], "evaluate", f"--run={trained[1]}", "--k=4", f"--out={evaluated}", code=2)
    assert "k was 8, now 4" in output


def test_a_server_gives_the_bytes_that_the_run_gives(trained, evaluated, tmp_path, popen):
    shared, run_dir = trained
    server = popen(command("serve", f"--run={run_dir}", "--port=0", "--http_port=0"), **options(shared))
    port = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
    where = (f"--run={run_dir}", f"--server=http://127.0.0.1:{port}", "--step=2", f"--out={tmp_path}")
    run(shared, "evaluate", *where, "--k=8")
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=120)
    for name in FILES:  # the server says which weights it has
        assert (tmp_path / name).read_bytes() == (evaluated / name).read_bytes(), name


def test_the_exported_folder_gives_the_greedy_bytes_that_the_run_gives(trained, tmp_path):
    """Greedy: the noise of a run's checkpoint depends on its step, which a folder does not have."""
    shared, run_dir = trained
    run(shared, "export", f"--run={run_dir}", f"--out={tmp_path / 'model'}")
    greedy = ("--k=1", "--temperature=0")
    run(shared, "evaluate", f"--run={run_dir}", f"--out={tmp_path / 'a'}", *greedy)
    run(shared, "evaluate", f"--folder={tmp_path / 'model'}", CONFIG, f"--out={tmp_path / 'b'}", *greedy)
    a, b = ((tmp_path / name / "completions.jsonl").read_bytes() for name in "ab")
    assert a == b and a.count(b"\n") == 32
