from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rpg_jax.report.statistics import (
    bootstrap_interval,
    clustered_standard_error,
    estimate,
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


def test_the_bootstrap_interval_matches_the_normal_one_where_that_holds():
    values = np.random.default_rng(1).normal(0.5, 0.1, 400)
    low, high = bootstrap_interval(values)
    spread = 1.96 * clustered_standard_error(values)
    np.testing.assert_allclose([low, high], [values.mean() - spread, values.mean() + spread], atol=0.05 * spread)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25)
    inner = estimate(values, level=0.5)
    assert low < inner.low < inner.value < inner.high < high


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
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=95)
    with pytest.raises(ValueError, match="0 lengths"):
        length_statistics([], [])
