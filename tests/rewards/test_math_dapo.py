from __future__ import annotations

import json
from pathlib import Path

import pytest

from rpg_jax.rewards.math_dapo import extract, math_dapo, normalise

# 1,200 completions and references, 130 picked by hand and the rest drawn from fragments of the rules; verdicts
# computed once with `verl.utils.reward_score.math_dapo.compute_score` of the PyPI package verl 0.5.0.
CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_dapo_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


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
    assert extract("Answer: 1\nAnswer: 2") == "2"
    assert extract("Answer: 1" + "\n" + "x" * 290) == "1"
    assert extract("Answer: 1" + "\n" + "x" * 292) == "[INVALID]"
    assert extract("answer :\n\n 7") == "7"


@pytest.mark.parametrize("pattern", ["$", "\\text{", "\\boxed{", " ", "\n", "Answer:", "frac", "{,}", "\\boxed{$"])
def test_repetitions_that_make_regular_expressions_explode_are_judged(pattern):
    assert math_dapo("Answer:" + pattern * 100_000, "7") == -1
    assert math_dapo("Answer: 7" + pattern * (280 // len(pattern)), "8") == -1
