"""Answers in their canonical spelling; equal answers are one answer, and the reference has no part in the vote."""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from rpg_jax.data import Problem
from rpg_jax.report.scores import maj_at_k
from rpg_jax.rewards.extraction import (
    MOST_COMPARED,
    boxed,
    dapo_answer,
    extract_answer,
    gsm8k,
    last_boxed,
    math_dapo,
    merge_equal_answers,
    normalise,
)
from rpg_jax.rewards.scorer import Scorer

# 1,200 completions and references, 130 picked by hand and the rest drawn from fragments of the rules; verdicts
# computed once with `verl.utils.reward_score.math_dapo.compute_score` of the PyPI package verl 0.5.0.
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_dapo_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{3}\nAnswer: $\\frac12$", "\\frac{1}{2}"),
        ("so \\boxed{3}", "3"),
        ("it is\n#### 1,000", "1000"),
        ("6+0=6#46", "46"),
        (" 46 ", "46"),
        ("", None),
        ("Answer: $", None),
        ("I do not\nknow", None),
        ("x" * 101, None),
    ],
)
def test_the_answer_of_a_completion(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("verifier", "completion", "answer"),
    [
        ("math_dapo", "Answer: \\boxed{3}", "3"),
        ("math_dapo", "so \\boxed{3}", None),
        ("boxed", "Answer: 4", None),
        ("gsm8k", "#### 1,000.00", "1000"),
        ("gsm8k", "about 7", None),
        ("gsm8k", "#### 1" + "0" * 40 + "1.0", "1" + "0" * 40 + "1"),
        ("exact", "6+0=6#46", "46"),
        ("countdown", "<answer> (1 + 2)*3 </answer>", "(1+2)*3"),
        ("countdown", "<answer>import os</answer>", None),
        ("my_module:check", "so \\boxed{3}", "3"),
    ],
)
def test_the_answer_is_what_the_verifier_compares(verifier, completion, answer):
    assert extract_answer(completion, verifier) == answer


def test_answers_follow_each_problems_own_verifier():
    problems = [Problem(0, "p", "9", "gsm8k"), Problem(1, "p", "9", "math_dapo")]
    with Scorer("by_source") as scorer:
        assert scorer.answers(problems, [["#### 9.0", "9"], ["Answer: 9.0"]]) == [["9", None], ["9.0"]]


def test_boxed_reads_the_last_balanced_box():
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1} then \\boxed{2") is None
    assert last_boxed("42") is None
    assert boxed("so $\\boxed{\\frac12}$.", "\\frac{1}{2}") == boxed("\\boxed{7}", "\\boxed{7}") == 1
    assert boxed("7", "7") == boxed("\\boxed{8}", "7") == 0


@pytest.mark.parametrize("found", ["", "feet", "units", "\\ "])
def test_a_box_is_not_right_because_nothing_is_left_of_it_and_of_the_reference(found):
    assert normalise("square") == normalise(found) == ""
    assert boxed(f"\\boxed{{{found}}}", "square") == 0 and boxed("\\boxed{ square }", "square") == 1


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("so\n#### 1000", 1),
        ("#### 1,000", 1),
        ("#### $1000.00.", 1),
        ("#### 5\n#### 1000", 1),
        ("#### 1000\n#### 5", 0),
        ("the answer is 1000", 0),
        ("#### -1000", 0),
        ("#### 1.0.0.0", 0),
        ("#### ", 0),
        ("#### 1000" + " " * 300, 0),
    ],
)
def test_gsm8k_reads_the_last_marked_number(completion, correct):
    assert gsm8k(completion, "1000") == gsm8k(completion, "She has 1,000.\n#### 1,000") == correct


def test_gsm8k_refuses_a_bad_reference():
    with pytest.raises(ValueError, match="without a number: 'many'"):
        gsm8k("#### 1", "many")


def read(*answers):
    return answers, [f"so {answer}" for answer in answers]


class Comparing:
    """Decides pairs by `equal`, and counts the comparisons of each answer."""

    def __init__(self, equal):
        self._equal, self.counts, self.pairs = equal, collections.Counter(), 0

    def __call__(self, pairs):
        bare = [(one.removeprefix("so "), other.removeprefix("so ")) for one, other in pairs]
        self.pairs += len(bare)
        self.counts.update(answer for pair in bare for answer in pair)
        return [self._equal(*pair) for pair in bare]


def test_a_chain_of_equal_pairs_is_one_answer_in_its_most_frequent_spelling():
    chain = Comparing(lambda one, other: abs(int(one) - int(other)) <= 1)
    assert merge_equal_answers(*read("3", "1", "2", "7", "1", None), chain) == ["1", "1", "1", "7", "1", None]
    # The first of equally frequent spellings, in whatever order the completions come.
    assert merge_equal_answers(*read("5", "6"), chain) == ["5", "5"]
    assert merge_equal_answers(*read("6", "5"), chain) == ["6", "6"]


@pytest.mark.parametrize("seed", range(20))
def test_the_groups_are_the_connected_components_of_the_equal_pairs(seed):
    chosen = random.Random(seed)
    names = [str(i) for i in range(12)]
    edges = {frozenset(chosen.sample(names, 2)) for _ in range(8)}
    component = {name: {name} for name in names}
    for _ in names:  # flooding, another way than joining
        for one, other in map(tuple, edges):
            component[one] |= component[other]
            component[other] |= component[one]
    found = merge_equal_answers(*read(*names), Comparing(lambda one, other: frozenset((one, other)) in edges))
    for one, spelling in zip(names, found, strict=True):
        assert {n for n, s in zip(names, found, strict=True) if s == spelling} == component[one]


def test_equal_spellings_need_no_comparison():
    asked = Comparing(lambda one, other: True)
    assert merge_equal_answers(*read("1", "1"), asked) == ["1", "1"] and asked.pairs == 0
    assert merge_equal_answers(*read(None), asked) == [None] and asked.pairs == 0


def test_comparisons_are_bounded_and_an_answer_that_hangs_two_of_them_is_left_alone():
    never = Comparing(lambda one, other: False)
    names = [str(i) for i in range(3 * MOST_COMPARED)]
    assert merge_equal_answers(*read(*names), never) == names
    assert never.pairs == MOST_COMPARED * (MOST_COMPARED - 1) // 2
    hangs = Comparing(lambda one, other: None if "9" in (one, other) else one[0] == other[0])
    found = merge_equal_answers(*read(*names[:12]), hangs)
    assert found == [n if n not in ("10", "11") else "1" for n in names[:12]]
    assert hangs.counts["9"] == 2


# The reference is 1/2 or 3. Three wrong completions agree in three spellings. Three others wrote different wrong
# answers, of which a spelling kept the end.
WRITTEN = {
    "1/2": (["0.6", "\\frac{3}{5}", "\\frac{6}{10}", "0.5", "\\frac12"], [0, 0, 0, 1, 1], 0.0),
    "3": (["x=4, y=2", "x=5, y=2", "x=6, y=2", "3", "3.0"], [0, 0, 0, 1, 1], 1.0),
}


@pytest.mark.slow  # SymPy in processes of its own
def test_maj_at_k_under_math_verify_is_that_of_the_answers_and_does_not_know_the_reference():
    pytest.importorskip("math_verify", reason="the library math-verify is not installed")
    problems = [SimpleNamespace(prompt="", answer=answer, source="math500") for answer in WRITTEN]
    texts = [[f"so it is \\boxed{{{given}}}" for given in written] for written, *_ in WRITTEN.values()]
    odd = ["no answer", "it is 9,\nthat is 9 apples", "\\boxed{5\\%}", "\\boxed{5}", "\\boxed{0.05}"]
    with Scorer("by_source", workers=2) as scorer:
        flat = [(problem, text) for problem, own in zip(problems, texts, strict=True) for text in own]
        scores = scorer(*zip(*flat, strict=True), [1] * 10)
        answers = scorer.answers(problems, texts)
        other = [SimpleNamespace(prompt="", answer="another", source="math500") for _ in problems]
        assert scorer.answers(other, texts) == answers
        [few] = scorer.answers(other[:1], [odd])
    verdicts = scores.accuracy.reshape(2, 5)
    assert verdicts.astype(int).tolist() == [right for _, right, _ in WRITTEN.values()]
    assert maj_at_k(answers, verdicts).tolist() == [expected for *_, expected in WRITTEN.values()]
    assert few[:2] == [None, "9"] and len(set(few[2:])) == 1, "5 = 5 % = 0.05 in a chain, though 5 is not 0.05"


def test_verdicts_are_those_of_the_official_function():
    assert len(CASES) == 1200 and 400 < sum(verdict > 0 for *_, verdict in CASES) < 800
    assert [c for c in CASES if math_dapo(c[0], c[1]) != c[2]] == []


@pytest.mark.parametrize(
    ("answer", "canonical"),
    [
        ("x = 42", "42"),
        ("$42$ apples", "42"),
        ("1,234,567", "1234567"),
        ("(1,234)", "(1,234)"),
        ("\\frac12", "\\frac{1}{2}"),
        ("2\\sqrt3", "2\\sqrt{3}"),
        ("\\text{ 5 cm}", "5"),
        ("\\text{\\textbf{a}}", "a"),
        ("336^\\circ", "336"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("squared", "d"),  # units are removed inside words too
    ],
)
def test_each_rule_of_normalisation(answer, canonical):
    assert normalise(answer) == canonical


def test_the_last_answer_within_the_last_300_characters_counts():
    assert dapo_answer("Answer: 1\nAnswer: 2") == "2"
    assert dapo_answer("Answer: 1" + "\n" + "x" * 290) == "1"
    assert dapo_answer("Answer: 1" + "\n" + "x" * 292) == "[INVALID]"
    assert dapo_answer("answer :\n\n 7") == "7"


@pytest.mark.parametrize("pattern", ["$", "\\text{", "\\boxed{", " ", "\n", "Answer:", "frac", "{,}", "\\boxed{$"])
def test_repetitions_that_make_regular_expressions_explode_are_judged(pattern):
    assert math_dapo("Answer:" + pattern * 100_000, "7") == -1
    assert math_dapo("Answer: 7" + pattern * (280 // len(pattern)), "8") == -1
