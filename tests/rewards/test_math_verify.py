from __future__ import annotations

from types import SimpleNamespace

import pytest

from rpg_jax.rewards.scorer import Scorer

pytest.importorskip("math_verify", reason="the library math-verify is not installed")

CASES = [
    ("So the answer is $\\boxed{\\frac{1}{2}}$.", "0.5", 1),
    ("Answer: 5", "5", 1),
    ("Answer: $\\frac{3}{4}$", "\\frac{3}{4}", 1),
    ("we get \\boxed{(1,2)}", "(1, 2)", 1),
    ("\\boxed{\\{1,2,3\\}}", "\\{3,2,1\\}", 1),
    ("\\boxed{2\\sqrt{3}}", "\\sqrt{12}", 1),
    ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
    ("\\boxed{6}", "5", 0),
    ("\\boxed{\\frac{1}{3}}", "0.5", 0),
    ("", "5", 0),
]
HOSTILE = ["Answer: 10**10**10", "Answer: __import__('os').system('touch /tmp/attacked')", "\\boxed{" * 3000]


@pytest.mark.slow  # SymPy, and a deadline that has to pass
def test_math_verify_judges_in_the_pool_and_survives_hostile_completions():
    with Scorer("math_verify", workers=2, deadline_s=8.0) as scorer:
        cases = [*CASES, *((text, "7", 0) for text in HOSTILE), ("\\boxed{7}", "7", 1)]
        problems = [SimpleNamespace(prompt="", answer=answer, source="math500") for _, answer, _ in cases]
        scores = scorer(problems, [text for text, *_ in cases], [1] * len(cases))
    assert scores.accuracy.tolist() == [correct for *_, correct in cases]
    assert scores.errors.get("timeout", 0) >= 1
