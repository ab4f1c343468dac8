from __future__ import annotations

import pytest

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
