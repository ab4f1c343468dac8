"""A run that hangs leaves its stacks behind and ends; one that beats does not."""

import subprocess
import sys

from rpg_jax.training.watchdog import STALLED

SCRIPT = """
import pathlib, sys, threading
from rpg_jax.training.watchdog import Watchdog

def waits_for_what_never_comes():
    threading.Event().wait()

with Watchdog(pathlib.Path(sys.argv[1]), 1.5) as watchdog:
    watchdog.beat("step 7")
    if sys.argv[2] == "hang":
        waits_for_what_never_comes()
    for _ in range(14):  # longer than the limit, and each far within it on a busy machine too
        threading.Event().wait(0.15)
        watchdog.beat("step 8")
"""


def run(tmp_path, how):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how], capture_output=True, text=True, timeout=60
    )


def test_a_hang_dumps_all_stacks_and_exits_with_its_own_code(tmp_path):
    done = run(tmp_path, "hang")
    assert done.returncode == STALLED
    assert "error: stalled: no heartbeat for" in done.stderr and "since step 7" in done.stderr
    assert "waits_for_what_never_comes" in (tmp_path / "stall.txt").read_text()


def test_heartbeats_keep_a_run_alive_and_leave_nothing(tmp_path):
    assert run(tmp_path, "end").returncode == 0
    assert list(tmp_path.iterdir()) == []
