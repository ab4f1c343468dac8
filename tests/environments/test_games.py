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
from rpg_jax.environments.higher_lower import HigherLower

GAMES, TASK = Guessing().problems("held out", 300), Calculations()
TURNS = 6


def posed(problem):
    return Posed(problem.prompt, problem.answer, problem.question)


def step(environment, answer, text):
    return environment.step(Posed("", answer, ""), [], text)


def left(problem, heard, player) -> tuple[int, int]:
    """The range that is left after the answers to the guesses of `player`, who repeats himself."""
    first, last = DIGITS.index(problem.prompt[0]), DIGITS.index(problem.prompt[2])
    for place, answer in enumerate(heard):
        guess = DIGITS.index(player(heard[:place]))
        first, last = (max(first, guess + 1), last) if answer == ">" else (first, min(last, guess - 1))
    return first, last


def halving(problem):
    def player(heard):
        first, last = left(problem, heard, player)
        return DIGITS[(first + last) // 2]

    return player


def consistent(problem):
    def player(heard):
        first, last = left(problem, heard, player)
        return DIGITS[Random(f"{problem.prompt_id} {len(heard)}").randint(first, last)]

    return player


def random(problem):
    first, last = left(problem, [], random)
    return lambda heard: DIGITS[Random(f"{problem.prompt_id} {len(heard)}").randint(first, last)]


def found(player) -> float:
    """The share of secrets that are found in six turns."""
    return np.mean([played(HigherLower(base=36), posed(p), player(p), turns=TURNS)[1] > 0 for p in GAMES])


def test_halving_finds_every_secret_and_the_pupils_of_the_warm_start_a_third():
    assert found(halving) == 1
    assert 0.24 < found(random) < 0.3
    assert 0.81 < found(consistent) < 0.88
    task = Guessing()
    assert 0.32 < found(lambda problem: functools.partial(task.guess, problem)) < 0.4


def test_a_guess_hears_where_the_secret_is_and_finding_it_pays_less_for_every_turn():
    game = HigherLower(cost=0.1)
    assert step(game, "19", "18") == step(game, "05", "-3") == Turn(">") and step(game, "19", "20") == Turn("<")
    assert step(game, "19", " 19 ") == step(game, "09", "9") == step(game, "9", "09") == Turn("", 1.0, True)
    players = [lambda heard, n=n: "7" if len(heard) == n else "0" for n in range(3)]
    assert step(HigherLower(base=16), "f", "e") == Turn(">") and step(HigherLower(base=16), "f", "F").done
    rewards = [played(game, Posed("", "7", ""), player, turns=5)[1] for player in players]
    assert rewards == pytest.approx([1.0, 0.9, 0.8])
    for text in ("", "1 9", "19.0", "nineteen", "١٩", "1" * 19, "f", "1_0"):
        assert step(game, "19", text) == Turn("?")


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
    problem = Posed("1+1=", "2", "", system="Be brief.")
    assert environment.reset(problem) == problem.messages
    assert environment.step(problem, [], "3") == environment.step(problem, problem.messages, "3")


def test_a_third_of_the_pupils_calculations_are_right_and_sums_more_often_than_products():
    right = {"+": [], "*": []}
    for problem in TASK.problems("train", 1500):
        pupil = functools.partial(TASK.turn, problem)
        _, reward, conversation = played(Calculator(), posed(problem), pupil, turns=3)
        right[problem.prompt[2]].append(reward > 0)
        assert len(conversation) == (3 if conversation[0]["content"].startswith("calc ") else 1)
    assert 0.7 < np.mean(right["+"]) < 0.84 and 0.1 < np.mean(right["*"]) < 0.17
    assert 0.3 < np.mean(right["+"] + right["*"]) < 0.4


def test_a_conversation_ends_with_the_players_turn_after_the_last_that_he_has():
    prompt, reward, conversation = played(HigherLower(base=36), posed(GAMES[0]), lambda heard: "-1", turns=2)
    assert prompt == [{"role": "user", "content": GAMES[0].prompt}]
    assert [m["role"] for m in conversation] == ["assistant", "user", "assistant"] and reward == 0
