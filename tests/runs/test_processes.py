"""How processes find each other, and what they say where they are not alike."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs import tiny
from rpg_jax.runs import processes
from rpg_jax.runs.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return tiny.get_config()


def test_without_a_coordinator_a_run_is_one_process(config):
    assert processes.settings(config) is None


def test_the_launchers_address_is_used_and_the_rest_left_to_jax(config, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.2:8476")
    settings = processes.settings(config)
    assert settings["coordinator_address"] == "10.0.0.2:8476"
    assert settings["num_processes"] is settings["process_id"] is None
    assert settings["initialization_timeout"] >= 600
    assert not {"heartbeat_timeout_seconds", "shutdown_timeout_seconds"} & set(settings), "JAX's own"
    config.distributed.heartbeat_timeout = 20
    assert processes.settings(config)["heartbeat_timeout_seconds"] == 20


def of_several(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(f"JAX_{name}", value)


def test_an_address_without_a_port_gets_the_one_that_the_firewall_opens(config, monkeypatch):
    of_several(monkeypatch, COORDINATOR_ADDRESS="first", NUM_PROCESSES="2", PROCESS_ID="1")
    settings = processes.settings(config)
    assert (settings["coordinator_address"], settings["process_id"]) == ("first:8476", 1)


def test_contradictions_are_named(config, monkeypatch):
    of_several(monkeypatch, NUM_PROCESSES="2")
    with pytest.raises(ValueError, match=r"JAX_COORDINATOR_ADDRESS=HOST:8476"):
        processes.settings(config)
    of_several(monkeypatch, COORDINATOR_ADDRESS="first:1", PROCESS_ID="2")
    with pytest.raises(ValueError, match=r"JAX_PROCESS_ID must be in 0\.\.1, got 2"):
        processes.settings(config)
    of_several(monkeypatch, NUM_PROCESSES="two")
    with pytest.raises(ValueError, match=r"JAX_NUM_PROCESSES='two' must be a whole number"):
        processes.settings(config)


def test_a_fact_that_differs_is_named_with_its_host(config):
    config = resolve(config)
    first = processes.facts(config)
    second = processes.facts(config)
    assert processes.differences([first, second]) == ""
    other = second | {"host": "worker-1", "commit": "abc", "platform": "tpu"}
    message = processes.differences([first, second, other])
    assert "process 2 on worker-1 has commit 'abc'" in message and "has platform 'tpu'" in message
    assert "process 1 " not in message


def test_sampling_ahead_on_several_devices_needs_some_that_only_sample(config):
    config.rollout.max_staleness = 1
    with pytest.raises(ValueError, match=r"rollout.max_staleness=1 on 8 devices needs .* Set rollout.devices, to 4"):
        processes.check(resolve(config))
    config.rollout.devices = 4
    processes.check(resolve(config))


@pytest.mark.parametrize("asked, given", [("gpu", "cuda"), ("cuda", "cuda"), ("rocm", "rocm")])
def test_every_gpu_is_what_jax_calls_gpu(config, monkeypatch, asked, given):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config.run.platform = asked
    processes.join(config)
    assert updates == {"jax_platforms": given}


def test_another_platform_than_the_one_asked_for_is_refused(config, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    config.run.platform = "gpu"
    with pytest.raises(ValueError, match="run.platform='gpu', but JAX found 'cpu' on"):
        processes.join(config)


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize\nbackend 'tpu'"), AssertionError()])
def test_a_device_that_does_not_answer_is_one_line_that_names_its_holder(config, monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setattr(processes, "device_holders", lambda: {101: "python train.py"})
    with pytest.raises(ValueError, match=r"^no accelerator on .+\. It is held by process 101 \(python train"):
        processes.join(config)


def test_a_process_that_holds_the_device_is_named(tmp_path):
    for pid, device in ((101, "/dev/accel0"), (102, "/dev/null"), (os.getpid(), "/dev/accel0")):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to(device)
        (tmp_path / str(pid) / "cmdline").write_bytes(b"python\0train.py\0")
    assert processes.device_holders(tmp_path) == {101: "python train.py"}


@pytest.mark.slow  # a process that starts JAX
@pytest.mark.parametrize("platforms, override", [("cuda", []), ("", ["--config.run.platform=gpu"])])
def test_an_accelerator_that_is_not_there_is_one_line(tmp_path, platforms, override):
    command = [sys.executable, "-m", "rpg_jax.train", f"--config.run.dir={tmp_path}", *override]
    env = os.environ | {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not any(tmp_path.iterdir())
    last = done.stderr.splitlines()[-1]  # CUDA itself may have said more
    assert last.startswith("error: no accelerator on ") and "cuda" in last and "Traceback" not in done.stderr
