"""Several processes on loopback are one run: the same completions, weights and checkpoints as one process has."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.end_to_end.whole_runs import MICRO, ROOT, environment, kept_for

DEVICES = 8


def reserve_port():
    """A socket, and its port: while a process has the socket open, only one that shares ports may listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the coordinator does
    reserved.bind(("127.0.0.1", 0))
    return reserved, reserved.getsockname()[1]


def start(folder, processes, *overrides, devices=DEVICES, each=lambda i: []):
    """All processes of one run with `devices` virtual devices between them."""
    env = environment(kept_for(folder, f"of {processes}"), devices=devices // processes)
    command = [sys.executable, "-m", "rpg_jax.train", f"--config={MICRO}"]
    command += [f"--config.run.dir={folder}", f"--config.warm_start.dir={folder}/warm_starts"]
    command += ["--config.mesh.fsdp=4", "--config.mesh.replica=2", *overrides]
    return launched(command, env, processes, each)


def launched(command, env, processes, each=lambda i: []):
    """The processes of `command`, which join each other on loopback; process i has the arguments `each(i)` too."""
    reserved, port = reserve_port()
    ranks = [{}]
    if processes > 1:
        joined = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": f"{processes}"}
        ranks = [joined | {"JAX_PROCESS_ID": f"{i}"} for i in range(processes)]
    options = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with reserved:
        options["pass_fds"] = [reserved.fileno()]
        return [
            subprocess.Popen([*command, *(each(i) if processes > 1 else [])], env=env | rank, **options)
            for i, rank in enumerate(ranks)
        ]


def printed(running, timeout):
    """What each process printed until it ended; none outlives the call.

    Fails with the stacks of all threads, which faulthandler prints, if one does not end in time.
    """
    try:
        return [process.communicate(timeout=timeout)[0] for process in running]
    except subprocess.TimeoutExpired:
        for process in running:
            process.send_signal(signal.SIGABRT)
        pytest.fail(f"no end after {timeout} s:\n" + "\n\n".join(process.communicate()[0] for process in running))
    finally:
        for process in running:
            process.kill()


def run(folder, processes, *overrides, **options):
    running = start(folder, processes, *overrides, **options)
    outputs = printed(running, timeout=900)
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def samples(folder):
    lines = (json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines())
    return [(r["step"], r["prompt"], r["completion"], r["tokens"], r["reward"]) for r in lines]


def assert_same_run(a, b):
    """Every sampled completion, and metrics to 1e-5: sums of gradients are taken in another order."""
    assert samples(a) == samples(b)
    for x, y in zip(records(a), records(b), strict=True):
        for name in ("step", "reward", "accuracy", "loss", "kl", "grad_norm", "eval/accuracy", "completion_tokens"):
            if name in x:
                np.testing.assert_allclose(x[name], y[name], rtol=1e-5, atol=1e-5, err_msg=f"{name} {x['step']}")


LOGGED = ("--config.log.samples_per_step=1000", "--config.train.steps=4", "--config.loss.kl_coef=1e-3")


@pytest.fixture(scope="module")
def alone(warm, tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "warm_starts").symlink_to(warm / "warm_starts")
    (folder / "one.txt").write_text(run(folder, 1, *LOGGED, "--config.run.name=one")[0], encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("processes", "driver"),  # every process compiles for itself
    [
        pytest.param(2, "orchestrator", marks=pytest.mark.soak),  # stood still once on a busy machine, cause not found
        pytest.param(2, "lockstep", marks=pytest.mark.soak),
        pytest.param(4, "orchestrator", marks=pytest.mark.soak),
    ],
)
def test_processes_train_as_one(alone, processes, driver):
    run(alone, processes, *LOGGED, f"--config.rollout.driver={driver}", f"--config.run.name={processes}-{driver}")
    assert_same_run(alone / "one", alone / f"{processes}-{driver}")


@pytest.mark.soak
@pytest.mark.parametrize("driver", ["orchestrator", "lockstep"])
def test_processes_draw_parts_as_one(alone, driver):
    how = (*LOGGED, "--config.rollout.partial_tokens=2", f"--config.rollout.driver={driver}")
    for processes in (1, 2):
        run(alone, processes, *how, f"--config.run.name=parts-{processes}-{driver}")
    assert_same_run(alone / f"parts-1-{driver}", alone / f"parts-2-{driver}")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_same_weights_have_the_same_checksum_on_any_number_of_processes(alone, processes):
    shutil.copytree(alone / "one", alone / f"ended{processes}")
    layout = ("--config.mesh.fsdp=2", "--config.mesh.replica=4")
    again = run(alone, processes, *LOGGED, *layout, f"--config.run.name=ended{processes}")[0]
    assert "after step 4" in again
    assert again.splitlines()[-1] == (alone / "one.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert again.splitlines()[-1].startswith("weights checksum: ")


@pytest.mark.soak
def test_a_run_resumes_with_another_number_of_processes(alone):
    halved = [s.replace("steps=4", "steps=2") for s in LOGGED]
    run(alone, 2, *halved, "--config.run.name=changed")
    assert "after step 2" in run(alone, 4, *LOGGED, "--config.run.name=changed")[0]
    assert_same_run(alone / "one", alone / "changed")
    run(alone, 1, *halved, "--config.run.name=joined")
    assert "after step 2" in run(alone, 2, *LOGGED, "--config.run.name=joined")[0]
    assert_same_run(alone / "one", alone / "joined")


@pytest.mark.soak
def test_a_killed_process_ends_the_others_with_an_error_once_its_heartbeats_are_missed(tmp_path):
    running = start(
        tmp_path, 2, "--config.train.steps=10000", "--config.run.name=r", "--config.distributed.heartbeat_timeout=15"
    )
    metrics = tmp_path / "r" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3:
        assert all(process.poll() is None for process in running)
        time.sleep(0.2)
    running[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    printed(running[:1], timeout=120)
    assert running[0].returncode != 0 and time.monotonic() - killed < 60


FAILING = """
import os, signal, sys, time
from rpg_jax.parallel import hosts
from rpg_jax.runs import cli, processes

how, one = sys.argv.pop(1), sys.argv.pop(1) == os.environ["JAX_PROCESS_ID"]
def command(options):
    if how == "a bug before it joins" and one:
        raise RuntimeError("no such thing")
    processes.join(cli.load_config(options).config)
    hosts.barrier("all are there")
    print("at", time.time())
    if one:
        errors = {"no weights": ValueError("no such thing"), "a full disk": OSError("no such thing")}
        error = errors.get(how, cli.Ended("no such thing", cli.GAVE_UP))
        with cli.run_is_open() if how == "an open run" else contextlib.nullcontext():
            raise error
    if how != "a full disk":  # then the others are done, and wait for each other
        hosts.barrier("which one never reaches")

parser = cli.parser("train", "")
parser.add_config("configs/tiny.py")
sys.exit(cli.run(command, parser, joins=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "one", "code"),
    [
        ("a bug before it joins", 1, 1),
        ("no weights", 1, 2),
        ("no weights", 0, 2),
        ("an open run", 1, 3),
        ("a full disk", 0, 1),
    ],
)
def test_one_process_that_fails_ends_all_within_seconds_with_its_code_and_reason(tmp_path, how, one, code):
    command = [sys.executable, "-c", "import contextlib\n" + FAILING, how, str(one)]
    running = launched(command, environment(tmp_path), 2)
    outputs = printed(running, timeout=120)
    ended = time.time()
    assert [process.returncode for process in running] == [code] * 2, outputs
    assert f"error: process {one} on {socket.gethostname()} failed: " in outputs[1 - one], outputs
    assert all("no such thing" in output for output in outputs)
    if began := re.findall(r"at (\S+)", outputs[0]):
        assert ended - float(began[0]) < 15, "JAX's own time is 300 s"


COMPILING = """
import collections
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rpg_jax.parallel import joining

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
jax.config.update("jax_cpu_collectives_implementation", "gloo")
joining.initialize(joining.settings())
for devices in (jax.devices(), jax.local_devices()):  # a program of the run, and one of this process
    sharding = NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec("x"))
    x = jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0)[index])
    jax.jit(lambda x: (x * len(devices)).sum())(x).block_until_ready()  # a process must not leave in the middle
print(f"hits {seen['cache_hits']} misses {seen['cache_misses']}")
"""


@pytest.mark.slow
def test_every_process_finds_the_programs_that_it_compiled_at_the_last_start(tmp_path):
    env = environment(tmp_path, devices=2)
    found = []
    for _ in range(2):
        running = launched([sys.executable, "-c", COMPILING], env, 2)
        found.append([re.search(r"hits \d+ misses \d+", output)[0] for output in printed(running, timeout=120)])
    assert found == [["hits 0 misses 2"] * 2, ["hits 2 misses 0"] * 2]


@pytest.mark.slow
def test_a_wrong_flag_of_one_process_ends_all_of_them(tmp_path):
    running = start(tmp_path, 2, each=lambda i: ["--config.no_such_field=1"] * i)
    outputs = printed(running, timeout=120)
    assert [process.returncode for process in running] == [2, 2], outputs
    assert all("no config field 'no_such_field'" in output for output in outputs)


@pytest.mark.slow
def test_processes_with_different_configs_stop_naming_the_field(tmp_path):
    running = start(tmp_path, 2, "--config.run.name=r", each=lambda i: [f"--config.loss.kl_coef={i}e-3"])
    outputs = printed(running, timeout=300)
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 2 and "process 1 on " in output and "config.loss.kl_coef 0.001" in output, output
