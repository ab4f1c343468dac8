"""Real trainers with real workers on loopback: the same weights to the bit as without a fleet."""

import faulthandler
import re
import subprocess

import pytest

from tests.end_to_end.fleet_chaos import SETTINGS, Crew, chaos, fleet_overrides
from tests.end_to_end.test_processes import assert_same_run, printed, reserve_port, run, samples, start

STEPS = (*SETTINGS, "--config.train.steps=4", "--config.mesh.fsdp=1", "--config.mesh.replica=1")


def with_workers(folder, workers, processes, *overrides, devices=None):
    """The trainer's output with this many workers, which all must end with 0."""
    reserved, port = reserve_port()
    reserved.close()
    trainer = start(folder, processes, *overrides, *fleet_overrides(port), devices=devices or processes)
    with Crew(folder, port) as crew:
        for _ in range(workers):
            crew.add()
        outputs = printed(trainer, timeout=600)
        assert all(process.returncode == 0 for process in trainer), "\n\n".join(outputs)
        assert crew.ended(timeout=60) == [0] * workers
    return outputs


def checksum(output):
    return re.search("weights checksum: .*", output).group()


@pytest.mark.slow
def test_two_workers_sample_what_the_trainer_alone_samples_and_the_weights_are_equal_to_the_bit(tmp_path):
    alone = run(tmp_path, 1, *STEPS, "--config.run.name=alone", devices=1)
    fleet = with_workers(tmp_path, 2, 1, *STEPS, "--config.run.name=fleet")
    assert_same_run(tmp_path / "alone", tmp_path / "fleet")
    assert checksum(fleet[0]) == checksum(alone[0])


@pytest.mark.slow
def test_several_hosts_sample_ahead_of_training_through_a_fleet(tmp_path, monkeypatch):
    """A batch comes from the weights one step before; one process with a fleet trains on the same completions.

    The hosts and the workers of the second fleet speak by TLS, with a key.
    """
    settings = (*SETTINGS, "--config.train.steps=4", "--config.rollout.max_staleness=1", "--config.evaluation.every=2")
    settings += ("--config.mesh.replica=1", "--config.optimizer.learning_rate=1e-5")
    with_workers(tmp_path, 1, 1, *settings, "--config.mesh.fsdp=1", "--config.run.name=one")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=rpg-fleet -addext subjectAltName=DNS:rpg-fleet"
    )
    files = {"-keyout": "PRIVATE_KEY", "-out": "CERTIFICATE"}
    out = [word for flag, name in files.items() for word in (flag, str(tmp_path / name))]
    subprocess.run([*command.split(), *out], check=True, capture_output=True)
    for name in files.values():
        monkeypatch.setenv(f"RPG_JAX_{name}", (tmp_path / name).read_text())
    monkeypatch.setenv("RPG_JAX_API_KEY", "f0" * 16)
    with_workers(tmp_path, 2, 2, *settings, "--config.mesh.fsdp=2", "--config.run.name=two")
    assert samples(tmp_path / "one") == samples(tmp_path / "two")


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_workers_that_are_killed_stopped_and_added_change_nothing(tmp_path):
    faulthandler.cancel_dump_traceback_later()  # pytest's, which ends a worker after 21 minutes
    figures = chaos(tmp_path, steps=200, processes=2, seed=0, pause=(0.3, 2.0), patience=3 * 3600)
    print(figures)
    assert sum(figures["events"].values()) >= 40 and figures["differing"] == 0
