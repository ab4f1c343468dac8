"""Divergences and KL estimators against their definitions, with expectations enumerated in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import divergences
from rpg_jax.losses.divergences import DIVERGENCES, gradient_weight, k1, k2, k3
from rpg_jax.losses.verl import VERL_DIVERGENCES
from tests.losses.oracles import ORACLES

pytestmark = pytest.mark.usefixtures("x64")
EXACT = dict(rtol=0, atol=1e-12)


def policies():
    """log π_θ, log π_old, log π_ref over seven outcomes."""
    return jax.nn.log_softmax(jnp.asarray(np.random.default_rng(0).normal(0, 1, (3, 7))), axis=-1)


def test_every_divergence_has_its_oracle():
    missing = ", ".join(DIVERGENCES.keys() - ORACLES.keys())
    assert not missing, f"add D(p, q) and K(w, ρ) of {missing} to ORACLES in tests/losses/oracles.py"


@pytest.mark.parametrize("name", ORACLES)
def test_mean_under_the_behaviour_policy_is_the_divergence(name):
    theta, old, ref = policies()
    mean = jnp.exp(old) @ DIVERGENCES[name](theta - old, ref - old)
    np.testing.assert_allclose(mean, jnp.sum(ORACLES[name].objective(jnp.exp(theta), jnp.exp(ref))), **EXACT)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradient_weight_is_homogeneous(name):
    theta, old, ref = policies()
    weight = gradient_weight(DIVERGENCES[name], theta - old, ref - old)
    per_ratio = gradient_weight(DIVERGENCES[name], jnp.zeros(7), ref - theta)
    np.testing.assert_allclose(weight, jnp.exp(theta - old) * per_ratio, **EXACT)


def test_the_direction_of_a_divergence_follows_from_its_gradient_weight_and_not_from_its_name():
    assert {name: DIVERGENCES[name].direction for name in ("fkl", "ufkl", "rkl", "urkl")} == {
        "fkl": "forward", "ufkl": "forward", "rkl": "reverse", "urkl": "reverse",
    }  # fmt: skip
    for name in ("js", "ujs"):
        with pytest.raises(ValueError, match="neither forward nor reverse: a=0.5 and c=0.5"):
            _ = DIVERGENCES[name].direction


def test_weighted_k3_is_the_unnormalized_reverse_kl_at_every_sample():
    theta, old, ref = policies()
    weighted = jnp.exp(theta - old) * k3(ref - theta)
    np.testing.assert_allclose(weighted, divergences.unnormalized_reverse_kl(theta - old, ref - old), **EXACT)


def test_k1_and_k3_are_unbiased_under_the_policy_and_k2_is_not():
    theta, _, ref = policies()
    kl = jnp.exp(theta) @ (theta - ref)
    np.testing.assert_allclose(jnp.exp(theta) @ k1(ref - theta), kl, **EXACT)
    np.testing.assert_allclose(jnp.exp(theta) @ k3(ref - theta), kl, **EXACT)
    assert abs(jnp.exp(theta) @ k2(ref - theta) - kl) > 1e-2


def test_k3_of_unnormalized_measures_is_ukl_not_kl():
    p, q = np.array([0.2, 0.9, 1.4]), np.array([0.5, 0.3, 0.1])
    mean = p @ k3(jnp.log(q / p))
    np.testing.assert_allclose(mean, p @ np.log(p / q) + (q - p).sum(), **EXACT)


def test_the_public_js_is_not_the_mean_it_announces():
    theta, old, _ = policies()
    w = np.exp(theta - old)
    announced = 0.5 * (w * np.log(w) - np.log(w))
    coded = 0.5 * (w * np.log(w) + np.log(w))
    zero = jnp.zeros(7)
    np.testing.assert_allclose(DIVERGENCES["js"](theta - old, zero), announced, **EXACT)
    np.testing.assert_allclose(VERL_DIVERGENCES["js"](theta - old, zero), coded, **EXACT)
