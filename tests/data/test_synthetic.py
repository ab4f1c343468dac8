"""Arithmetic and chains: answers are right, the sets are apart, the working is true."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from rpg_jax.data import Chains
from rpg_jax.data.prompts import Problem
from rpg_jax.data.synthetic import CHAIN_SETS, CHECK, MODULUS, OLD, SETS, Arithmetic, solve
from rpg_jax.rewards.extraction import exact


def value(prompt: str) -> int:
    assert re.fullmatch(r"\d+[-+*]\d+=", prompt)
    a, operator, b = re.fullmatch(r"(\d+)([-+*])(\d+)=", prompt).groups()
    return {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(a), int(b))


def operands(problem) -> frozenset[int]:
    return frozenset(int(x) for x in re.findall(r"\d+", problem.prompt))


@pytest.mark.parametrize("reverse", [False, True])
def test_answers_are_right(reverse):
    for problem in Arithmetic(operators="+-*", reverse=reverse).problems("train", 500):
        assert problem.answer[:: -1 if reverse else 1] == str(value(problem.prompt))


def test_the_splits_cover_all_pairs_and_share_no_operands():
    task = Arithmetic(operators="+-", digits=2, held_out=0.2)
    train, held_out = task.problems("train"), task.problems("held_out")
    assert len(train) + len(held_out) == 2 * 100**2
    assert not {operands(p) for p in train} & {operands(p) for p in held_out}
    assert 0.18 < len(held_out) / 20_000 < 0.22  # 3.3 standard deviations of the 5,050 pairs


def test_problems_beyond_enumeration_are_distinct_and_split():
    for digits in (4, 9):
        task = Arithmetic(operators="+-*", digits=digits, held_out=0.99)
        train, held_out = task.problems("train"), task.problems("held_out", 3000)
        assert 900 < len(train) < 1100 and task.problems("train", 2000)[: len(train)] == train
        assert all(0 <= p.prompt_id < 2**31 and value(p.prompt) == int(p.answer) for p in held_out)
        assert not {operands(p) for p in train} & {operands(p) for p in held_out}
        for problems in (train, held_out):
            assert len({p.prompt for p in problems}) == len({p.prompt_id for p in problems}) == len(problems)


def test_of_drawn_problems_that_would_share_an_id_the_first_stays(monkeypatch):
    monkeypatch.setattr(Arithmetic, "_prompt_ids", lambda self, codes: codes % 1000)
    ids = [p.prompt_id for p in Arithmetic(digits=9, held_out=0).problems("train")]
    assert sorted(ids) == list(range(1000))


def test_prompt_ids_depend_on_the_problem_alone():
    few = {p.prompt: p.prompt_id for p in Arithmetic(operators="*", digits=2).problems("train", 50, seed=1)}
    many = {p.prompt: p.prompt_id for p in Arithmetic(operators="+-*", digits=2).problems("train", seed=2)}
    assert all(many[prompt] == prompt_id for prompt, prompt_id in few.items())
    assert len(set(many.values())) == len(many)


def test_texts_hold_every_character_of_the_task():
    task = Arithmetic(operators="+-*")
    assert set("".join(map("".join, task.examples(task.problems("train", 500))))) <= set("".join(task.texts()))


def test_impossible_tasks_are_refused():
    with pytest.raises(ValueError, match="operators"):
        Arithmetic(operators="/")
    with pytest.raises(ValueError, match="digits"):
        Arithmetic(digits=0)
    with pytest.raises(ValueError, match="split"):
        Arithmetic().problems("test")
    with pytest.raises(ValueError, match="only .* of the 20000"):
        Arithmetic().problems("train", 20_000)
    with pytest.raises(ValueError, match="only 0 of the 1"):
        Arithmetic(digits=5, held_out=0).problems("held_out")


def test_sets_are_by_carries_and_sign():
    task = Arithmetic(operators="+-", digits=2)
    expected = {
        "12+34=": {"held out"},
        "19+34=": {"held out", "carry"},
        "90+34=": {"held out", "carry"},
        "52-34=": {"held out", "carry"},
        "34-12=": {"held out"},
        "12-34=": {"held out", "negative"},
        "34-52=": {"held out", "carry", "negative"},
    }
    for prompt, sets in expected.items():
        problem = Problem(prompt_id=0, prompt=prompt, answer="", source="arithmetic")
        assert {name for name in SETS if task.belongs(problem, name)} == sets


def test_an_unknown_set_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="held out, carry, negative; got 'hard'"):
        Arithmetic().belongs(Arithmetic().problems("train", 1)[0], "hard")


CHAINS = Chains()
OF_CHAINS = {name: CHAINS.problems(name, 200) for name in ("train", *CHAIN_SETS)}


def applied(operations: str, value: int) -> int:
    """Python's own arithmetic."""
    for operator, digit in re.findall(r"([-+*])(\d)", operations):
        value = {"+": value + int(digit), "-": value - int(digit), "*": value * int(digit)}[operator]
    return value


def test_answers_of_chains_are_right():
    for problem in itertools.chain(OF_CHAINS["train"], OF_CHAINS["harder"]):
        operations, _, first = problem.prompt.partition(":")
        assert problem.answer == str(applied(operations, int(first)) % MODULUS)
    for problem in OF_CHAINS["old skill"]:
        assert problem.answer == str(applied(problem.prompt[5:], int(problem.prompt[4])))


def test_problems_depend_on_the_seed_alone_and_a_longer_list_begins_alike():
    again = Chains()
    assert again.problems("train", 300)[:200] == OF_CHAINS["train"] != again.problems("train", 200, seed=1)
    assert again.examples(OF_CHAINS["train"]) == CHAINS.examples(OF_CHAINS["train"][::-1])[::-1]


def test_the_sets_of_chains_share_no_prompt_whatever_the_seeds():
    seen = {p.prompt for seed in range(3) for p in CHAINS.problems("train", 200, seed=seed)}
    for name in ("held out", "harder"):
        prompts = {p.prompt for p in OF_CHAINS[name]}
        assert len(prompts) == 200 and not prompts & seen
        seen |= prompts


def test_harder_chains_are_longer_than_trained_ones_and_the_old_skill_is_none():
    links = {name: {p.prompt.count(":") and len(p.prompt) // 3 for p in OF_CHAINS[name]} for name in OF_CHAINS}
    assert links["train"] == links["held out"] == {5, 6, 7, 8} and links["harder"] == {9, 10}
    assert len(CHAINS.problems("old skill", 1000)) == 3 * 49
    assert not [p for p in OF_CHAINS["train"] if p.prompt.startswith(OLD)]


def test_two_fifths_of_the_demonstrations_are_right_and_the_old_skill_always():
    right, lengths = {False: [], True: []}, []
    for prompt, text in CHAINS.examples(CHAINS.problems("train", 800)):
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
    texts = [text for prompt, text in CHAINS.examples(OF_CHAINS["train"]) if not prompt.startswith(OLD)]
    assert 0.5 < np.mean([CHECK in text for text in texts]) < 0.9
    lines = [len(re.findall("[a-z]", text)) for text in texts]
    operations = [p.prompt.count(":") and len(p.prompt) // 3 for p in OF_CHAINS["train"]]
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
        (lambda: CHAINS.problems("hard", 1), "the sets train, held out, harder, old skill; got 'hard'"),
        (lambda: CHAINS.problems("train", 10**6), "at most 100,000 problems a set"),
        (lambda: solve("12+3="), "not a prompt of chains: '12\\+3='"),
    ],
)
def test_what_the_task_does_not_know_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow  # draws thousands of chains
@pytest.mark.parametrize(
    ("chains", "name", "count"),
    [(Chains(operators="+", links=(2, 2)), "train", 9_000), (Chains(held_out=1e-9), "held out", 1)],
)
def test_more_chains_than_there_are_is_an_error_and_no_endless_search(chains, name, count):
    with pytest.raises(
        ValueError, match=rf"^'{name}' has some [\d,]+ chains of the {count:,} asked for: raise task\.links"
    ):
        chains.problems(name, count)
