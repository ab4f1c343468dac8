from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rpg_jax.rewards import verifiers
from rpg_jax.rewards.scorer import Scorer


def problem(answer, source="arithmetic"):
    return SimpleNamespace(prompt="", answer=answer, source=source)


def score(scorer, pairs, lengths=None):
    answers, texts = zip(*pairs, strict=True)
    return scorer([problem(a) for a in answers], texts, lengths or [1] * len(texts))


def test_exact_match_ignores_the_working_and_white_space():
    right = [("46", "46"), ("46", " 46\n"), ("46", "6+0=6#46"), ("5-", "5-"), ("C#", "Answer: C\nAnswer: C#")]
    wrong = [("46", "#46#47"), ("46", "460"), ("46", ""), ("46", "46 or 47")]
    scores = score(Scorer("exact"), right + wrong)
    assert scores.rewards.tolist() == scores.accuracy.tolist() == [1] * len(right) + [0] * len(wrong)
    assert scores.rewards.dtype == scores.accuracy.dtype == np.float32


def test_rewards_are_weighted_sums_and_accuracy_is_the_verifier_alone():
    options = {"format": {"pattern": "number"}, "overlong": {"limit": 10, "buffer": 5}}
    scorer = Scorer({"exact": 1.0, "format": 0.1, "overlong": 2.0}, options=options)
    scores = score(scorer, [("46", "46"), ("46", "47"), ("46", "x")], lengths=[10, 2, 2])
    np.testing.assert_allclose(scores.rewards, [1 + 0.1 - 2, 0.1, 0], rtol=1e-6)  # f32 sums of three terms
    assert scores.accuracy.tolist() == [1, 0, 0]
    assert scores.parts["overlong"].tolist() == [-1, 0, 0]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown reward 'exakt'; known: .*exact"):
        Scorer("exakt")
    with pytest.raises(ValueError, match="unknown options \\['patern'\\].*\\['pattern'\\]"):
        Scorer({"exact": 1, "format": 1}, options={"format": {"patern": "number"}})
    with pytest.raises(ValueError, match="reward 'judge': unknown options \\['urls'\\]"):
        Scorer({"judge": 1}, options={"judge": {"urls": "http://a"}}, right_above=0.5)
    with pytest.raises(ValueError, match="'overlong'.*missing \\['buffer', 'limit'\\]"):
        Scorer({"exact": 1, "overlong": 1})
    with pytest.raises(ValueError, match="no verifier among \\['format'\\]"):
        Scorer("format")


def test_an_option_out_of_its_range_is_refused_before_anything_is_scored():
    for options, message in {
        ("format", "pattern", "numbr"): "unknown format 'numbr'; known: .*number",
        ("length", "limit", 0): "length limit must be >= 1 token, got 0",
    }.items():
        part, option, value = options
        with pytest.raises(ValueError, match=message):
            Scorer({"exact": 1, part: 1}, options={part: {option: value}})


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="\\[1, 2, 1\\]"):
        Scorer("exact")([problem("1")], ["1", "1"], [1])


def test_an_environments_reward_is_the_sum_of_its_turns_and_failing_never_pays():
    paid = [SimpleNamespace(rewards=np.array(r, np.float32), error=e) for r, e in TURNS]
    arguments = [problem("1")] * 4, ["1", "2", "1", "1"], [1] * 4
    with Scorer({"environment": 2.0, "exact": 0.5}, right_above=0.0) as scorer:
        scores = scorer(*arguments, paid)
        assert scores.rewards.tolist() == [2.5, -1.0, 0.5, -0.5]
        assert scores.accuracy.tolist() == [1, 0, 0, 0]
        assert scores.errors == {} and scores.failures == [None, None, "timeout", "crash"]
        for nothing in (None, [None] * 4):
            with pytest.raises(ValueError, match="needs completions that an environment played"):
                scorer(*arguments, nothing)
    assert not verifiers.needs_answers({"environment": 1.0})
    assert verifiers.needs_answers({"environment": 1.0, "exact": 1.0})


TURNS = [([-0.5, 1.5], None), ([-0.5], None), ([1.0], "timeout"), ([-0.5], "crash")]


def test_rewards_never_import_jax():
    code = "import sys, rpg_jax.rewards; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_by_source_asks_each_problem_for_its_verifier():
    problems = [problem("46"), problem("7", "aime2025"), problem("7", "amc_23"), problem("18", "gsm8k")]
    scores = Scorer("by_source")(problems, ["46", "Answer: 7", "7", "#### 18"], [1] * 4)
    assert scores.rewards.tolist() == [1, 1, -1, 1]
    assert scores.accuracy.tolist() == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="'poetry'"):
        Scorer("by_source")([problem("1", "poetry")], ["1"], [1])


def test_a_reference_that_the_verifier_cannot_read_is_wrong_and_counted():
    scores = Scorer("gsm8k")([problem("many"), problem("3")], ["#### 3"] * 2, [1] * 2)
    assert scores.rewards.tolist() == [0, 1] and scores.errors == {"error": 1}


def test_a_users_own_function_is_called_by_its_import_path(tmp_path, monkeypatch):
    source = "def score(completion, answer, prompt, *, bonus=0):\n    return (completion == prompt + answer) + bonus\n"
    (tmp_path / "my_rewards.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"my_rewards:score": {"bonus": 0.5}}
    with Scorer({"my_rewards:score": 2.0}, options=options, workers=1, right_above=0.5) as scorer:
        scores = scorer([SimpleNamespace(prompt="a", answer="b", source="s")], ["ab"], [2])
    assert scores.rewards.tolist() == [3.0] and scores.accuracy.tolist() == [1.0]
    with pytest.raises(ValueError, match="no function or class 'scored'"):
        Scorer("my_rewards:scored", workers=1)


def test_a_function_that_cannot_be_called_as_rewards_are_is_refused_before_it_is(tmp_path, monkeypatch):
    (tmp_path / "other_rewards.py").write_text("def score(completion):\n    return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = (
        r"other_rewards:score is called as score\(completion, answer, prompt\) or score\(completion, answer\), with "
    )
    with pytest.raises(ValueError, match=expected + r"strings, and is score\(completion\): too many positional"):
        Scorer("other_rewards:score", workers=1)


def test_a_verifier_that_fails_on_everything_at_first_stops_the_run_with_its_reason_and_a_later_failure_is_told(capsys):
    scorer = Scorer("gsm8k")
    for n in range(15):
        assert score(scorer, [(f"none {n}", "#### 1")] * 8).errors == {"error": 8}
    with pytest.raises(
        ValueError, match="'gsm8k' has failed on every completion of its first 16 problems: error .*15'"
    ):
        score(scorer, [("none 15", "#### 1")])
    scorer = Scorer("gsm8k")
    score(scorer, [("1", "#### 1")])
    assert not capsys.readouterr().err
    for count in (99, 1):
        assert score(scorer, [(f"none {n}", "#### 1") for n in range(count)]).errors == {"error": count}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: the reward 'gsm8k' has failed on a completion: error (ValueError: ")
    assert "'none 0'" in line
