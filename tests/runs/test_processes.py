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
    assert processes.device_holders(tmp_path / "missing") == {}  # macOS has no /proc


@pytest.mark.slow  # a process that starts JAX
@pytest.mark.parametrize("platforms, override", [("cuda", []), ("", ["--config.run.platform=gpu"])])
def test_an_accelerator_that_is_not_there_is_one_line(tmp_path, platforms, override):
    command = [sys.executable, "-m", "rpg_jax.train", f"--config.run.dir={tmp_path}", *override]
    env = os.environ | {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not any(tmp_path.iterdir())
    last = done.stderr.splitlines()[-1]  # CUDA itself may have said more
    assert last.startswith("error: no accelerator on ") and "cuda" in last and "Traceback" not in done.stderr
