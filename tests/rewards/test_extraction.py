from __future__ import annotations

import pytest

from rpg_jax import rewards
from rpg_jax.data import Problem
from rpg_jax.rewards.extraction import extract_answer


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
    with rewards.Scorer("by_source") as scorer:
        assert scorer.answers(problems, [["#### 9.0", "9"], ["Answer: 9.0"]]) == [["9", None], ["9.0"]]
