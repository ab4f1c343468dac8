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


def test_a_scan_starts_anew_with_each_completion_and_passes_masked_tokens():
    x = jnp.array([[1.0, 2, 4, 8, 16, 32]])
    ids = jnp.array([[1, 1, 1, 2, 2, 0]])
    mask = jnp.array([[1, 0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(masking.completion_scan(x, mask, ids)[0, :5], [1, 1, 5, 8, 24])
    np.testing.assert_array_equal(masking.completion_scan(x, mask, ids, reverse=True)[0, :5], [5, 4, 4, 24, 16])
    np.testing.assert_array_equal(masking.completion_scan(x, jnp.ones_like(x)), jnp.cumsum(x, axis=1))


def test_a_scan_backwards_decays_what_comes_later():
    x, decay = jnp.array([[1.0, 2, 4, 8]]), jnp.array([[0.5, 3, 7, 0.25]])
    ids, mask = jnp.array([[1, 1, 1, 2]]), jnp.array([[1, 1, 0, 1]])
    # From the end: 8; nothing, for 4 is masked; 2 + 3 · 0; 1 + 0.5 · 2.
    np.testing.assert_array_equal(masking.completion_scan(x, mask, ids, decay=decay, reverse=True), [[2, 2, 0, 8]])
    every = masking.completion_scan(x, jnp.ones_like(x), decay=decay, reverse=True)
    np.testing.assert_array_equal(every, [[1 + 0.5 * (2 + 3 * (4 + 7 * 8)), 2 + 3 * (4 + 7 * 8), 4 + 7 * 8, 8]])
