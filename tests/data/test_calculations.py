from __future__ import annotations

import numpy as np
import pytest

from rpg_jax.data import Calculations
from rpg_jax.data.calculations import CALCULATION_SETS

TASK = Calculations()
SETS = {name: TASK.problems(name) for name in ("train", *CALCULATION_SETS)}


def operands(problem):
    return int(problem.prompt[:2]), problem.prompt[2], int(problem.prompt[3:5])


def test_answers_are_right_and_sums_never_carry():
    for problem in [*SETS["train"], *SETS["held out"]]:
        a, operator, b = operands(problem)
        assert problem.prompt == f"{a}{operator}{b}=" and min(a, b) >= 10
        assert int(problem.answer) == (a + b if operator == "+" else a * b)
        assert operator == "*" or (a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10)


def test_no_pair_of_operands_is_in_training_and_held_out():
    pairs = {name: {frozenset(operands(p)[::2]) for p in SETS[name]} for name in SETS}
    for name in CALCULATION_SETS:
        assert not pairs["train"] & pairs[name]
    assert {*SETS["held out"]} <= {*SETS["easy"], *SETS["hard"]}
    assert {p.prompt[2] for p in SETS["easy"]} == {"+"} and {p.prompt[2] for p in SETS["hard"]} == {"*"}


@pytest.mark.parametrize("name", ["train", "held out"])
def test_a_quarter_of_the_problems_are_sums(name):
    assert 0.22 < np.mean([p.prompt[2] == "+" for p in SETS[name]]) < 0.28
    assert len({p.prompt_id for p in SETS[name]}) == len(SETS[name])


def test_the_order_depends_on_the_seed_alone():
    assert Calculations().problems("train", 50) == SETS["train"][:50] != TASK.problems("train", 50, seed=1)


def test_the_pupil_calls_for_sums_as_for_products_and_copies_the_result():
    calls = {"+": [], "*": []}
    for problem in SETS["train"][:2000]:
        calls[problem.prompt[2]].append(TASK.turn(problem, []) == f"calc {problem.prompt[:-1]}")
        assert TASK.turn(problem, ["3108"]) == "3108"
    assert all(0.13 < np.mean(called) < 0.2 for called in calls.values())


def test_wrong_fields_sets_and_counts_are_refused():
    for fields in ({"easy": 1.0}, {"held_out": 0.0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Calculations(**fields)
    with pytest.raises(ValueError, match="has the sets train, held out, easy, hard"):
        TASK.problems("test")
    with pytest.raises(ValueError, match="ask for fewer"):
        TASK.problems("easy", 10_000)
