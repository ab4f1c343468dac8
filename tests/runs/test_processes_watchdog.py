"""A run that hangs leaves its stacks behind and ends; one that beats does not."""

import faulthandler
import subprocess
import sys

from rpg_jax.runs.processes import STALLED, Watchdog
from rpg_jax.training.heartbeat import beat

SCRIPT = """
import pathlib, sys, threading
from rpg_jax.runs.processes import Watchdog
from rpg_jax.training.heartbeat import beat

def waits_for_what_never_comes():
    threading.Event().wait()

with Watchdog(pathlib.Path(sys.argv[1]), 1.5):
    beat("step 7")

    def groups():
        for _ in range(14):  # longer than the limit, and each far within it on a busy machine too
            threading.Event().wait(0.15)
            beat()

    if sys.argv[2] == "hang":
        waits_for_what_never_comes()
    thread = threading.Thread(target=groups)
    thread.start()
    thread.join()
"""


def run(tmp_path, how):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how], capture_output=True, text=True, timeout=60
    )


def test_a_hang_dumps_all_stacks_and_exits_with_its_own_code(tmp_path):
    done = run(tmp_path, "hang")
    assert done.returncode == STALLED
    assert "error: stalled: no heartbeat for" in done.stderr and "during step 7" in done.stderr
    assert "waits_for_what_never_comes" in (tmp_path / "stall.txt").read_text(encoding="utf-8")


def test_heartbeats_of_any_thread_keep_a_run_alive_and_leave_nothing(tmp_path):
    assert run(tmp_path, "end").returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_costs_no_thread_and_nothing_is_armed_after_the_end(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: calls.append("arm"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancel"))
    with Watchdog(tmp_path, 1000.0):
        for _ in range(10_000):
            beat()
    beat()  # of a thread that ends later
    assert calls[0] == "arm" and calls.index("cancel") == len(calls) - 1 < 1000
