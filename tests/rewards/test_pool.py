"""Attacks on a verifier. `attacked:run` stands for a verifier that executes its completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rpg_jax.rewards.pool import WorkerPool
from rpg_jax.rewards.verdicts import Task, Verdict

ATTACKED, ARGUMENTS = "attacked:run", ("completion", "answer")
FUNCTIONS = {ATTACKED: ARGUMENTS}
SOURCE = "def run(completion, answer):\n    return float(eval(completion) or 0)\n"
OS = "__import__('os')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifier")
    (folder / "attacked.py").write_text(SOURCE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def pool(folder):
    with WorkerPool(FUNCTIONS, size=2, deadline_s=2.0) as pool:
        yield pool


def run(pool, completions):
    return pool.run([Task(ATTACKED, (text, "")) for text in completions])


ATTACKS = {
    "__import__('time').sleep(1000)": "timeout",
    "10**10**10": "timeout",  # holds the interpreter lock: no Python timeout inside the process could fire
    "__import__('signal').pause()": "timeout",
    f"{OS}._exit(0)": "crash",
    "__import__('ctypes').string_at(0)": "crash",
    f"{OS}.write(4, b'x' * 9000)": "crash",  # into the pipe of verdicts
    f"{OS}.write(4, b'1\\n')": "crash",
    f'{OS}.write(4, b\'{{"id": 0, "score": 1e999}}\\n\')': "crash",
    f"{OS}.write(4, b'[' * 4000 + b'\\n')": "crash",
    "'x' * 10**9": "memory",
    "[0] * 10**15": "memory",
    f"[{OS}.fork() for _ in range(10**6)]": "forbidden",
    f"{OS}.system('sleep 1000 &')": "forbidden",
    f"{OS}.kill({OS}.getppid(), 9)": "forbidden",
    "__import__('socket').create_connection(('127.0.0.1', 1))": "forbidden",
    "open('/tmp/attacked', 'w')": "forbidden",
    "exit()": "error",
    "(lambda f: f(f))(lambda f: f(f))": "error",
    "float('nan')": "value",
    "syntax error": "error",
    "'\\ud800'": "error",
    "(_ for _ in ()).throw(type('Unreadable', (Exception,), {'__str__': None})())": "error",
}


@pytest.mark.slow  # compiles, or waits, for seconds
def test_an_attack_costs_its_own_verdict_only(pool):
    completions = [text for i, attack in enumerate(ATTACKS) for text in (attack, str(i))]
    verdicts = run(pool, completions)
    assert {attack: v.error for attack, v in zip(ATTACKS, verdicts[::2], strict=True)} == ATTACKS
    assert verdicts[1::2] == [Verdict(float(i)) for i in range(len(ATTACKS))]
    assert run(pool, ["1"] * 20) == [Verdict(1.0)] * 20


@pytest.mark.parametrize("line", ['{"id": 1, "error": null, "detail": ""}', '{"id": 1, "error": "none", "detail": ""}'])
def test_a_line_that_is_neither_a_score_nor_a_known_error_is_no_verdict(folder, line):
    written = line.encode() + b"\n"
    with WorkerPool(FUNCTIONS, size=1, deadline_s=5) as pool:
        [verdict] = run(pool, [f"{OS}.write(4, {written!r})"])
        assert (verdict.score, verdict.error) == (None, "crash")


FORK = "__import__('ctypes').CDLL(None).fork()"  # Python does not notice
ESCAPE = f"({FORK} or ({OS}.setsid(), __import__('time').sleep(60))) and 1"
SUBREAPER = "from rpg_jax.rewards import descendants\ndescendants.own_pid_namespace = lambda libc: False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no keeper")
@pytest.mark.parametrize("customization", ["", SUBREAPER], ids=["namespace, where the system has one", "subreaper"])
def test_a_child_made_behind_the_interpreter_is_gone_with_its_parent(tmp_path, monkeypatch, customization):
    """It must neither answer for its parent nor outlive it, even in a session of its own."""
    (tmp_path / "attacked.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(customization, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with WorkerPool(FUNCTIONS, size=2, deadline_s=1.0) as pool:
        pool.wait_ready()
        before = len(_processes_with(tmp_path))
        forks = f"({FORK} or __import__('time').sleep(0.1)) and 1"
        for attacks, scores in (  # two at a time: each process has one of them, whichever is quicker
            ([forks, "2"], [1.0, 2.0]),
            ([ESCAPE, ESCAPE + " and 10**10**10"], [1.0, None]),
            (["3"], [3.0]),
        ):
            assert [v.score for v in run(pool, attacks)] == scores
        pool.wait_ready()
        assert len(_processes_with(tmp_path)) == before + 1  # that of the third task, whose process lives on
    assert not _processes_with(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no keeper")
@pytest.mark.parametrize("customization", ["", SUBREAPER], ids=["namespace, where the system has one", "subreaper"])
@pytest.mark.parametrize("attack", [ESCAPE, ESCAPE + " and 10**10**10"], ids=["idle", "at work"])
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path, popen, customization, attack):
    (tmp_path / "attacked.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(customization, encoding="utf-8")
    code = f"""if True:
        import time
        from rpg_jax.rewards.pool import Task, WorkerPool
        pool = WorkerPool({FUNCTIONS}, size=2, deadline_s=1000)
        pool.wait_ready()
        print("ready", flush=True)
        input()
        pool.run([Task({ATTACKED!r}, ({attack!r}, ""))])
        time.sleep(1000)"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    trainer = popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, **pipes)
    assert trainer.stdout.readline() == b"ready\n"
    before = len(_processes_with(tmp_path))
    trainer.stdin.write(b"\n")
    trainer.stdin.flush()
    assert _becomes(lambda: len(_processes_with(tmp_path)) > before)
    trainer.kill()
    trainer.wait()
    assert _becomes(lambda: not _processes_with(tmp_path)), _processes_with(tmp_path)


def _becomes(fact, seconds=10.0):
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:
        time.sleep(0.05)
    return fact()


def _processes_with(folder: Path) -> list[str]:
    """The numbers of the processes whose environment names the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, state = (process / "environ").read_bytes(), (process / "stat").read_text(encoding="utf-8")
        except OSError:
            continue
        if bytes(folder) in environment and state.rpartition(")")[2].split()[0] != "Z":
            found.append(process.name)
    return found


def test_a_process_has_a_most_number_of_tasks_and_results_stay_in_order(folder, monkeypatch):
    monkeypatch.setattr("rpg_jax.rewards.pool._MOST_TASKS", 7)
    with WorkerPool(FUNCTIONS, size=2, deadline_s=5) as pool:
        counts = run(pool, ["(lambda m: setattr(m, 'n', getattr(m, 'n', 0) + 1) or m.n)(__import__('json'))"] * 30)
        assert max(v.score for v in counts) == 7
        assert [v.score for v in run(pool, map(str, range(30)))] == list(range(30))


def test_a_process_that_died_while_idle_costs_no_verdict(folder):
    with WorkerPool(FUNCTIONS, size=1, deadline_s=5) as pool:
        run(pool, ["1"])
        process = pool._idle[0]._process
        process.kill()
        process.wait()
        assert run(pool, ["2", "3"]) == [Verdict(2.0), Verdict(3.0)]


def test_a_signal_to_all_processes_of_a_service_costs_no_verdict(folder):
    with WorkerPool(FUNCTIONS, size=1, deadline_s=5) as pool:
        pool.wait_ready()
        threading.Timer(0.2, pool._idle[0]._process.terminate).start()
        assert run(pool, ["__import__('time').sleep(0.5) or 7"]) == [Verdict(7.0)]


def test_a_process_without_a_task_does_not_overrun(folder):
    with WorkerPool(FUNCTIONS, size=2, deadline_s=1.5) as pool:
        pool.wait_ready()
        run(pool, ["1", "__import__('time').sleep(0.2) or 2"])
        time.sleep(1.5)
        assert run(pool, ["3"]) == [Verdict(3.0)]


def test_a_verdict_that_comes_in_time_counts_however_late_this_process_reads_it(folder):
    """As after a stop and a SIGCONT, or while a long call of C holds the interpreter."""

    async def holds_the_loop():
        time.sleep(1.0)

    with WorkerPool(FUNCTIONS, size=1, deadline_s=0.5) as pool:
        pool.wait_ready()
        threading.Timer(0.1, lambda: pool._background.begin(holds_the_loop())).start()
        assert run(pool, ["__import__('time').sleep(0.2) or 7"]) == [Verdict(7.0)]


@pytest.fixture
def interruptible():
    """A worker of pytest-xdist ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_call_after_an_interrupted_one_gets_its_own_verdicts_at_once(folder, interruptible):
    with WorkerPool(FUNCTIONS, size=1, deadline_s=100) as pool:
        pool.wait_ready()
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run(pool, ["__import__('time').sleep(100)", "1"])
        assert run(pool, ["2"]) == [Verdict(2.0)]


def test_an_import_that_hangs_ends_without_the_parent(folder):
    (folder / "hanging.py").write_text("__import__('time').sleep(60)", encoding="utf-8")
    setup = {
        "functions": {"hanging:f": ARGUMENTS},
        "made": {},
        "startup_s": 0.05,
        "deadline_s": 1,
    }
    command = [sys.executable, "-m", "rpg_jax.rewards.verifier_process", json.dumps(setup)]
    path = os.pathsep.join([str(folder), *sys.path])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, timeout=30)
    assert ended.returncode == 128 + signal.SIGALRM


def test_secrets_of_the_parent_are_not_in_the_workers(folder, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    with WorkerPool(FUNCTIONS, size=1, deadline_s=5) as pool:
        assert run(pool, [f"'SECRET_TOKEN' in {OS}.environ", "1"])[0] == Verdict(0.0)
    assert "SECRET_TOKEN" in os.environ


def test_a_function_that_cannot_be_imported_is_named(folder):
    for path, message in {
        "nowhere:f": "cannot import 'nowhere'",
        "attacked:walk": "no function or class 'walk'",
        "attacked": "not of the form module:name",
    }.items():
        with WorkerPool({path: ARGUMENTS}, size=1) as pool, pytest.raises(ValueError, match=message):
            pool.wait_ready()
    with WorkerPool(FUNCTIONS, size=1) as pool, pytest.raises(ValueError, match="does not have \\['other:f'\\]"):
        pool.run([Task("other:f", ("", ""))])


KILLED_ONCE = """
import os, pathlib, signal
left = pathlib.Path(__file__).with_name("deaths")
if (deaths := int(left.read_text())) > 0:
    left.write_text(str(deaths - 1))
    os.kill(os.getpid(), signal.SIGKILL)

def run(completion, answer):
    return 1.0
"""


@pytest.mark.parametrize(("deaths", "survives"), [(3, True), (4, False)])
def test_a_process_that_is_killed_while_it_starts_is_started_again(tmp_path, monkeypatch, deaths, survives):
    """As the kernel kills one where memory is short."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dying.py").write_text(KILLED_ONCE, encoding="utf-8")
    (tmp_path / "deaths").write_text(str(deaths), encoding="utf-8")
    with WorkerPool({"dying:run": ARGUMENTS}, size=1) as pool:
        if survives:
            pool.wait_ready()
            assert pool.run([Task("dying:run", ("a", "b"))])[0].score == 1.0
        else:
            with pytest.raises(OSError, match=r"ended 4 times before it was ready \(crash.*--config\.rewards\.workers"):
                pool.wait_ready()
