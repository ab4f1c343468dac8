"""Runs with an environment: killed in the middle of conversations, and with one that hangs, dies and lies."""

import signal

import pytest

from tests.end_to_end.conversing import FAILURES, FLAGS, MOODY, without_rounding
from tests.end_to_end.test_journal import counts, journaled
from tests.end_to_end.test_train import checksum, interrupted, metrics, run

SETTINGS = (*FLAGS, "--config.train.steps=4", "--config.checkpoint.every=4", "--config.evaluation.every=4")
NAMED = (*SETTINGS, "--config.run.name=r")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        (),
        pytest.param(("--config.rollout.driver=lockstep",), marks=pytest.mark.soak),
        # The loss reads the sampler's bits, so no slot may be lent: as many slots as conversations.
        ("--config.rollout.max_staleness=1", "--config.rollout.slots=32"),
    ],
    ids=["orchestrator", "lockstep", "ahead"],
)
def test_a_run_killed_in_the_middle_of_conversations_ends_with_the_same_weights(shared, tmp_path, how):
    straight = run(shared, tmp_path / "straight", *NAMED, *how)
    killed, turn = tmp_path / "killed" / "r", 64 * 4 + 32 * 4  # beyond the first evaluation
    done = interrupted(shared, killed.parent, (*NAMED, *how), "turn", turn, 0, int(signal.SIGKILL))
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    complete = sum(journaled(killed).values())
    assert not any((killed / "checkpoints").glob("[0-9]*"))
    resumed = run(shared, killed.parent, *NAMED, *how)
    assert checksum(resumed) == checksum(straight)
    assert without_rounding(metrics(killed)) == without_rounding(metrics(tmp_path / "straight" / "r"))
    was, now = counts(tmp_path / "straight" / "r"), counts(killed)
    assert sum(found for found, _ in now) == complete and sum(map(sum, now)) == sum(map(sum, was))


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["orchestrator", pytest.param("lockstep", marks=pytest.mark.soak)])
def test_an_environment_that_hangs_dies_and_lies_is_counted_and_nothing_hangs(shared, tmp_path, driver):
    options = (
        MOODY,
        "--config.train.steps=2",
        "--config.evaluation.every=2",
        "--config.rewards.deadline_seconds=1",
        "--config.rewards.max_failures=0.9",
        f"--config.rollout.driver={driver}",
    )
    run(shared, tmp_path, *NAMED, *options)
    lines = metrics(tmp_path / "r")
    assert [line["step"] for line in lines] == [0, 1, 2]
    failed = {name.partition("/")[2] for line in lines for name in line if name.startswith("environment_errors/")}
    assert failed == FAILURES
    for line in lines[1:]:
        errors = sum(value for name, value in line.items() if name.startswith("environment_errors/"))
        assert 0 < errors < line["groups_generated"] * 4, "some conversations fail, and others do not"
        assert 0 <= line["accuracy"] <= 1 and abs(line["reward"]) < 2
        lost = sum(line.get(f"environment_errors/{kind}", 0) for kind in ("timeout", "crash"))
        assert round(line["failed"] * line["groups_generated"] * 4) == lost, "asked twice, and left out"
        assert line["skipped_updates"] == 0
