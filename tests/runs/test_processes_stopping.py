"""The first signal is a request, the second the end; a step that takes too long is cut off at the deadline."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, time
from rpg_jax.runs.processes import StopRequest
stop = StopRequest(float(sys.argv[1]), lambda: print("the checkpoint of step 4 stands", flush=True))
with stop.listening():
    print("listening", flush=True)
    while stop.agreed() is None:
        time.sleep(0.02)
    if sys.argv[2] == "deaf":
        print("deaf", flush=True)
        time.sleep(60)
    stop.saved()
    print(f"asked by {stop.agreed()}", flush=True)
"""


ELSEWHERE = """
import signal, threading
from rpg_jax.runs.processes import StopRequest
threading.Thread(target=threading.Event().wait, daemon=True).start()
with StopRequest(30, lambda: None).listening() as stop:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("listening", flush=True)
    stop.wait()
    print(f"asked by {stop.signal}", flush=True)
"""


ENTERING = """
import signal
from rpg_jax.runs.processes import StopRequest
install = signal.signal
def install_and_get(number, handler):
    previous = install(number, handler)
    signal.raise_signal(number)
    return previous
signal.signal = install_and_get
with StopRequest(30, lambda: None).listening() as stop:
    signal.signal = install
    stop.wait()
    print(f"asked by {stop.signal}", flush=True)
"""


TOGETHER = """
import signal, time
from rpg_jax.runs.processes import StopRequest
with StopRequest(30, lambda: None).listening() as stop:
    stop.request()  # by the program itself
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.2)
    print(f"asked by {stop.signal}", flush=True)
"""


MUTE = """
import threading
from rpg_jax.runs.processes import StopRequest
StopRequest(0.1, threading.Event().wait).request()
threading.Event().wait(60)
"""


@pytest.fixture
def start(popen):
    """Starts a script that gets SIGTERM once it listens."""

    def start(seconds, how, script=SCRIPT):
        process = popen([sys.executable, "-c", script, seconds, how], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        return process

    return start


def test_a_signal_is_a_request(start):
    process = start("30", "listens")
    assert process.communicate(timeout=60)[0] == f"asked by {int(signal.SIGTERM)}\n" and process.returncode == 0


@pytest.mark.slow  # a process that starts JAX
def test_a_signal_that_another_thread_takes_wakes_the_one_that_waits(start):
    process = start("30", "", ELSEWHERE)
    assert process.communicate(timeout=60)[0] == f"asked by {int(signal.SIGTERM)}\n" and process.returncode == 0


def test_the_second_signal_and_the_deadline_end_the_process(start):
    process = start("60", "deaf")
    assert process.stdout.readline() == "deaf\n"  # the first has been heard: of two that wait, the order is not theirs
    time.sleep(1.5)  # of signals within a second of the first, one request is made
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    process = start("0.2", "deaf")
    assert process.communicate(timeout=30)[0].endswith("the checkpoint of step 4 stands\n")
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow  # as above
@pytest.mark.parametrize("script", [ENTERING, TOGETHER])
def test_no_signal_is_lost_and_one_request_that_comes_as_several_is_one(script):
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == f"asked by {int(signal.SIGTERM)}\n" and done.returncode == 0


@pytest.mark.slow  # as above
def test_last_words_that_hang_do_not_keep_the_process():
    assert subprocess.run([sys.executable, "-c", MUTE], timeout=50).returncode == 128 + signal.SIGTERM
