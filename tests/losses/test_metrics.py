"""Metrics as floats: one division, after micro-batches are added up."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from rpg_jax.losses import divided, merge


def pair(total, weight):
    return jnp.float32(total), jnp.float32(weight)


def test_the_sum_over_micro_batches_is_divided_once():
    parts = [{"kl": pair(1, 1), "gap_max": pair(0.5, 1)}, {"kl": pair(2, 4), "gap_max": pair(0.25, 1)}]
    found = divided(merge(parts))
    assert found == {"kl": 0.6, "gap_max": 0.5}
    assert all(type(value) is float for value in found.values())


def test_a_weight_of_zero_gives_zero_and_a_maximum_stays_as_it_is():
    assert divided({"kl": pair(0, 0), "gap_max": pair(7, 2)}) == {"kl": 0.0, "gap_max": 7.0}


def test_the_share_of_a_small_gradient_is_that_of_a_large_one():
    squares = {"large_share": pair(1, 4), "small_share": pair(1e-16, 4e-16), "no_share": pair(0, 0)}
    assert divided(squares) == pytest.approx({"large_share": 0.5, "small_share": 0.5, "no_share": 0.0}, rel=1e-6)
    assert math.isnan(divided({"kl_share": pair(1, math.nan)})["kl_share"])
