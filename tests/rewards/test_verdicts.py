"""A score is one number within bounds; everything else is an error of its verdict, counted as "value"."""

import decimal
import fractions
import math

import numpy as np
import pytest

from rpg_jax.rewards import verifiers
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rewards.verdicts import LARGEST, BadScore, checked_score, failure
from rpg_jax.rewards.verifier_process import _judge
from tests.rewards.test_scorer import problem

GOOD = [0, 1, True, -0.5, LARGEST, -LARGEST, np.float32(0.25), np.int8(3), fractions.Fraction(1, 2), decimal.Decimal(2)]
BAD = {
    "1e39": 1e39,
    "just beyond": math.nextafter(LARGEST, math.inf),
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
    "401 digits": 10**400,
    "text": "1",
    "bytes": b"1",
    "None": None,
    "list": [1.0],
    "two numbers": np.ones(2),
    "complex": 1j,
    "float16 inf": np.float16("inf"),
}


@pytest.mark.parametrize("value", GOOD, ids=repr)
def test_numbers_of_every_kind_are_scores(value):
    assert checked_score(value) == float(value)
    assert _judge(lambda: value, {"arguments": (), "options": {}, "returns": "score"}) == {"score": float(value)}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_score_is_an_error_of_its_own_kind(name, monkeypatch):
    with pytest.raises(BadScore):
        checked_score(BAD[name])
    assert _judge(lambda: BAD[name], {"arguments": (), "options": {}, "returns": "score"})["error"] == "value"
    found = {"bad": BAD[name]}
    monkeypatch.setattr(verifiers.Verifier, "load", lambda self: lambda text, answer: found.get(text, 1.0))
    with Scorer("exact") as scored:
        scores = scored([problem("1")] * 3, ["bad", "good", "good"], [1] * 3)
    assert scores.errors == {"value": 1} and [*scores.failures] == ["value", None, None]
    assert scores.rewards.tolist() == [0, 1, 1] and scores.accuracy.tolist() == [0, 1, 1]


@pytest.mark.parametrize("error", [ValueError("a\n b" * 10**6), BadScore("a\n b" * 10**6)])
def test_the_detail_of_a_failure_is_one_short_line(error):
    detail = failure(error).detail
    assert "a b" in detail and "\n" not in detail and len(detail) <= 200


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 1e39, 1.0001e6])
def test_a_weight_that_makes_rewards_infinite_is_refused(weight):
    with pytest.raises(ValueError, match="the weight of the reward 'exact' must be a number within"):
        verifiers.check({"exact": weight}, {})
