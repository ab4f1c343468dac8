"""Arithmetic with a calculator: answers are right, the sets are apart, calls hear exact values."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from examples.calculator import SETS as HELD_OUT_SETS
from examples.calculator import Game, Problems
from rpg_jax.environments import Declaration, Posed, Turn, play

TASK = Problems()
SETS = {name: TASK.problems(name) for name in ("train", *HELD_OUT_SETS)}


def operands(problem):
    return int(problem.prompt[:2]), problem.prompt[2], int(problem.prompt[3:5])


def test_answers_are_right_and_sums_never_carry():
    for problem in [*SETS["train"], *SETS["held out"]]:
        a, operator, b = operands(problem)
        assert problem.prompt == f"{a}{operator}{b}=" and min(a, b) >= 10
        assert int(problem.answer) == (a + b if operator == "+" else a * b)
        assert operator == "+" or len(problem.answer) == 4
        assert operator == "*" or (a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10)


def test_no_pair_of_operands_is_in_training_and_held_out():
    pairs = {name: {frozenset(operands(p)[::2]) for p in SETS[name]} for name in SETS}
    for name in HELD_OUT_SETS:
        assert not pairs["train"] & pairs[name]
    assert {*SETS["held out"]} <= {*SETS["easy"], *SETS["hard"]}
    assert {p.prompt[2] for p in SETS["easy"]} == {"+"} and {p.prompt[2] for p in SETS["hard"]} == {"*"}


@pytest.mark.parametrize("name", ["train", "held out"])
def test_a_quarter_of_the_problems_are_sums(name):
    assert 0.22 < np.mean([p.prompt[2] == "+" for p in SETS[name]]) < 0.28
    assert len({p.prompt_id for p in SETS[name]}) == len(SETS[name])


def test_the_order_depends_on_the_seed_alone():
    assert Problems().problems("train", 50) == SETS["train"][:50] != TASK.problems("train", 50, seed=1)


def test_the_pupil_calls_for_sums_as_for_products_and_copies_the_result():
    calls = {"+": [], "*": []}
    for problem in SETS["train"][:2000]:
        calls[problem.prompt[2]].append(TASK.turn(problem, []) == f"calc {problem.prompt[:-1]}")
        assert TASK.turn(problem, ["3108"]) == "3108"
    assert all(0.13 < np.mean(called) < 0.2 for called in calls.values())


def test_wrong_sets_and_counts_are_refused():
    with pytest.raises(ValueError, match="has the sets train, held out, easy, hard"):
        TASK.problems("test")
    with pytest.raises(ValueError, match="ask for fewer"):
        TASK.problems("easy", 10_000)


def posed(problem):
    return Posed(problem.prompt, problem.answer, problem.question)


def step(environment, answer, text):
    return environment.step(Posed("", answer, ""), [], text)


def test_a_call_hears_the_exact_value_and_an_answer_ends_the_conversation():
    calculator = Game()
    assert step(calculator, "3108", "calc 37*84") == Turn("3108", -0.1)
    assert step(calculator, "", "calc (1-3)/ (2*2)") == Turn("-1/2", -0.1)
    for text in (
        "calc ",
        "calc 1/0",
        "calc 3**9",
        "calc __import__('os')",
        "calc 2 2",
        "calc (1",
        "calc " + "1+" * 500,
    ):
        assert step(calculator, "1", text) == Turn("?", -0.1)
    assert step(calculator, "3108", "3108 ") == Turn("", 1.0, True)
    assert step(calculator, "3108", "calc") == step(calculator, "3108", "3107") == Turn("", 0.0, True)


def test_the_game_opens_with_the_problems_own_prompt_and_keeps_nothing():
    environment = Declaration("examples.calculator:Game").make({"cost": 0.25})
    problem = Posed("1-3", "2", "", system="Be brief.")
    assert environment.reset(problem) == problem.messages
    assert environment.step(problem, [], "3") == environment.step(problem, problem.messages, "3")


def test_a_third_of_the_pupils_calculations_are_right_and_sums_more_often_than_products():
    right = {"+": [], "*": []}
    for problem in TASK.problems("train", 1500):
        pupil = functools.partial(TASK.turn, problem)
        _, reward, conversation = play(Game(), posed(problem), pupil, turns=3)
        right[problem.prompt[2]].append(reward > 0)
        assert len(conversation) == (3 if conversation[0]["content"].startswith("calc ") else 1)
    assert 0.88 < np.mean(right["+"]) < 0.95 and 0.14 < np.mean(right["*"]) < 0.2
    assert 0.3 < np.mean(right["+"] + right["*"]) < 0.4
