"""How processes find each other, and that one process fails alone. tests/end_to_end/test_processes.py has several."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from rpg_jax.parallel import joining


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_coordinator_a_run_is_one_process():
    assert joining.settings() is None


def test_the_launchers_address_is_used_and_the_rest_left_to_jax(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.2:8476")
    settings = joining.settings()
    assert settings["coordinator_address"] == "10.0.0.2:8476"
    assert settings["num_processes"] is settings["process_id"] is None
    assert settings["initialization_timeout"] >= 600
    assert not {"heartbeat_timeout_seconds", "shutdown_timeout_seconds"} & set(settings), "JAX's own"
    assert joining.settings(20)["heartbeat_timeout_seconds"] == 20


def of_several(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)


def test_an_address_without_a_port_gets_the_one_that_the_firewall_opens(monkeypatch):
    of_several(monkeypatch, COORDINATOR_ADDRESS="first", NUM_PROCESSES="2", PROCESS_ID="1")
    settings = joining.settings()
    assert (settings["coordinator_address"], settings["process_id"]) == ("first:8476", 1)


def test_contradictions_are_named(monkeypatch):
    of_several(monkeypatch, NUM_PROCESSES="2")
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS=HOST:8476"):
        joining.settings()
    of_several(monkeypatch, COORDINATOR_ADDRESS="first:1", PROCESS_ID="2")
    with pytest.raises(ValueError, match=r"JAX_PROCESS_ID must be in 0\.\.1, got 2"):
        joining.settings()
    of_several(monkeypatch, NUM_PROCESSES="two")
    with pytest.raises(ValueError, match=r"JAX_NUM_PROCESSES='two' must be a whole number"):
        joining.settings()


def test_one_process_that_fails_has_nobody_to_tell(monkeypatch):
    monkeypatch.setattr(joining.jax.distributed, "initialize", lambda **_: pytest.fail("joined"))
    joining.fail("no weights", 2)
    of_several(monkeypatch, NUM_PROCESSES="2")  # and no coordinator
    joining.fail("no weights", 2)


SETS_UP = """
import time
from rpg_jax.parallel import joining
joining.initialize(joining.settings())
print("joined", flush=True)
time.sleep(60)
"""


@pytest.mark.slow  # a process that starts JAX
def test_sigterm_ends_a_process_that_has_joined_and_not_begun(popen):
    """JAX's own service for preemptions would take the signal, and a warm start would go on."""
    with socket.socket() as reserved:  # while it is open, only a socket that shares ports may listen there
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{reserved.getsockname()[1]}"}
        one = {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JAX_PLATFORMS": "cpu"}
        command, env = [sys.executable, "-c", SETS_UP], os.environ | place | one
        process = popen(command, env=env, stdout=subprocess.PIPE, text=True, pass_fds=[reserved.fileno()])
        assert process.stdout.readline() == "joined\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
