"""A run killed thirty times, in every part of it, ends with the weights and metrics of one that was left alone."""

import collections
import random
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.conversing import FLAGS, without_rounding
from tests.end_to_end.killed import POINTS, WITH_TURNS
from tests.end_to_end.test_train import ROOT, checksum, command, environment, metrics, run

KILLS = 30
ENDS = (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM)  # the last: before the run listens
SETTINGS = (
    "--config.train.steps=30",
    "--config.reference.every=3updates",
    "--config.evaluation.problems=16",
    "--config.evaluation.every=4",  # of two checkpoints one comes with an evaluation
    "--config.run.name=r",
)


@pytest.mark.soak  # a process and its compiled programs for every kill
@pytest.mark.parametrize(("flags", "points"), [((), POINTS), (FLAGS, WITH_TURNS)], ids=["answers", "conversations"])
def test_thirty_kills_in_every_part_of_a_run_change_nothing(tmp_path, flags, points):
    straight = run(tmp_path, tmp_path / "straight", *SETTINGS, *flags)
    expected = metrics(tmp_path / "straight" / "r")
    expected = without_rounding(expected) if flags else expected
    rng, landed, rounds = random.Random(0), collections.Counter(), 0
    while landed.total() < KILLS or min(landed[point, how] for point in points for how in ("SIGKILL", "SIGTERM")) == 0:
        rounds += 1
        runs, finished = tmp_path / f"round-{rounds}", False
        while not finished:
            point = min(points, key=lambda p: (sum(landed[p, how] for how in ("SIGKILL", "SIGTERM")), rng.random()))
            how = min(("SIGKILL", "SIGTERM"), key=lambda how: (landed[point, how], rng.random()))
            calls = 400 if point == "turn" else 4
            arguments = [point, rng.randint(1, calls), rng.uniform(0, 0.05), int(signal.Signals[how])]
            train = command(tmp_path, runs, *SETTINGS, *flags)
            done = subprocess.run(
                [sys.executable, "-m", "tests.end_to_end.killed", *map(str, arguments), *train[3:]],
                cwd=ROOT,
                env=environment(tmp_path),
                capture_output=True,
                text=True,
            )
            finished = done.returncode == 0
            assert finished or done.returncode in ENDS, done.stdout + done.stderr
            landed[point, how] += not finished
        assert checksum(done) == checksum(straight), arguments
        found = metrics(runs / "r")
        assert (without_rounding(found) if flags else found) == expected, arguments
    print(dict(landed), rounds)
