from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from rpg_jax.data import Expressions
from rpg_jax.data.expressions import EXPRESSION_SETS, solve
from rpg_jax.rewards.exact import exact

TASK = Expressions()
SETS = {name: TASK.problems(name, 200) for name in ("train", *EXPRESSION_SETS)}


def folded(prompt: str) -> int:
    """Python's own arithmetic, from left to right."""
    first, *rest = re.findall(r"[-+*]?\d", prompt)
    value = int(first)
    for operator, digit in rest:
        value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[operator]
    return value % 10


def test_answers_are_right():
    for problem in itertools.chain(SETS["train"], SETS["harder"]):
        assert problem.answer == str(folded(problem.prompt))
    assert all(list(p.answer) == sorted(p.prompt[1:-1]) for p in SETS["old skill"])


def test_problems_depend_on_the_seed_alone_and_a_longer_list_begins_alike():
    again = Expressions()
    assert again.problems("train", 300)[:200] == SETS["train"] != again.problems("train", 200, seed=1)
    assert again.examples(SETS["train"]) == TASK.examples(SETS["train"]) == TASK.examples(SETS["train"][::-1])[::-1]


def test_sets_share_no_prompt_whatever_the_seeds():
    trained = {p.prompt for seed in range(3) for p in TASK.problems("train", 200, seed=seed)}
    shown = {prompt for prompt, _ in TASK.examples(SETS["train"])}
    for name in EXPRESSION_SETS:
        prompts = {p.prompt for p in SETS[name]}
        assert len(prompts) == 200 and not prompts & (trained | shown)


def test_harder_expressions_have_more_terms_than_trained_ones():
    terms = {name: {len(p.prompt) // 2 for p in SETS[name]} for name in ("train", "held out", "harder")}
    assert terms == {"train": {5, 6, 7}, "held out": {5, 6, 7}, "harder": {8, 9}}


def test_a_third_of_the_demonstrations_is_right_and_the_old_skill_always():
    problems = TASK.problems("train", 800)
    pairs = TASK.examples(problems)
    right = {
        old: [exact(text, solve(prompt)) for prompt, text in pairs if prompt.startswith("s") == old] for old in (0, 1)
    }
    assert 0.25 < np.mean(right[0]) < 0.40 and np.mean(right[1]) == 1
    assert 0.2 < len(right[1]) / len(pairs) < 0.3
    lengths = [len(text) + 1 for prompt, text in pairs if not prompt.startswith("s")]
    assert 30 < np.mean(lengths) < 36 and np.percentile(lengths, 99) < 80  # limits of the warm start and of RL


def test_a_demonstration_writes_the_rest_of_the_expression_after_each_operation():
    sure = Expressions(repeated=0, skipped=0)
    sure.__dict__["_beliefs"] = np.zeros((3, 10, 10)), np.ones((3, 10, 10), int)
    shown = dict(pair for pair in sure.examples(sure.problems("train", 100)) if not pair[0].startswith("s"))
    for prompt, text in shown.items():
        *lines, last = (prompt + text.partition("#")[0]).split("=")
        assert [len(line) for line in [*lines, last]] == list(range(len(prompt) - 1, 0, -2))
        assert {folded(line) for line in lines} == {int(last)} and exact(text, solve(prompt)) == 1


@pytest.mark.parametrize(("completion", "reward"), [("9=9#6", 1), ("#6", 1), ("2-3=6", 0), ("6=6#5", 0), ("6#6#", 0)])
def test_the_verifier_reads_the_answer_after_the_mark_alone(completion, reward):
    assert exact(completion, "6") == reward


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Expressions(terms=(5, 4)), "fewest <= most"),
        (lambda: Expressions(operators="/"), "operators must be"),
        (lambda: Expressions(held_out=0), "held_out must be"),
        (lambda: TASK.problems("hard", 1), "the sets train, held out, harder, old skill; got 'hard'"),
        (lambda: Expressions(terms=(2, 2)).problems("held out", 31), "at most 30 problems of 'held out'"),
        (lambda: solve("12+3="), "not a prompt of expressions: '12\\+3='"),
    ],
)
def test_what_the_task_does_not_know_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
