"""The guessing game and the calculator, played by plain functions."""

from __future__ import annotations

import functools
from random import Random

import numpy as np
import pytest

from rpg_jax.data import Calculations, Guessing
from rpg_jax.data.guessing import DIGITS
from rpg_jax.environments import ENVIRONMENTS, Posed, Turn
from rpg_jax.environments.calculator import Calculator
from rpg_jax.environments.demonstrations import played
from rpg_jax.environments.narrowing import Narrowing

GAMES, TASK = Guessing().problems("held out", 300), Calculations()
TURNS = 5


def posed(problem):
    return Posed(problem.prompt, problem.answer, problem.question)


def step(environment, answer, text):
    return environment.step(Posed("", answer, ""), [], text)


def halving(first, last, _):
    return (first + last) // 2


def anywhere(first, last, number):
    return first + number % (last + 1 - first)


def player(problem, choose, *, listens=True):
    """Chooses from what is left, or from the first range."""
    random = Random(problem.prompt_id)
    numbers = [random.randrange(10**9) for _ in range(TURNS)]

    def guess(heard):
        left = [problem.prompt, *heard][-1 if listens else 0]
        return DIGITS[choose(DIGITS.index(left[0]), DIGITS.index(left[2]), numbers[len(heard)])]

    return guess


def found(make) -> float:
    """The share of secrets that players find in five turns."""
    return np.mean([played(Narrowing(base=36), posed(p), make(p), turns=TURNS)[1] > 0 for p in GAMES])


def test_halving_finds_every_secret_and_the_pupils_of_the_warm_start_a_third():
    assert found(lambda p: player(p, halving)) == 1
    assert 0.21 < found(lambda p: player(p, anywhere, listens=False)) < 0.31
    assert 0.71 < found(lambda p: player(p, anywhere)) < 0.81
    assert 0.3 < found(lambda p: functools.partial(Guessing().guess, p)) < 0.42


def test_a_wrong_guess_hears_what_is_left_and_finding_the_secret_pays_less_for_every_turn():
    game, problem = Narrowing(cost=0.1), Posed("Guess a number of 5-40", "19", "")
    for guesses, left in ((["18"], "19-40"), (["30"], "5-29"), (["9", "30", "7", "33"], "10-29"), (["-3"], "5-40")):
        turns = [*guesses, "19"]
        _, reward, conversation = played(game, problem, lambda heard, turns=turns: turns[len(heard)], turns=5)
        assert conversation[-2]["content"] == left and reward == pytest.approx(1 - 0.1 * len(guesses))
    for text in ("", "1 9", "19.0", "nineteen", "١٩", "1" * 19, "f", "1_0"):
        assert game.step(problem, [], text) == Turn("5-40")
    assert game.step(problem, [], " 19 ") == game.step(problem, [], "019") == Turn("", 1.0, True)
    assert Narrowing(base=16).step(Posed("1-f", "e", ""), [], "A") == Turn("b-f")
    with pytest.raises(ValueError, match="ends with a range"):
        game.reset(Posed("Guess!", "19", ""))


def test_a_call_hears_the_exact_value_and_an_answer_ends_the_conversation():
    calculator = Calculator()
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


@pytest.mark.parametrize("name", ["guessing", "calculator"])
def test_a_game_opens_with_the_problems_own_prompt_and_keeps_nothing(name):
    environment = ENVIRONMENTS[name].make({"cost": 0.25})
    problem = Posed("1-3", "2", "", system="Be brief.")
    assert environment.reset(problem) == problem.messages
    assert environment.step(problem, [], "3") == environment.step(problem, problem.messages, "3")


def test_a_third_of_the_pupils_calculations_are_right_and_sums_more_often_than_products():
    right = {"+": [], "*": []}
    for problem in TASK.problems("train", 1500):
        pupil = functools.partial(TASK.turn, problem)
        _, reward, conversation = played(Calculator(), posed(problem), pupil, turns=3)
        right[problem.prompt[2]].append(reward > 0)
        assert len(conversation) == (3 if conversation[0]["content"].startswith("calc ") else 1)
    assert 0.88 < np.mean(right["+"]) < 0.95 and 0.14 < np.mean(right["*"]) < 0.2
    assert 0.3 < np.mean(right["+"] + right["*"]) < 0.4


def test_a_conversation_ends_with_the_players_turn_after_the_last_that_he_has():
    prompt, reward, conversation = played(Narrowing(base=36), posed(GAMES[0]), lambda heard: "-1", turns=2)
    assert prompt == [{"role": "user", "content": GAMES[0].prompt}]
    assert [m["role"] for m in conversation] == ["assistant", "user", "assistant"] and reward == 0
