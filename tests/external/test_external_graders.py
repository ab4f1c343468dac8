"""Verdicts, normal forms and length penalties against the numbers of other projects' tests; see `cases`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rpg_jax.data import sources
from rpg_jax.rewards import verifiers
from rpg_jax.rewards.extraction import normalise
from rpg_jax.rewards.verifiers import overlong_penalty
from tests.external.cases import FOLDER, cases, compare

MATH_VERIFY = json.loads((FOLDER / "math_verify.json").read_text(encoding="utf-8"))
REASONING_GYM = json.loads((FOLDER / "reasoning_gym.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", cases("verdicts"))
def test_verdicts_agree(case):
    verdict = verifiers.VERIFIERS[case["verifier"]].load()(case["completion"], case["answer"])
    assert (verdict == case["expected"]) == ("differs" not in case)


@pytest.mark.parametrize("case", cases("normal_forms"))
def test_normal_forms_agree(case):
    assert (normalise(case["text"]) == case["expected"]) == ("differs" not in case)


@pytest.mark.parametrize("case", cases("overlong"))
def test_overlong_penalties_agree(case):
    penalty = overlong_penalty(np.array(case["lengths"]), limit=case["limit"], buffer=case["buffer"])
    compare(case, {"rewards": case["rewards"] + case["factor"] * penalty})  # a weight of the reward's part here


@pytest.mark.slow  # SymPy, 20 ms a case
def test_math_verify_judges_its_own_suite_as_that_expects_but_for_the_listed_cases():
    judge = pytest.importorskip("rpg_jax.rewards.math_verify", reason="math-verify is not installed").math_verify
    judged = {
        (reference, completion, expected): judge(completion, reference)
        for rows in MATH_VERIFY["tests"].values()
        for reference, completion, expected in rows
    }
    disagree = [list(case) for case, verdict in judged.items() if verdict != case[-1]]
    assert sorted(disagree) == sorted(row[:3] for row in MATH_VERIFY["differs"])


@pytest.mark.slow  # some generators take a second
def test_the_answers_that_reasoning_gym_publishes_score_1_where_it_publishes_one():
    gym = pytest.importorskip("reasoning_gym", reason="no requirement names it: pip install reasoning-gym")
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) >= REASONING_GYM["tasks"]
    wrong = {}
    for task in DATASETS:
        try:
            [problem], _ = sources.load(f"reasoning_gym:{task}", bad_rows="skip", count=1)
        except (AssertionError, ValueError) as error:  # a mixture of nothing; a row without an answer
            wrong[task] = repr(error)
            continue
        [entry] = gym.create_dataset(task, size=1, seed=0)
        judge = verifiers.VERIFIERS[verifiers.name_for_source(problem.source)].load()
        if judge(f"Well.\nAnswer: {entry['answer']}\n", problem.answer) != 1:
            wrong[task] = entry["answer"]
    assert sorted(wrong) == sorted(REASONING_GYM["differs"]), wrong
