"""From records to scores: what counts, and what the page says."""

from __future__ import annotations

import json

import pytest

from rpg_jax.report import score_curve, scores


def record(prompt_id, index, answer, verdict, tokens=4, finish="stop"):
    return {
        "prompt_id": prompt_id, "index": index, "reference": "7", "answer": answer, "verdict": verdict,
        "tokens": tokens, "finish_reason": finish, "reward": 0.75 if verdict == "right" else 0.25,
    }  # fmt: skip


RECORDS = [
    record(0, 0, "7", "right"),
    record(0, 1, "7", "right"),
    record(0, 2, "8", "wrong"),
    record(0, 3, "8", "timeout"),
    record(1, 0, None, "wrong", tokens=9, finish="length"),
    record(1, 1, "5|6", "wrong"),
    record(1, 2, "5|6", "wrong"),
    record(1, 3, "7", "right"),
]


def test_every_score_has_an_error_over_problems_and_an_interval():
    summary = scores.summarise(RECORDS)
    values = {name: e["value"] for name, e in summary["scores"].items()}
    assert list(values) == ["Mean@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert values["Mean@4"] == values["pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert values["pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2) and values["pass@4"] == 1
    assert values["maj@4"] == 0.25  # a tie of right and wrong, and a wrong majority
    mean = summary["scores"]["Mean@4"]
    assert mean["standard_error"] == pytest.approx(0.125) and mean["low"] <= values["Mean@4"] <= mean["high"]
    assert summary["verdicts"] == {"right": 3, "timeout": 1, "wrong": 4} and summary["without_answer"] == 1
    assert summary["lengths"]["truncated"] == pytest.approx(1 / 8)
    json.dumps(summary)


def test_training_notes_the_same_scores():
    noted, summary_of_all = scores.metrics(RECORDS), scores.summarise(RECORDS)
    summary = summary_of_all["scores"]
    for name, score in (("mean_at_k", "Mean@4"), ("pass_at_k", "pass@4"), ("maj_at_k", "maj@4")):
        assert noted[name] == summary[score]["value"]
    assert noted["standard_error"] == summary["Mean@4"]["standard_error"]
    assert noted["reward"] == summary_of_all["reward"] == (3 * 0.75 + 5 * 0.25) / 8
    assert noted["k"] == 4 and noted["completion_length"] == 37 / 8 and noted["truncated"] == 1 / 8


def test_what_has_no_verdict_counts_as_wrong_and_is_said():
    """A completion that made its verifier raise is wrong, and has a verdict."""
    records = [*RECORDS, record(2, 0, "7", "unreachable"), record(2, 1, "7", "timeout"), record(2, 2, "7", "error")]
    said = "note: 3 of 11 completions of held out have no verdict and count as wrong (2 timeout, 1 unreachable)"
    assert scores.without_verdict("held out", records) == said
    assert scores.without_verdict("held out", RECORDS[:3]) == ""
    assert scores.metrics(RECORDS)["no_verdict"] == 1 and scores.metrics(RECORDS[4:])["no_verdict"] == 0
    assert scores.summarise(records)["by_problem"][2]["right"] == 0


def test_conversations_say_how_long_they_are_and_how_often_the_environment_failed():
    turns = [{"rewards": [0.0] * (1 + i % 2), "error": "timeout" if i == 3 else None} for i in range(8)]
    noted = scores.metrics([r | {"turns": t} for r, t in zip(RECORDS, turns, strict=True)])
    assert (noted["turns"], noted["failed"]) == (1.5, 1 / 8) and "turns" not in scores.metrics(RECORDS)


def test_problems_with_different_numbers_of_completions_are_weighed_equally():
    summary = scores.summarise(RECORDS[:6])
    assert list(summary["scores"]) == ["Mean@2–4", "pass@1", "pass@2", "maj@2–4"]
    assert summary["scores"]["Mean@2–4"]["value"] == pytest.approx((2 / 4 + 0) / 2) and summary["k"] == [2, 4]


def test_the_page_has_a_row_for_every_problem_and_states_the_settings():
    page = scores.markdown("run, step 3", {"temperature": 1.0}, {"AIME": scores.summarise(RECORDS)})
    assert "| AIME | 2 | Mean@4 | 0.3750 |" in page
    assert "| 0 | 7 | 2/4 | 7 | 0.50 | 4.0 | 0 |" in page
    assert "| 1 | 7 | 1/4 | 5\\|6 | 0.00 | 5.2 | 1 |" in page
    assert (
        "12.5 % cut off" in page
        and "mean reward 0.4375" in page
        and "1 timeout" in page
        and "| temperature | `1.0` |" in page
    )


def test_one_problem_has_no_standard_error():
    summary = scores.summarise(RECORDS[:4])
    assert summary["scores"]["Mean@4"]["standard_error"] is None
    assert scores.overview({"one": summary})[1][4] == "–"


def test_one_completion_a_problem_is_one_row_and_a_screen_has_one_row_a_set():
    single = scores.summarise([r for r in RECORDS if r["index"] == 0])
    assert (
        len(scores.overview({"AIME": single})) == 2 and len(scores.overview({"AIME": scores.summarise(RECORDS)})) == 6
    )
    assert scores.one_row_a_set({"AIME": single}) == [
        ["set", "problems", "Mean@1", "standard error", "95 % interval"],
        ["AIME", "2", "0.5000", "0.5000", "0.0000 – 1.0000"],
    ]
    two = scores.one_row_a_set({name: scores.summarise(RECORDS) for name in ("AIME", "AMC")})
    assert two[0][2] == "Mean@4" and two[0][5:] == ["pass@4", "maj@4"] and two[2][5:] == ["1.0000", "0.2500"]
    assert scores.one_row_a_set({"a": single, "b": scores.summarise(RECORDS)})[0][5:] == ["pass@k", "maj@k"]


def test_a_curve_has_a_row_for_each_checkpoint_and_a_line_for_each_set():
    points = [(step, {name: scores.summarise(RECORDS) for name in ("AIME", "AMC")}) for step in (10, 20)]
    assert score_curve.rows(points) == [
        ["step", "AIME", "AMC"],
        *([step, "0.3750 ± 0.1250", "0.3750 ± 0.1250"] for step in ("10", "20")),
    ]
    assert score_curve.draw("run", points).startswith(b"\x89PNG")
