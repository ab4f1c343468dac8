"""The guessing game, played by plain functions: every range is whole in one set, and the pupils are as described."""

from __future__ import annotations

import functools
import re
from random import Random

import numpy as np
import pytest

from examples.guessing import DIGITS, Game, Problems
from rpg_jax.environments import Declaration, Posed, Turn, play

TASK = Problems()
TRAIN, HELD_OUT = TASK.problems("train"), TASK.problems("held out")
GAMES, TURNS = TASK.problems("held out", 300), 5


def bounds(problem):
    assert re.fullmatch(r"[0-9a-z]-[0-9a-z]", problem.prompt)
    return [int(problem.prompt[place], 36) for place in (0, 2)]


def test_every_range_has_all_its_secrets_in_one_set_alone():
    assert not {p.prompt for p in TRAIN} & {p.prompt for p in HELD_OUT}
    secrets: dict[str, set[int]] = {}
    for problem in [*TRAIN, *HELD_OUT]:
        secrets.setdefault(problem.prompt, set()).add(int(problem.answer, 36))
    assert len(secrets) == sum(37 - size for size in range(14, 21))
    for prompt, found in secrets.items():
        first, last = (int(prompt[place], 36) for place in (0, 2))
        assert found == {*range(first, last + 1)} and 14 <= len(found) <= 20 and first <= last
    assert 0.15 < len({p.prompt for p in HELD_OUT}) / len(secrets) < 0.25


def test_prompt_ids_are_distinct_and_the_order_depends_on_the_seed_alone():
    every = [*TRAIN, *HELD_OUT]
    assert len({p.prompt_id for p in every}) == len(every) and max(p.prompt_id for p in every) < 2**31
    again = Problems().problems("train", 100)
    assert again == TRAIN[:100] != TASK.problems("train", 100, seed=1)
    assert {*TASK.problems("train", seed=1)} == {*TRAIN}


def test_one_pupil_in_three_guesses_near_the_middle_of_what_is_left_and_the_others_repeat_themselves():
    places, listens = [], []
    for problem in TRAIN:
        first, last = bounds(problem)
        guess = TASK.guess(problem, [])
        assert guess == TASK.guess(problem, ()) and first <= int(guess, 36) <= last
        again = TASK.guess(problem, ["##", "0-9"])
        listens.append(again != guess)
        if listens[-1]:
            assert again in "234567"
        else:
            places.append((int(guess, 36) - first) / (last - first))
    assert 0.27 < np.mean(listens) < 0.37  # a third, but for those who repeat themselves by chance
    assert 0.45 < np.mean(places) < 0.55 and min(places) == 0 and max(places) == 1


def test_wrong_sets_and_counts_are_refused():
    with pytest.raises(ValueError, match="has the sets train, held out"):
        TASK.problems("test")
    with pytest.raises(ValueError, match="ask for fewer"):
        TASK.problems("held out", 10_000)


def posed(problem):
    return Posed(problem.prompt, problem.answer, problem.question)


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
    return np.mean([play(Game(base=36), posed(p), make(p), turns=TURNS)[1] > 0 for p in GAMES])


def test_halving_finds_every_secret_and_the_pupils_of_the_warm_start_a_third():
    assert found(lambda p: player(p, halving)) == 1
    assert 0.21 < found(lambda p: player(p, anywhere, listens=False)) < 0.31
    assert 0.71 < found(lambda p: player(p, anywhere)) < 0.81
    assert 0.3 < found(lambda p: functools.partial(TASK.guess, p)) < 0.42


def test_a_wrong_guess_hears_what_is_left_and_finding_the_secret_pays_less_for_every_turn():
    game, problem = Game(cost=0.1), Posed("Guess a number of 5-40", "19", "")
    for guesses, left in ((["18"], "19-40"), (["30"], "5-29"), (["9", "30", "7", "33"], "10-29"), (["-3"], "5-40")):
        turns = [*guesses, "19"]
        _, reward, conversation = play(game, problem, lambda heard, turns=turns: turns[len(heard)], turns=5)
        assert conversation[-2]["content"] == left and reward == pytest.approx(1 - 0.1 * len(guesses))
    for text in ("", "1 9", "19.0", "nineteen", "١٩", "1" * 19, "f", "1_0"):
        assert game.step(problem, [], text) == Turn("5-40")
    assert game.step(problem, [], " 19 ") == game.step(problem, [], "019") == Turn("", 1.0, True)
    assert Game(base=16).step(Posed("1-f", "e", ""), [], "A") == Turn("b-f")
    with pytest.raises(ValueError, match="ends with a range"):
        game.reset(Posed("Guess!", "19", ""))


def test_the_game_opens_with_the_problems_own_prompt_and_keeps_nothing():
    environment = Declaration("examples.guessing:Game").make({"cost": 0.25})
    problem = Posed("1-3", "2", "", system="Be brief.")
    assert environment.reset(problem) == problem.messages
    assert environment.step(problem, [], "3") == environment.step(problem, problem.messages, "3")


def test_a_conversation_ends_with_the_players_turn_after_the_last_that_he_has():
    prompt, reward, conversation = play(Game(base=36), posed(GAMES[0]), lambda heard: "-1", turns=2)
    assert prompt == [{"role": "user", "content": GAMES[0].prompt}]
    assert [m["role"] for m in conversation] == ["assistant", "user", "assistant"] and reward == 0
