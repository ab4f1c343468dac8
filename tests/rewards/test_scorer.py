from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rpg_jax import rewards


def problem(answer, source="arithmetic"):
    return SimpleNamespace(prompt="", answer=answer, source=source)


def score(scorer, pairs, lengths=None):
    answers, texts = zip(*pairs, strict=True)
    return scorer([problem(a) for a in answers], texts, ["stop"] * len(texts), lengths or [1] * len(texts))


def test_exact_match_ignores_the_working_and_white_space():
    pairs = [("46", "46"), ("46", " 46\n"), ("46", "6+0=6#46"), ("46", "#46#47"), ("46", "460"), ("5-", "5-")]
    scores = score(rewards.build("exact"), pairs)
    assert scores.rewards.tolist() == scores.accuracy.tolist() == [1, 1, 1, 0, 0, 1]
    assert scores.rewards.dtype == scores.accuracy.dtype == np.float32


def test_rewards_are_weighted_sums_and_accuracy_is_the_verifier_alone():
    options = {"format": {"pattern": "number"}, "overlong": {"limit": 10, "buffer": 5}}
    scorer = rewards.build({"exact": 1.0, "format": 0.1, "overlong": 2.0}, options=options)
    scores = score(scorer, [("46", "46"), ("46", "47"), ("46", "x")], lengths=[10, 2, 2])
    np.testing.assert_allclose(scores.rewards, [1 + 0.1 - 2, 0.1, 0], rtol=1e-6)  # f32 sums of three terms
    assert scores.accuracy.tolist() == [1, 0, 0]
    assert scores.parts["overlong"].tolist() == [-1, 0, 0]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown reward 'exakt'; known: .*exact"):
        rewards.build("exakt")
    with pytest.raises(ValueError, match="unknown options \\['patern'\\].*\\['pattern'\\]"):
        rewards.build({"exact": 1, "format": 1}, options={"format": {"patern": "number"}})
    with pytest.raises(ValueError, match="'overlong'.*missing \\['buffer', 'limit'\\]"):
        rewards.build({"exact": 1, "overlong": 1})
    with pytest.raises(ValueError, match="no verifier among \\['format'\\]"):
        rewards.build("format")


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="\\[1, 2, 1, 1\\]"):
        rewards.build("exact")([problem("1")], ["1", "1"], ["stop"], [1])


def test_rewards_never_import_jax():
    code = "import sys, rpg_jax.rewards; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
