"""From verdicts to scores with intervals, and what the page of an evaluation says."""

from __future__ import annotations

import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from rpg_jax.report import scores
from rpg_jax.report.scores import (
    clustered_standard_error,
    estimate,
    interval,
    maj_at_k,
    mean_at_k,
    pass_at_k,
)


def test_mean_at_k_weighs_problems_equally():
    assert mean_at_k([[1, 0], [1, 1, 1, 0]]).tolist() == [0.5, 0.75]


def test_pass_at_k_is_the_average_over_all_subsets():
    for n, c in [(6, 0), (6, 1), (6, 3), (6, 6), (1, 1)]:
        verdicts = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(s) for s in itertools.combinations(verdicts, k)]
            # A few ulps: a product of ratios against a mean of 0 and 1.
            np.testing.assert_allclose(pass_at_k([verdicts], k), [np.mean(subsets)], rtol=1e-14, atol=1e-15)


def test_pass_at_k_stays_finite_for_many_completions():
    exact = 1 - math.comb(1990, 500) / math.comb(2000, 500)
    np.testing.assert_allclose(pass_at_k([[1] * 10 + [0] * 1990], 500), [exact], rtol=1e-12)


def test_the_majority_answer_decides():
    assert maj_at_k([["1", "2", "2"]], [[1, 0, 0]]).tolist() == [0]
    assert maj_at_k([["1", "2", "2"]], [[0, 1, 1]]).tolist() == [1]


def test_ties_count_as_a_random_choice_and_missing_answers_do_not_vote():
    assert maj_at_k([["1", "2"]], [[1, 0]]).tolist() == [0.5]
    assert maj_at_k([["1", "2", "3", "1", "2", "4"]], [[1, 0, 0, 1, 0, 0]]).tolist() == [0.5]
    assert maj_at_k([[None, None, "7"]], [[0, 0, 1]]).tolist() == [1]
    assert maj_at_k([[None, None]], [[0, 0]]).tolist() == [0]


def test_the_standard_error_is_clustered_by_problem():
    # 2 problems, always right or always wrong: 64 completions know no more than two.
    by_problem = mean_at_k([[1] * 32, [0] * 32])
    assert clustered_standard_error(by_problem) == pytest.approx(0.5, rel=1e-15)
    assert math.isnan(clustered_standard_error([1.0]))


def test_the_standard_error_has_the_right_size():
    rng = np.random.default_rng(0)
    draws = rng.beta(0.5, 0.5, size=(2000, 30))
    errors = [clustered_standard_error(row) for row in draws]
    # Both are estimates from 2,000 repetitions; 5 % is three standard deviations of their ratio.
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(draws.mean(1).std(), rel=0.05)


def exact_coverage(low, high, problems, means):
    """The probability that [low, high] holds the mean, f64[means], of verdicts 0 and 1; bounds by the number right."""
    chances = stats.binom.pmf(np.arange(problems + 1), problems, means[:, None])
    return (chances * ((low <= means[:, None]) & (means[:, None] <= high))).sum(1)


def wilson(problems):
    share, z = np.arange(problems + 1) / problems, stats.norm.ppf(0.975)
    centre = (share + z * z / (2 * problems)) / (1 + z * z / problems)
    half = z / (1 + z * z / problems) * np.sqrt(share * (1 - share) / problems + z * z / (4 * problems**2))
    return centre - half, centre + half


def test_intervals_of_one_completion_a_problem_cover_by_exact_sums():
    means = np.linspace(0.02, 0.98, 193)
    least, of_wilson = {}, {}
    for problems in (*range(1, 65), 100, 256, 674, 1000):
        low, high = interval(np.arange(problems)[None, :] < np.arange(problems + 1)[:, None])
        least[problems] = exact_coverage(low, high, problems, means).min()
        of_wilson[problems] = exact_coverage(*wilson(problems), problems, means).min()
    assert min(least.values()) > 0.94
    assert of_wilson[14] < 0.90, "why it is not Wilson's interval"


def test_an_interval_of_verdicts_holds_wilsons_and_is_a_little_wider():
    for problems in (5, 10, 30, 256, 1000):
        low, high = interval(np.arange(problems)[None, :] < np.arange(problems + 1)[:, None])
        lower, higher = wilson(problems)
        assert (low <= lower + 1e-12).all() and (high >= higher - 1e-12).all()
        wider = (high - low) / (higher - lower)
        # The most where nothing or all is right: there Wilson's falls short of 95 %. In the middle they meet as 1 / P.
        assert wider.max() < 1.3 and wider.min() < 1 + 3 / problems


def rates(k, mean, correlation):
    """The chances of 0, …, k right completions where rates of problems are of a beta distribution."""
    counts = np.arange(k + 1)
    if correlation == 0:
        return stats.binom.pmf(counts, k, mean)
    between = 1 / correlation - 1
    return stats.betabinom.pmf(counts, k, mean * between, (1 - mean) * between)


@pytest.mark.parametrize("score", ["mean@2", "mean@8", "mean@32", "pass@4 of 8"])
def test_intervals_of_several_completions_a_problem_cover_at_least_93_percent(score):
    k = int(score.split()[-1].rpartition("@")[2])
    counts = np.arange(k + 1)
    values = pass_at_k([np.arange(k) < c for c in counts], 4) if "pass" in score else counts / k
    rng, repetitions = np.random.default_rng(0), 1500
    grid = (10, 30, 100, 1000), (0.02, 0.05, 0.2, 0.5, 0.98), (0, 0.2, 0.8)
    for problems, mean, correlation in itertools.product(*grid):
        chances = rates(k, mean, correlation)
        truth = chances @ values
        if not 0.02 <= truth <= 0.98:
            continue
        drawn = rng.multinomial(problems, chances / chances.sum(), repetitions)
        low, high = interval(np.repeat(np.tile(values, repetitions), drawn.ravel()).reshape(repetitions, problems))
        # With 20,000 repetitions the least of all is 94.3 %; the standard error of one of these is 0.6 %.
        assert np.mean((low <= truth) & (truth <= high)) >= 0.93, (problems, mean, correlation)


def test_intervals_have_a_width_where_every_problem_has_the_same_score():
    low, high = interval(np.ones(30))
    assert high == 1 and low < 0.95 ** (1 / 30) and low > 0.85, "a rate of 0.9 gives 30 of 30 once in 24 times"
    for value in (0.0, 0.25, 1.0):
        one = estimate([value])
        assert one["low"] < one["high"] and one["standard_error"] is None
        few = estimate([value] * 7)
        assert few["low"] <= value <= few["high"]
        assert few["high"] - few["low"] < one["high"] - one["low"]


def test_an_interval_of_many_problems_is_the_normal_one():
    values = np.random.default_rng(1).beta(2, 2, 20_000)
    found = estimate(values)
    spread = 1.96 * found["standard_error"]
    # The four verdicts more are 2e-4 of these, and D moves by as little.
    np.testing.assert_allclose(
        [found["low"], found["high"]], [found["value"] - spread, found["value"] + spread], atol=0.02 * spread
    )


def test_an_interval_takes_the_memory_of_its_problems():
    values = np.full(17_000, 0.5)
    interval(values)  # scipy is imported
    tracemalloc.start()
    interval(values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * values.nbytes  # a resampling matrix of 10,000 rows has 10,000 times as much


def test_lengths_and_truncation():
    lengths = zip((1, 2, 9), ("stop", "length", "stop"), strict=True)
    statistics = scores.summarise([record(0, i, "7", "right", *of_one) for i, of_one in enumerate(lengths)])["lengths"]
    assert statistics["length_median"] == 2 and statistics["length_max"] == 9
    assert statistics["length_mean"] == 4 and statistics["truncated"] == pytest.approx(1 / 3)


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="pass@3 needs k in \\[1, 2\\], the completions of problem 1"):
        pass_at_k([[1, 0, 1], [1, 0]], 3)
    with pytest.raises(ValueError, match="at least one"):
        mean_at_k([[1], []])
    with pytest.raises(ValueError, match="not rewards"):
        mean_at_k([[1, -1]])
    with pytest.raises(ValueError, match="problem 0: 1 answers, 2 verdicts"):
        maj_at_k([["1"]], [[1, 0]])
    for odd in ([], [0.5, 1.5], [-1.0], [math.nan]):
        with pytest.raises(ValueError, match="at least one problem, and scores in"):
            interval(odd)


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
