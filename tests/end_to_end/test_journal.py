"""A run that is killed in the middle of a rollout samples only what is missing, and ends with the same bits."""

import signal
import time

import pytest

from rpg_jax.storage import journal
from tests.end_to_end import test_processes, test_train
from tests.end_to_end.servers_chaos import SETTINGS as SMALL
from tests.end_to_end.test_train import checksum, interrupted, metrics, run

SETTINGS = ("--config.train.steps=6", "--config.checkpoint.every=3", "--config.run.name=r")


def journaled(run_dir):
    """Completions in the journal by step and file, where it has no damage but at the end of a file."""
    found = {}
    for path in sorted((run_dir / "journal").rglob("*.groups")):
        records, damaged = journal.from_bytes(path.read_bytes())
        assert damaged <= 1
        assert {r.key["step"] for r in records} <= {int(path.parent.name)}
        found[path.parent.name, path.name] = sum(len(r.completions) for r in records)
    return found


def counts(run_dir):
    """(found, sampled) of each step."""
    lines = test_train.metrics(run_dir, times=True)[1:]
    return [(line["host/journal_found"], line["host/journal_sampled"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "groups"),
    [
        ((), 30),
        pytest.param(("--config.rollout.driver=lockstep",), 30, marks=pytest.mark.soak),
        (("--config.rollout.max_staleness=1",), 30),
        (("--config.rollout.partial_tokens=2",), 50),
    ],
    ids=["orchestrator", "lockstep", "ahead", "partial"],
)
def test_a_run_killed_in_the_middle_of_a_rollout_samples_what_is_missing(warm, tmp_path, how, groups):
    straight = run(warm, tmp_path / "straight", *SETTINGS, *how)
    killed = tmp_path / "killed" / "r"
    done = interrupted(warm, killed.parent, (*SETTINGS, *how), "journal", groups, 0, int(signal.SIGKILL))
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    complete = journaled(killed)
    assert len(complete) > 1 and not any((killed / "checkpoints").glob("[0-9]*")), "the second step samples"
    resumed = run(warm, killed.parent, *SETTINGS, *how)
    assert checksum(resumed) == checksum(straight)
    assert metrics(killed) == metrics(tmp_path / "straight" / "r")
    was, now = counts(tmp_path / "straight" / "r"), counts(killed)
    assert sum(found for found, _ in was) == 0 and sum(found for found, _ in now) == sum(complete.values())
    assert sum(map(sum, now)) == sum(map(sum, was)), "nothing is sampled twice and nothing is left out"
    if not how:
        assert now[0] == (was[0][1], 0), "the first step samples nothing"
    assert not journaled(killed), "after the last checkpoint nothing is kept"


@pytest.mark.soak  # two processes three times
@pytest.mark.timeout(3600)  # on busy cores
@pytest.mark.parametrize("driver", ["orchestrator", "lockstep"])
def test_hosts_that_are_killed_sample_what_is_missing(tmp_path, driver):
    settings = (*SMALL, "--config.mesh.fsdp=2", "--config.mesh.replica=1", f"--config.rollout.driver={driver}")
    settings += ("--config.train.steps=4", "--config.checkpoint.every=4")
    straight = test_processes.run(tmp_path, 2, *settings, "--config.run.name=straight", devices=2)[0]
    running = test_processes.start(tmp_path, 2, *settings, "--config.run.name=killed", devices=2)
    killed = tmp_path / "killed"
    while not (killed / "journal" / "1").exists() and all(process.poll() is None for process in running):
        time.sleep(0.002)
    early = [process.returncode for process in running]
    for process in running:
        process.send_signal(signal.SIGKILL)
    said = [process.communicate()[0] for process in running]
    assert early == [None, None], "\n".join(said)
    complete = journaled(killed)
    assert {name for _, name in complete} == {"0.groups", "1.groups"}
    resumed = test_processes.run(tmp_path, 2, *settings, "--config.run.name=killed", devices=2)[0]
    assert resumed.splitlines()[-1] == straight.splitlines()[-1]
    found = sum(found for found, _ in counts(killed))
    assert 0 < found <= sum(complete.values())
    assert metrics(killed) == metrics(tmp_path / "straight")
