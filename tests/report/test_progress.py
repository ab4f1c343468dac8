"""The live display as a user reads it, on a clock that the test turns."""

from __future__ import annotations

import io

import pytest

from rpg_jax.report.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown(stream):
    return stream.getvalue().splitlines()


def test_plain_lines_come_every_few_seconds_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    with Progress(10, stream=stream, clock=clock, every=5.0) as progress:
        for step in range(1, 11):
            progress.update(step, {"reward": step / 10})
            clock.now += 2.0
    assert [line.split(" | ")[0] for line in shown(stream)] == [
        f"training: step {step}/10" for step in (1, 4, 7, 10)
    ]  # at 0, 6, 12 and 18 s
    assert "reward +0.40" in shown(stream)[1]


def test_a_step_that_is_shown_again_and_again_is_no_new_line_and_its_time_counts_once():
    stream, clock = io.StringIO(), Clock()
    with Progress(3, title="2 runs", stream=stream, clock=clock, every=9.0) as progress:
        for step in (1, 1, 2, 2, 2, 2, 3, 3, 3):
            progress.update(step, {}, title=f"{step - 1}/2 runs")
            clock.now += 1.0
            assert step != 2 or progress.time_left() == "2 s left"
    assert shown(stream) == ["0/2 runs: step 1/3", "2/2 runs: step 3/3", "2/2 runs: step 3/3"]


def test_a_run_that_stops_early_still_shows_its_last_step():
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress(10, stream=stream, clock=Clock()) as progress:
        progress.update(1, {})
        progress.update(2, {})
        raise KeyboardInterrupt
    assert shown(stream)[-1].startswith("training: step 2/10")


def test_time_left_ignores_the_first_step_which_compiles():
    clock = Clock()
    progress = Progress(12, stream=io.StringIO(), clock=clock)
    clock.now = 60.0  # compilation
    progress.update(1, {})
    assert progress.time_left() == ""
    clock.now += 3.0
    progress.update(2, {})
    assert progress.time_left() == "30 s left"


def test_a_resumed_run_counts_from_where_it_was():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, first=90, stream=stream, clock=clock) as progress:
        progress.update(91, {})
        clock.now += 2.0
        progress.update(92, {})
    assert shown(stream)[-1] == "training: step 92/100 | 16 s left"


def test_evaluations_stay_on_display_between_their_steps():
    stream = io.StringIO()
    with Progress(3, stream=stream, clock=Clock(), every=0.0) as progress:
        progress.update(1, {"eval/accuracy": 0.5})
        progress.update(2, {"accuracy": 0.7})
    assert shown(stream)[-1].startswith("training: step 2/3 | accuracy 0.70 | held out 0.50")


def test_warm_start_shows_its_metric_beside_the_goal():
    stream = io.StringIO()
    with Progress(goal=0.55, title="warm start", stream=stream, clock=Clock(), every=0.0) as progress:
        progress.update(50, {"accuracy": 0.42})
    assert shown(stream) == ["warm start: accuracy 0.42 / 0.55"]


def test_nan_is_shown_as_what_it_is():
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=Clock()) as progress:
        progress.update(1, {"kl": float("nan")})
    assert "KL nan" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_numbers_and_notes_that_stay():
    stream = Terminal()
    with Progress(4, stream=stream, clock=Clock()) as progress:
        progress.update(2, {"accuracy": 0.5})
        progress.note("checkpoint [2] written")
    assert "━" in stream.getvalue() and "accuracy 0.50" in stream.getvalue()
    assert "checkpoint [2] written" in stream.getvalue()


def test_either_steps_or_a_goal():
    with pytest.raises(ValueError, match="either total"):
        Progress()
    with pytest.raises(ValueError, match="either total"):
        Progress(10, goal=0.5)


@pytest.mark.parametrize(
    "seconds, text", [(12.4, "12 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
