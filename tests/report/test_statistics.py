from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from rpg_jax.report.statistics import (
    clustered_standard_error,
    estimate,
    interval,
    length_statistics,
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


def test_majority_of_fewer_completions_averages_disjoint_groups():
    answers, correct = ["1", "1", "2", "2", "1", "2", "1"], [1, 1, 0, 0, 1, 0, 1]
    assert maj_at_k([answers], [correct], 1)[0] == pytest.approx(np.mean(correct), rel=1e-15)
    assert maj_at_k([answers], [correct], 3).tolist() == [0.5]  # 1 1 2 | 2 1 2; the seventh is left over


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
        assert one.low < one.high and math.isnan(one.standard_error)
        few = estimate([value] * 7)
        assert few.low <= value <= few.high and few.high - few.low < one.high - one.low


def test_an_interval_of_many_problems_is_the_normal_one():
    values = np.random.default_rng(1).beta(2, 2, 20_000)
    found = estimate(values)
    spread = 1.96 * found.standard_error
    # The four verdicts more are 2e-4 of these, and D moves by as little.
    np.testing.assert_allclose(
        [found.low, found.high], [found.value - spread, found.value + spread], atol=0.02 * spread
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
    statistics = length_statistics([1, 2, 9], ["stop", "length", "stop"])
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
    with pytest.raises(ValueError, match="0 lengths"):
        length_statistics([], [])
