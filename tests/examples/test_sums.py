"""examples/sums.py: questions that are answered right, split by pairs, and rewards that read an answer as they say."""

import re

import pytest

from examples.sums import Problems, Stories, equation, last_integer, last_number


@pytest.mark.parametrize("task", [Problems(), Stories(), Stories(largest=3, tellings=2, seed=1)])
def test_no_pair_of_the_held_out_problems_is_trained_and_every_problem_has_its_number(task):
    train, held_out = task.problems("train"), task.problems("held out")
    pairs = (task.largest + 1) ** 2
    assert len(train) + len(held_out) == pairs * task.tellings == len({p.prompt_id for p in train + held_out})
    assert not {p.prompt_id % pairs for p in train} & {p.prompt_id % pairs for p in held_out}
    assert task.problems("train", 3) == train[:3] and len(task.texts()) == pairs * task.tellings


def test_every_story_has_the_answer_of_its_kind():
    kinds = set()
    for problem in Stories().problems("train"):
        a, b = map(int, re.findall(r"\d+", problem.prompt))
        kind = next(word for word in ("gets", "gives", "boxes") if word in problem.prompt)
        assert problem.answer == str({"gets": a + b, "gives": a - b, "boxes": a * b}[kind])
        assert min(a, b, int(problem.answer)) >= 2
        kinds.add(kind)
    assert kinds == {"gets", "gives", "boxes"}


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "paid"),
    [
        (last_number, "3 + 4 is 7.", "7", 1),
        (last_number, "7, since 3 + 4", "7", 0),
        (last_number, "seven", "7", 0),
        (equation, "Ben has 3 + 4 = 7 apples, not 9", "7", 1),
        (equation, "3 + 4 = 71", "7", 0),
        (equation, "7", "7", 0),
        (last_integer, "3 - 7 = -4.", "-4", 1),
        (last_integer, "3 - 7 = 4", "-4", 0),
        (last_integer, "", "-4", 0),
    ],
)
def test_a_reward_reads_what_it_says(reward, completion, answer, paid):
    assert reward(completion, answer, "") == paid
