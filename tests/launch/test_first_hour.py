"""The first hour: what is checked, kept, and written into the report; the steps' own commands have their own tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from launch import first_hour
from launch.first_hour import FAILED, NOT_RUN, PASSED, Step, judged, steps
from tests.fake_gcs import FakeGcs

VERSIONS = {"platform": "cpu", "devices": "1 x cpu", "packages": {"jax": "1"}, "python": "3", "commit": "c"}


@pytest.fixture(autouse=True)
def same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def printing(*lines, code=0):
    program = f"print(*{[json.dumps(line) if isinstance(line, dict) else line for line in lines]}, sep=chr(10))"
    return ("-c", f"{program}; raise SystemExit({code})")


def step(*lines, code=0, check=lambda measured: (True, "fine"), name="one", without=""):
    return Step(name, "fine", printing(*lines, code=code), check, without)


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """Runs the command with other steps in place of its own; returns the exit code and the report."""

    def run(*made, versions=VERSIONS):
        monkeypatch.setattr(first_hour, "_VERSIONS", f"print('''{json.dumps(versions)}''')")
        monkeypatch.setattr(first_hour, "steps", lambda platform, quick, runs: iter(made))
        code = first_hour.main(["--platform=cpu", "--quick", f"--out={tmp_path / 'out'}"])
        return code, json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))

    return run


def test_the_report_says_what_was_expected_and_seen_and_the_exit_code_that_something_failed(hour, tmp_path, capsys):
    slow = step(
        {"loss": 1.5, "name": "a|b"}, {"loss": 2.5}, check=lambda rows: (len(rows) == 2, "2 losses"), name="two"
    )
    code, report = hour(slow, step("no", "Boom: why", code=1, name="bad"), step(name="far", without="no TPU"))
    assert code == 3
    assert {name: one["result"] for name, one in report["steps"].items()} == {
        "devices": PASSED,
        "two": PASSED,
        "bad": FAILED,
        "far": NOT_RUN,
    }
    assert report["machine"]["packages"] == {"jax": "1"} and report["steps"]["bad"]["seen"] == "exit code 1: Boom: why"
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# The first hour on 1 x cpu: 2 passed, 1 failed, 1 could not be run\n")
    assert "| two | passed | 2 losses | fine |" in page and "| loss | 1.5000 | 2.5000 |" in page
    assert "| packages | jax 1 |" in page
    assert "\n    Boom: why\n" in page, "the end of the log of what failed"
    assert (tmp_path / "out" / "logs" / "bad.txt").read_text(encoding="utf-8") == "no\nBoom: why\n"
    assert "report.md: 2 passed, 1 failed, 1 could not be run" in capsys.readouterr().out


def test_what_has_passed_is_kept_in_equal_versions_and_what_has_not_is_repeated(hour):
    def count(measured):
        counted.append(1)
        return True, "fine"

    counted: list[int] = []
    good, bad = step({}, check=count, name="good"), step(check=lambda _: (False, "bad"), name="bad")
    assert hour(good, bad)[0] == 3 and counted == [1]
    code, report = hour(good, step(check=count, name="bad"))
    assert code == 0 and counted == [1, 1] and [one["result"] for one in report["steps"].values()] == [PASSED] * 3
    assert hour(good, versions=VERSIONS | {"commit": "d"})[0] == 0 and counted == [1, 1, 1]


def test_without_the_asked_devices_nothing_else_is_done(hour):
    code, report = hour(step(), versions=VERSIONS | {"platform": "gpu"})
    assert code == 3 and [*report["steps"]] == ["devices"]
    assert report["steps"]["devices"]["seen"] == "gpu: 1 x cpu, jax 1, Python 3"


@pytest.mark.parametrize(
    ("made", "result", "seen"),
    [
        (step("error: cannot download openai/gsm8k: ConnectError", code=2), NOT_RUN, "cannot download"),
        (step("error: No module named 'grpc'; pip …", code=2), FAILED, "exit code 2: error: No module named"),
        (step(code=3), FAILED, "exit code 3: "),
        (step({"passed": False}, code=3), FAILED, "fine"),
        (step(check=lambda rows: (rows[0], "")), FAILED, "no result: IndexError"),
        (step(check=lambda rows: (False, "too slow")), FAILED, "too slow"),
    ],
)
def test_only_what_a_missing_network_ends_could_not_be_run(made, result, seen, tmp_path):
    found = judged(made, tmp_path / "log.txt", "cpu")
    assert found[0] == result and found[1].startswith(seen), found


def test_a_step_that_hangs_is_ended_and_has_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(first_hour, "LIMIT_SECONDS", 0.5)
    waits = Step("one", "", ("-c", "import time; time.sleep(60)"), lambda _: (True, ""))
    assert judged(waits, tmp_path / "log.txt", "cpu")[:2] == (FAILED, "no end after 0 s")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_steps_are_those_of_the_page_and_a_cpu_leaves_out_what_takes_hours(platform, tmp_path):
    made = list(steps(platform, False, tmp_path))
    assert [one.name for one in made if one.without] == ["step of the target", "rollout of qwen3-0.6b"] * (
        platform == "cpu"
    )
    names = {one.arguments[1] for one in made}
    assert names == {"rpg_jax.bench", "rpg_jax.train", "rpg_jax.reproduce"} and len(made) == 9
    assert all(
        f"--config.run.platform={platform}" in one.arguments for one in made if "rpg_jax.bench" not in one.arguments
    )


def write(run, *records):
    run.mkdir()
    lines = [json.dumps({"step": number} | record) + "\n" for number, record in enumerate(records)]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("last", "gap", "quick", "passed"),
    [(0.9, 4e-7, False, True), (0.84, 4e-7, False, False), (0.94, 1e-3, False, False), (0.45, 4e-7, True, True)],
)
def test_the_tiny_run_is_judged_by_accuracy_and_gap(last, gap, quick, passed, tmp_path):
    write(
        tmp_path / "tiny", {"eval/accuracy": 0.44}, {"sampler_gap": gap}, {"sampler_gap": 1e-8, "eval/accuracy": last}
    )
    tiny = next(one for one in steps("cpu", quick, tmp_path) if one.name == "tiny")
    assert tiny.check([]) == (passed, f"held-out accuracy 0.44 → {last:.2f}, sampler_gap {gap:.1e}")


def test_benchmarks_are_judged_by_what_they_print(tmp_path):
    check = {one.name: one.check for one in steps("gpu", False, tmp_path)}
    kernel = {"name": "cudnn attention", "dtype": "bfloat16", "model": "m", "difference": 2e-3, "passed": True}
    assert check["kernels"]([kernel]) == (True, "1 kernels, differences of at most 2.0e-03")
    assert check["kernels"]([]) == (True, "0 kernels, differences of at most 0.0e+00")
    wrong = kernel | {"passed": False}
    assert check["kernels"]([wrong]) == (False, "1 kernels, not what XLA computes: cudnn attention in bfloat16 of m")
    update = {"seconds": 0.5, "tokens_per_s": 1000.0, "peak_bytes": 2**31}
    assert check["step of w1"]([update]) == (True, "0.500 s, 1,000 tokens/s, peak 2.0 GiB")
    assert not check["step of w1"]([update | {"share_of_peak": 1.2}])[0], "faster than the chip can be"
    assert check["rollout of w1"]([{"tokens_per_s": 9.0}])[0], "without JetStream"
    assert not check["rollout of w1"]([{"tokens_per_s": 9.0, "lockstep_tokens_per_s": 19.0}])[0]


def test_an_interrupt_ends_the_step_and_the_command_continues(hour, tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "judged", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert first_hour.main(["--platform=cpu", f"--out={tmp_path / 'out'}"]) == 130
    monkeypatch.undo()
    assert not (tmp_path / "out" / "report.json").exists()
    assert hour(step())[0] == 0


@pytest.mark.slow  # imports google.cloud.storage
def test_a_report_in_a_bucket_is_continued_by_another_machine(tmp_path):
    pytest.importorskip("gcsfs")
    program = (
        "from launch import first_hour as f; import sys\n"
        "one = f.Step('one', '', ('-c', ''), lambda _: (True, 'fine'))\n"
        "f.steps = lambda *_: iter([one]); sys.exit(f.main(['--platform=cpu', '--out=gs://bucket/hour']))"
    )
    with FakeGcs("bucket") as gcs:
        env = os.environ | gcs.environment
        first, second = (
            subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True) for _ in range(2)
        )
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        assert "one: has passed" in second.stdout and "gs://bucket/hour/report.md: 2 passed" in second.stdout
        assert {"hour/report.md", "hour/report.json", "hour/logs/one.txt"} <= set(gcs.objects)
