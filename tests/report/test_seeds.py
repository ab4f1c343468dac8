"""What may be said of a difference between two rows, checked against draws whose true difference is known."""

import numpy as np
import pytest
from scipy import stats

from rpg_jax.report.seeds import Mean, mean, over_starts, paired_difference, pooled, tally


def drawn(difference: float, seeds: int, count: int = 4_000) -> list[Mean]:
    """`count` comparisons over `seeds` runs, with a noise of 1 in the paired difference."""
    noise = np.random.default_rng(0).normal(difference, 1.0, (count, seeds))
    halves = stats.t.ppf(0.975, seeds - 1) * noise.std(axis=1, ddof=1) / np.sqrt(seeds)
    return [Mean(float(m), float(h), seeds) for m, h in zip(noise.mean(axis=1), halves, strict=True)]


def detectable(found: Mean) -> float:
    """The smallest true difference that so many runs find with power 0.8: (t_0.975 + t_0.8) standard errors."""
    t = stats.t(found.seeds - 1).ppf([0.975, 0.8])
    return float(found.half * t.sum() / t[0])


def test_one_interval_in_twenty_excludes_0_where_there_is_no_difference():
    share = np.mean([d.excludes_zero for d in drawn(0.0, seeds=5)])
    assert share == pytest.approx(0.05, abs=0.011)  # three standard errors of 4,000 draws
    assert not Mean(0.3, float("nan"), 1).excludes_zero  # one seed shows nothing


def test_a_difference_at_the_bound_is_called_equivalent_once_in_forty():
    """The interval lies within ± bound only if both its ends do: at a true difference of `bound` one end decides."""
    found = [d.within(1.5) for d in drawn(1.5, seeds=5)]
    assert np.mean(found) <= 0.025 + 0.0075  # three standard errors
    assert np.mean([d.within(3.0) for d in drawn(0.0, seeds=5)]) > 0.9
    assert not Mean(0.1, 2.0, 3).within(1.5)  # an interval that contains 0 and much else is no equality


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_detectable_difference_is_found_in_four_of_five_cases(seeds):
    """With the true noise in place of each sample's own: (t_0.975 + t_0.8) errors; few seeds make it approximate."""
    error = 1 / np.sqrt(seeds)
    size = detectable(Mean(0.0, float(stats.t.ppf(0.975, seeds - 1) * error), seeds))
    assert np.mean([d.excludes_zero for d in drawn(size, seeds)]) == pytest.approx(0.8, abs=0.05)


def test_rows_that_are_one_algorithm_are_averaged_over_the_seeds_that_all_have():
    values = {"a": {0: 1.0, 1: 2.0, 2: 9.0}, "b": {0: 3.0, 1: 6.0}, "c": {0: 0.0}}
    assert pooled(values, ["a", "b"]) == {0: 2.0, 1: 4.0}


def test_a_start_counts_as_one_draw_however_many_seeds_it_has():
    """Many seeds of three starts: their differences hardly vary within a start, and by 4 between starts."""
    rng = np.random.default_rng(1)
    of_start = {0: -4.0, 1: 0.0, 2: 4.0}
    values = {f"ours {n}": {s: d + rng.normal(0, 0.01) for s in range(50)} for n, d in of_start.items()}
    values |= {f"theirs {n}": dict.fromkeys(range(50), 0.0) for n in of_start}
    rows, others = [f"ours {n}" for n in of_start], [f"theirs {n}" for n in of_start]
    over = over_starts(values, rows, others)
    assert over.seeds == 3 and not over.excludes_zero and over.half == pytest.approx(mean([-4, 0, 4]).half, rel=0.01)
    assert paired_difference(values["ours 2"], values["theirs 2"]).excludes_zero  # one start alone seems sure


def test_a_tally_counts_intervals_and_signs_and_leaves_single_seeds_out():
    differences = [Mean(-2.0, 1.0, 5), Mean(-0.5, 1.0, 5), Mean(0.1, 1.0, 5), Mean(-9.0, float("nan"), 1)]
    expected = "1 of 3 intervals exclude 0, where chance alone gives 0.1 on average; 2 of 3 differences are negative."
    assert tally(differences) == expected
