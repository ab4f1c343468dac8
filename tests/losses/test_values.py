"""Advantages from values against the recursion that defines them, and the loss that trains the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import explained_variance, gae, merge, value_loss, value_metrics

# Three completions packed in the first row, one in the second, none in the third. Some have tokens of an environment.
IDS = np.array([[1, 1, 1, 2, 3, 3, 3, 0], [1, 1, 1, 1, 1, 1, 0, 0], [0] * 8])
MASK = np.float32([[1, 0, 1, 1, 1, 1, 1, 0], [1, 0, 0, 1, 1, 0, 0, 0], [0] * 8])


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=IDS.shape), rng.normal(size=IDS.shape)


def recursion(rewards, values, gamma, lam):
    """Backwards through one completion, as the definition says."""
    found, following, value = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * value - values[t] + gamma * lam * following
        found[t], value = following, values[t]
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1, 1), (0.9, 0.95), (0.97, 0), (0, 0.5), (1, 0.3)])
def test_gae_is_the_plain_recursion_of_every_packed_completion_without_what_does_not_count(x64, gamma, lam):
    rewards, values = inputs()
    found, returns = gae(jnp.asarray(rewards), jnp.asarray(values), MASK, IDS, gamma=gamma, gae_lambda=lam)
    for row in range(3):
        for completion in set(IDS[row]) - {0}:
            own = (IDS[row] == completion) & (MASK[row] > 0)
            expected = recursion(rewards[row, own], values[row, own], gamma, lam)
            np.testing.assert_allclose(found[row, own], expected, rtol=1e-12, atol=1e-13)  # another order of sums
            np.testing.assert_allclose(returns[row, own], expected + values[row, own], rtol=1e-12, atol=1e-13)
    assert not np.any(np.asarray(found)[MASK == 0]) and not np.any(np.asarray(returns)[MASK == 0])


def test_lambda_one_is_returns_minus_values_and_lambda_zero_the_one_step_error(x64):
    rewards, values = inputs()
    own, n, gamma = MASK[1] > 0, 3, 0.9
    r, v = rewards[1, own], values[1, own]
    monte_carlo = [sum(gamma ** (u - t) * r[u] for u in range(t, n)) - v[t] for t in range(n)]
    one_step = r + gamma * np.append(v[1:], 0) - v
    for lam, expected in ((1.0, monte_carlo), (0.0, one_step)):
        found = gae(jnp.asarray(rewards), jnp.asarray(values), MASK, IDS, gamma=gamma, gae_lambda=lam)[0]
        np.testing.assert_allclose(found[1, own], expected, rtol=1e-12)


def test_with_the_true_values_of_a_deterministic_end_the_advantages_vanish():
    rewards = np.float32([[0, 0, 2, 2, 0, 0, 2, 0], [0, 0, 0, 0, 2, 0, 0, 0], [0] * 8])
    found = gae(jnp.asarray(rewards), jnp.full(IDS.shape, 2.0), MASK, IDS, gamma=1.0, gae_lambda=0.7)[0]
    np.testing.assert_allclose(found, 0, atol=1e-6)  # f32


def test_packing_and_what_lies_under_the_mask_change_nothing():
    rewards, values = inputs()
    packed = gae(jnp.asarray(rewards), jnp.where(MASK > 0, values, np.nan), MASK, IDS, gamma=0.9, gae_lambda=0.8)[0]
    own = IDS[0] == 3
    alone = gae(jnp.asarray(rewards[:1, own]), jnp.asarray(values[:1, own]), MASK[:1, own], gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(packed[0, own], alone[0][0], rtol=1e-5)  # f32, another association


def test_advantages_and_returns_carry_no_gradient():
    rewards, values = map(jnp.asarray, inputs())
    gradient = jax.grad(lambda v: sum(x.sum() for x in gae(rewards, v, MASK, IDS)))(values)
    assert not np.any(gradient)


def test_the_value_loss_is_the_larger_of_the_plain_and_the_clipped_error():
    values, old, returns = jnp.array([[0.0, 1.0, 3.0]]), jnp.zeros((1, 3)), jnp.array([[1.0, 1.0, 1.0]])
    loss = value_loss(values, old, returns, clip=0.2)
    np.testing.assert_allclose(loss.values, [[0.5, 0.5 * 0.8**2, 0.5 * 4]], rtol=1e-6)
    np.testing.assert_array_equal(loss.events["value_clip"], [[False, True, False]])
    gradient = jax.grad(lambda v: value_loss(v, old, returns, clip=0.2).values.sum())(values)
    np.testing.assert_allclose(gradient, [[-1, 0, 2]])  # no gradient where moving further was not allowed
    np.testing.assert_allclose(value_loss(values, old, returns, clip=None).values, [[0.5, 0, 2]])


def test_a_value_within_the_clip_is_not_counted_as_clipped_by_rounding():
    values, old = jnp.float32(np.random.default_rng(0).uniform(-0.099, 0.099, (2, 1000)))
    loss, plain = (value_loss(values, old, 0.0, clip=clip) for clip in (0.2, None))
    assert not loss.events["value_clip"].any()
    np.testing.assert_array_equal(loss.values, plain.values)


def test_explained_variance_is_that_of_all_tokens_together():
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(4, 6))
    values = returns + rng.normal(scale=0.5, size=returns.shape)
    mask = np.arange(6) < np.array([6, 3, 1, 0])[:, None]
    parts = [
        value_metrics(jnp.asarray(values[r]), jnp.asarray(returns[r]), mask[r]) for r in (slice(0, 1), slice(1, 4))
    ]
    m = {name: float(total / weight) for name, (total, weight) in merge(parts).items()}
    found = explained_variance(
        mean_return=m["return"], mean_return_squared=m["return_squared"],
        mean_error=m["value_error"], mean_error_squared=m["value_error_squared"],
    )  # fmt: skip
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    assert found == pytest.approx(expected, rel=1e-5)  # f32 sums
    constant = dict(mean_return=1.0, mean_return_squared=1.0, mean_error=0.5, mean_error_squared=0.3)
    assert explained_variance(**constant) == 0
    rounded = dict(mean_return=0.1, mean_return_squared=0.01 + 2e-9, mean_error=0.05, mean_error_squared=0.1)
    assert explained_variance(**rounded) == 0, "rewards of 0.1, in sums of f32"


def test_wrong_numbers_are_refused():
    rewards, values = map(jnp.asarray, inputs())
    with pytest.raises(ValueError, match="gae_lambda=1.5"):
        gae(rewards, values, MASK, IDS, gae_lambda=1.5)
    with pytest.raises(ValueError, match="clip of values must be > 0"):
        value_loss(values, values, values, clip=0.0)
