"""Collectives with one process, and shares of several; tests/end_to_end/test_processes.py runs several processes."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax import parallel
from rpg_jax.parallel import hosts
from tests.end_to_end.test_processes import reserve_port
from tests.end_to_end.whole_runs import ROOT


def test_one_process_gathers_its_own_value():
    assert hosts.all_gather_bytes(b"abc") == [b"abc"]
    assert hosts.pmax(7) == 7


def test_a_sharded_array_is_gathered_whole():
    mesh = parallel.make_mesh({"fsdp": 4, "tensor": 2})
    x = jax.device_put(jnp.arange(24.0).reshape(8, 3), NamedSharding(mesh, PartitionSpec("fsdp")))
    np.testing.assert_array_equal(hosts.gathered(x), np.arange(24.0).reshape(8, 3))


def test_the_shares_of_all_processes_are_every_nth_item(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    shares = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        shares.append(hosts.share("abcdefgh"))
    assert shares == [list("adg"), list("beh"), list("cf")]


def test_a_counter_of_one_process_counts():
    counter = hosts.SharedCounter()
    assert [counter.draw() for _ in range(3)] == [0, 1, 2] and hosts.SharedCounter().draw() == 0


SCRIPT = """
import json, sys, threading, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=10)
from jax.experimental import multihost_utils
from rpg_jax.parallel import hosts

gathers = []
over_devices = multihost_utils.process_allgather
multihost_utils.process_allgather = lambda *a, **k: gathers.append(a) or over_devices(*a, **k)
began = time.monotonic()
with hosts.first_alone("test"):
    if process == 0:
        time.sleep(2)
waited = time.monotonic() - began
assert waited >= 1.5, waited
for turn in range(20):
    assert hosts.all_gather_bytes(f"{turn} of {process}".encode()) == [f"{turn} of {p}".encode() for p in range(2)]
    assert hosts.pmax(turn * process) == turn
assert hosts.all_gather_bytes(b"x" * process) == [b"", b"x"]
for _ in range(3):
    counter, drawn = hosts.SharedCounter(), []
    while (number := counter.draw()) < 100:
        drawn.append(number)
    every = [json.loads(one) for one in hosts.all_gather_bytes(json.dumps(drawn).encode())]
    assert sorted(every[0] + every[1]) == list(range(100)), every
hosts.barrier("test")
assert len(hosts._service().key_value_dir_get("rpg_jax/")) <= 5, "old messages are deleted"
assert not gathers, "nothing went over the devices"
hosts.barrier("the other has counted the messages too")
hosts._SMALL, hosts.PIECE = 8, 16
sent = [b"0123456789" * 5, b"short"]
assert hosts.all_gather_bytes(sent[process]) == sent
assert len(gathers) == 4, "in pieces"
exchange, met = hosts.Exchange(), []
def meets():
    for turn in range(10):
        met.append(exchange.all_gather_bytes(sent[process] * turn) == [one * turn for one in sent])
thread = threading.Thread(target=meets)
thread.start()
for turn in range(10):  # meanwhile, in an order of its own
    assert hosts.pmax(turn * process) == turn
thread.join()
assert met == [True] * 10 and len(gathers) == 4, met
hosts.barrier("test")
print("equal", flush=True)
if process:
    import os
    os._exit(9)
hosts.barrier("test")
print("never", flush=True)
"""


@pytest.mark.slow  # two processes
def test_two_processes_wait_by_the_coordination_service_and_notice_a_lost_one():
    reserved, port = reserve_port()
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(ROOT)}
    with reserved:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(port), str(process)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[reserved.fileno()],
            )
            for process in range(2)
        ]
        said = [process.communicate(timeout=300) for process in started]
    assert [out.splitlines()[-1:] for out, _ in said] == [["equal"]] * 2, said  # Gloo has printed too
    assert started[1].returncode == 9 and started[0].returncode not in (0, 2), "the first does not wait for ever"
