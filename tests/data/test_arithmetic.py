from __future__ import annotations

import re

import pytest

from rpg_jax.data.prompts import Problem
from rpg_jax.data.synthetic import ANSWER_MARK, SETS, Arithmetic


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


def test_the_working_is_true_and_ends_in_the_answer():
    task = Arithmetic(operators="+-*", digits=3, chain_of_thought=True)
    for prompt, target in task.examples(task.problems("train", 300)):
        working, _, answer = target.rpartition(ANSWER_MARK)
        assert answer == str(value(prompt))
        for step in working.split(";"):
            left, _, right = step.partition("=")
            terms = [int(x) for x in re.findall(r"\d+", left)]
            operator = prompt.strip("0123456789=")
            if operator == "*":
                assert (terms[0] * terms[1] if "*" in left else sum(terms)) == int(right)
            else:
                assert (sum(terms) if operator == "+" else terms[0] - sum(terms[1:])) == int(right)


def test_zero_padded_prompts_are_equally_long():
    assert {len(p.prompt) for p in Arithmetic(digits=3, zero_pad=True).problems("train", 200)} == {8}


def test_texts_hold_every_character_of_the_task():
    task = Arithmetic(operators="+-*", chain_of_thought=True)
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
