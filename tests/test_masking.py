"""Masked reductions against loops over the unmasked entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import masking

X = jnp.array([[1.0, 2.0, jnp.nan, 4.0], [5.0, jnp.inf, 7.0, 8.0]])
MASK = jnp.array([[1, 1, 0, 1], [1, 0, 1, 1]])
IDS = jnp.array([[1, 1, 0, 2], [3, 0, 3, 1]])


def test_masked_entries_reach_neither_a_sum_nor_a_gradient():
    assert masking.masked_sum(X, MASK) == 27
    np.testing.assert_array_equal(masking.masked_sum(X, MASK, axis=1), [7, 20])
    gradient = jax.grad(lambda x: masking.masked_sum(x * x, MASK))(X)
    np.testing.assert_array_equal(jnp.nan_to_num(gradient, nan=-1)[0, :2], [2, 4])
    filled = jax.grad(lambda x: jnp.sum(masking.masked_fill(x, MASK) ** 2))(X)
    np.testing.assert_array_equal(filled, [[2, 4, 0, 8], [10, 0, 14, 16]])


def test_the_maximum_is_over_unmasked_entries_and_zero_where_there_are_none():
    assert masking.masked_max(X, MASK) == 8
    assert masking.masked_max(X, jnp.zeros_like(MASK)) == 0


def test_completions_of_a_row_are_told_apart():
    sums = masking.completion_sum(X, MASK, IDS)
    np.testing.assert_array_equal(sums[np.asarray(MASK, bool)], [3, 3, 4, 12, 12, 8])
    means = masking.completion_mean(X, MASK, IDS)
    np.testing.assert_array_equal(means[np.asarray(MASK, bool)], [1.5, 1.5, 4, 6, 6, 8])
    assert masking.completion_count(MASK, IDS) == 4


def test_without_ids_a_row_is_a_completion_and_an_empty_row_is_none():
    np.testing.assert_array_equal(masking.completion_sum(X, MASK), [[7] * 4, [20] * 4])
    assert masking.completion_count(MASK) == 2
    assert masking.completion_count(MASK.at[0].set(0)) == 1
    assert np.isfinite(masking.completion_mean(X, MASK.at[0].set(0))).all()
