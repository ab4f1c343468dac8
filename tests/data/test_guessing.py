from __future__ import annotations

import re

import numpy as np
import pytest

from rpg_jax.data import Guessing

TASK = Guessing()
TRAIN, HELD_OUT = TASK.problems("train"), TASK.problems("held out")


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
    again = Guessing().problems("train", 100)
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


def test_wrong_sizes_sets_and_counts_are_refused():
    for fields in ({"sizes": (1, 24)}, {"sizes": (24, 16)}, {"sizes": (16, 37)}, {"held_out": 0.0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Guessing(**fields)
    with pytest.raises(ValueError, match="has the sets train, held out"):
        TASK.problems("test")
    with pytest.raises(ValueError, match="ask for fewer"):
        TASK.problems("held out", 10_000)
