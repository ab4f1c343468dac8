"""Reward functions that a program hands over run in its process, plain or async, under the name that configs keep."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import pytest

from rpg_jax.rewards import callables
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rewards.verdicts import failure

HERE = __name__


def close(completion, answer, prompt, *, digits=1):
    if completion == "?":
        raise RuntimeError("no number")
    return round(1 / (1 + abs(int(completion) - int(answer))), digits)


def scored(reward, texts, **options):
    weights, functions = callables.named(reward)
    with Scorer(weights, handed=functions, **options) as scorer:
        problems = [SimpleNamespace(prompt="2+2=", answer="4", source="s")] * len(texts)
        return scorer(problems, texts, [1] * len(texts))


def test_a_function_is_called_here_and_its_failures_are_counted():
    scores = scored({close: 2.0, "exact": 0.5}, ["4", "5", "?"], accuracy="exact")
    assert scores.rewards.tolist() == [2.5, 1.0, 0.0] and scores.errors == {"error": 1}
    assert [*scores.parts] == [f"{HERE}:close", "exact"]


def test_a_failure_is_never_right_where_right_begins_below_zero():
    def distance(completion, answer, prompt):
        return -abs(int(completion) - int(answer))

    scores = scored(distance, ["4", "3", "?"], right_above=-0.5)
    assert scores.accuracy.tolist() == [1, 0, 0] and scores.failures == [None, None, "error"]


def wellformed(completion, answer, prompt):
    """0.1 for a whole number, 1 if it is right too."""
    return 1.0 if completion == answer else 0.1 * completion.isdigit()


def test_a_grade_that_decides_accuracy_is_refused_with_the_line_to_add():
    texts = [*["5"] * 124, "4"]
    line = r"decides accuracy, and its score 0\.1 is neither right \(1\) nor wrong .*: add --config.rewards.right_above"
    with pytest.raises(ValueError, match=f"the reward '{HERE}:wellformed' {line}"):
        scored(wellformed, texts)
    named = scored(wellformed, texts, right_above=0.5)
    assert named.rewards.mean() == pytest.approx(0.1072) and named.accuracy.mean() == pytest.approx(1 / 125)
    assert scored(wellformed, texts, right_above=0.0).accuracy.mean() == 1.0, "who asks for it gets it"
    assert scored({wellformed: 1.0, "exact": 0.0}, texts, accuracy="exact").accuracy.mean() == pytest.approx(1 / 125)


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_verdicts_need_no_threshold(wrong, capsys):
    scores = scored(lambda completion, answer, prompt: 1 if completion == answer else wrong, ["4", "5"])
    assert scores.rewards.tolist() == [1, wrong] and scores.accuracy.tolist() == [1, 0] and not capsys.readouterr().err


def test_a_rare_grade_is_noted_once_after_a_thousand_verdicts_and_in_a_run_that_goes_on(capsys):
    weights, functions = callables.named(wellformed)

    def score(scorer, texts):
        problems = [SimpleNamespace(prompt="", answer="4", source="s")] * len(texts)
        return scorer(problems, texts, [1] * len(texts)).accuracy.tolist()

    for begins, before in ((True, 1000), (False, 1)):
        with Scorer(weights, handed=functions, begins=begins) as scorer:
            score(scorer, ["4"] * before)
            assert [score(scorer, ["5", "4"]) for _ in range(3)] == [[0, 1]] * 3
        said = capsys.readouterr().err
        assert said.count("note: the reward") == 1 and "A score below 1 counts as wrong" in said
    with Scorer(weights, handed=functions) as scorer:
        score(scorer, ["4"] * 999)
        with pytest.raises(ValueError, match="neither right"):
            score(scorer, ["5"])


def test_what_dynamic_sampling_compares_is_the_reward_without_its_shaping_terms():
    weights, how = {"exact": 1.0, wellformed: 0.5, "format": 0.25}, {"format": {"pattern": "number"}}
    scores = scored(weights, ["4", "5", "x"], accuracy="exact", options=how)
    assert scores.unshaped.tolist() == pytest.approx([1.5, 0.05, 0.0], rel=1e-6)  # f32
    assert scores.rewards.tolist() == pytest.approx([1.75, 0.3, 0.0], rel=1e-6)


def test_async_calls_run_together_where_a_loop_is_running_and_a_late_one_is_cancelled():
    everyone, cancelled = asyncio.Barrier(3), []

    async def judge(completion, answer, prompt):
        if completion == "late":
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(completion)
        await everyone.wait()  # the three pass only together
        return float(completion == answer)

    async def notebook():
        return scored(judge, ["4", "5", "6", "late"], deadline_s=0.2)

    scores = asyncio.run(notebook())
    assert scores.rewards.tolist() == [1, 0, 0, 0]
    assert scores.errors == {"timeout": 1} and cancelled == ["late"]


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no message")

    __repr__ = __str__


@pytest.mark.parametrize("error", [Unreadable(), KeyError(Unreadable()), SystemExit(Unreadable())])
def test_an_error_whose_message_cannot_be_read_costs_its_own_verdict(error):
    def plain(completion, answer, prompt):
        if completion == "?":
            raise error
        return float(completion == answer)

    async def judge(completion, answer, prompt):
        return plain(completion, answer, prompt)

    for reward in (plain, judge):
        scores = scored(reward, ["4", "?", "5"], deadline_s=5.0)
        assert scores.rewards.tolist() == [1, 0, 0] and scores.errors == {"error": 1}
    assert failure(error).detail.startswith(type(error).__name__)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_exit_in_a_reward_costs_its_own_verdict_and_nobody_waits_for_ever(error):
    async def judge(completion, answer, prompt):
        if completion == "exit":
            raise error
        return float(completion == answer)

    def plain(completion, answer, prompt):
        return asyncio.run(judge(completion, answer, prompt))

    for reward in (judge, plain)[: 1 if error is KeyboardInterrupt else 2]:  # it stops what runs in the caller's thread
        scores = scored(reward, ["4", "exit", "5"], deadline_s=5.0)
        assert scores.rewards.tolist() == [1, 0, 0] and scores.errors == {"error": 1}


def swapped(prompt, completion, gold):
    return float(completion == gold)


def test_what_cannot_be_named_or_called_is_refused_before_anything_runs():
    assert [*callables.named(functools.partial(close, digits=2))[0]] == [f"{HERE}:close"]
    with pytest.raises(ValueError, match=rf"two rewards are called {HERE}:.*<lambda>: give each function a name"):
        callables.named({(lambda c, a, p: 1): 1.0, (lambda c, a, p: 0): 1.0})
    with pytest.raises(ValueError, match=r"\(completion, answer, prompt\) or .*\(completion, answer\), with strings"):
        callables.named(lambda completion: 1.0)
    with pytest.raises(ValueError, match=r"swapped\(prompt, completion, gold\): its 'prompt' would be the completion"):
        callables.named(swapped)
    with pytest.raises(ValueError, match="its 'completions' would be the completion"):
        callables.named(lambda completions, answer, **columns: [1.0])  # a list, as TRL hands it over
    with pytest.raises(ValueError, match="a reward is a function or the name of a part, got int"):
        callables.named({3: 1.0})


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({}, "give a function, a name, or their weights"),
        (["exact"], "give a function, a name, or their weights"),
        ({"exact": None}, "the weight of the reward 'exact' must be a number, got None"),
        ("my.py", "name its function too, as my.py:FUNCTION"),
    ],
)
def test_what_says_no_reward_is_refused(reward, said):
    with pytest.raises(ValueError, match=said):
        callables.named(reward)


def two(completion, answer):
    return float(completion == answer)


def option(completion, answer, tolerance=0.5):
    return float(abs(float(completion) - float(answer)) < tolerance)


async def waits(completion, answer):
    return float(completion == answer)


def three(completion, answer, prompt=""):
    return float(prompt == "2+2=" and completion == answer)


@pytest.mark.parametrize("function", [two, option, waits, three])
def test_a_reward_may_leave_the_prompt_out_here_and_in_a_worker(function):
    assert scored(function, ["4", "5"]).rewards.tolist() == [1, 0]
    if function is not waits:  # workers call plain functions
        assert scored(f"{HERE}:{function.__name__}", ["4", "5"], workers=1).rewards.tolist() == [1, 0]
