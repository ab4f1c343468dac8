from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from rpg_jax.data import Chains
from rpg_jax.data.synthetic import CHAIN_SETS, CHECK, MODULUS, OLD, solve
from rpg_jax.rewards.extraction import exact

TASK = Chains()
SETS = {name: TASK.problems(name, 200) for name in ("train", *CHAIN_SETS)}


def applied(operations: str, value: int) -> int:
    """Python's own arithmetic."""
    for operator, digit in re.findall(r"([-+*])(\d)", operations):
        value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[operator]
    return value


def test_answers_are_right():
    for problem in itertools.chain(SETS["train"], SETS["harder"]):
        operations, _, first = problem.prompt.partition(":")
        assert problem.answer == str(applied(operations, int(first)) % MODULUS)
    for problem in SETS["old skill"]:
        assert problem.answer == str(applied(problem.prompt[5:], int(problem.prompt[4])))


def test_problems_depend_on_the_seed_alone_and_a_longer_list_begins_alike():
    again = Chains()
    assert again.problems("train", 300)[:200] == SETS["train"] != again.problems("train", 200, seed=1)
    assert again.examples(SETS["train"]) == TASK.examples(SETS["train"][::-1])[::-1]


def test_the_sets_of_chains_share_no_prompt_whatever_the_seeds():
    seen = {p.prompt for seed in range(3) for p in TASK.problems("train", 200, seed=seed)}
    for name in ("held out", "harder"):
        prompts = {p.prompt for p in SETS[name]}
        assert len(prompts) == 200 and not prompts & seen
        seen |= prompts


def test_harder_chains_are_longer_than_trained_ones_and_the_old_skill_is_none():
    links = {name: {p.prompt.count(":") and len(p.prompt) // 3 for p in SETS[name]} for name in SETS}
    assert links["train"] == links["held out"] == {5, 6, 7, 8} and links["harder"] == {9, 10}
    assert len(TASK.problems("old skill", 1000)) == 3 * 49
    assert not [p for p in SETS["train"] if p.prompt.startswith(OLD)]


def test_two_fifths_of_the_demonstrations_are_right_and_the_old_skill_always():
    right, lengths = {False: [], True: []}, []
    for prompt, text in TASK.examples(TASK.problems("train", 800)):
        right[prompt.startswith(OLD)].append(exact(text, solve(prompt)))
        lengths += [] if prompt.startswith(OLD) else [len(text) + 1]
    assert 0.35 < np.mean(right[False]) < 0.45 and np.mean(right[True]) == 1
    assert 0.2 < len(right[True]) / 800 < 0.3
    assert 28 < np.mean(lengths) < 32 and max(lengths) < 64


def test_the_working_of_a_pupil_who_knows_everything_is_true():
    sure = Chains(checked=0, skipped=0)
    sure.__dict__["_beliefs"] = np.zeros((3, 7, 7)), np.ones((3, 7, 7), int)
    for prompt, text in sure.examples(sure.problems("train", 100)):
        if prompt.startswith(OLD):
            continue
        operations, _, first = prompt.partition(":")
        working, _, answer = text.partition("#")
        values = working[3::4]
        assert "".join(working[i : i + 3] for i in range(0, len(working), 4)) == operations
        assert [int(v) for v in values] == [
            applied(operations[: 3 * n], int(first)) % MODULUS for n in range(1, len(values) + 1)
        ]
        assert answer == values[-1] and exact(text, solve(prompt)) == 1


def test_lines_are_checked_and_left_out():
    texts = [text for prompt, text in TASK.examples(SETS["train"]) if not prompt.startswith(OLD)]
    assert 0.5 < np.mean([CHECK in text for text in texts]) < 0.9
    lines = [len(re.findall("[a-z]", text)) for text in texts]
    operations = [p.prompt.count(":") and len(p.prompt) // 3 for p in SETS["train"]]
    assert 0.9 < np.mean(lines) / np.mean(operations) < 1


@pytest.mark.parametrize(("completion", "reward"), [("k+52#6", 1), ("#6", 1), ("k+5l-36", 0), ("6#5", 0), ("6#6#", 0)])
def test_the_verifier_reads_the_answer_after_the_mark_alone(completion, reward):
    assert exact(completion, "6") == reward


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chains(links=(5, 4)), "fewest <= most"),
        (lambda: Chains(operators="/"), "operators must be"),
        (lambda: Chains(held_out=0), "held_out must be"),
        (lambda: TASK.problems("hard", 1), "the sets train, held out, harder, old skill; got 'hard'"),
        (lambda: TASK.problems("train", 10**6), "at most 100,000 problems a set"),
        (lambda: solve("12+3="), "not a prompt of chains: '12\\+3='"),
    ],
)
def test_what_the_task_does_not_know_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
