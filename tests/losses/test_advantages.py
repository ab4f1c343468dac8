"""Advantages against their definitions (their agreement with the public code is in test_verl)."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import ADVANTAGES, LEARNED_ADVANTAGES, advantages, declare_own_advantage

REWARDS = np.array([[1.0, -1.0, 0.5], [0.0, 0.0, 0.0], [2.0, 2.0, -1.0]], np.float32)
LENGTHS = np.array([[2, 1, 3], [4, 1, 1], [1, 0, 2]])


def test_leave_one_out_subtracts_the_mean_of_the_others():
    found = advantages("leave_one_out", REWARDS)
    others = [[np.mean(np.delete(group, i)) for i in range(3)] for group in REWARDS]
    np.testing.assert_allclose(found, REWARDS - np.array(others), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["group_mean", "group_standardised", "leave_one_out", "maxrl", "gdpo"])
@pytest.mark.parametrize(("reward", "size"), [(0.0, 3), (1.1, 16), (-0.7, 16), (0.9, 5), (0.1, 8)])
def test_a_group_of_equal_rewards_has_no_advantage(name, reward, size):
    """Also where their mean in f32 is not the reward: a difference of one bit would be divided by a std of zero."""
    np.testing.assert_array_equal(advantages(name, np.full((2, size), reward, np.float32)), 0)


@pytest.mark.parametrize("name", ["group_mean", "group_standardised", "leave_one_out", "maxrl"])
def test_a_group_of_one_has_baseline_zero(name):
    np.testing.assert_allclose(advantages(name, REWARDS[:, :1]), REWARDS[:, :1], rtol=2e-6)


@pytest.mark.usefixtures("x64")
def test_gdpo_standardises_each_part_in_its_group_and_the_weighted_sum_over_the_batch():
    """By hand, in numpy. So the scale of a part does not matter."""
    rng = np.random.default_rng(0)
    parts, weights = rng.integers(0, 2, (5, 4, 2)) * np.array([1.0, 20.0]) + rng.normal(0, 0.1, (5, 4, 2)), (1.0, 0.5)
    summed = np.zeros((5, 4))
    for p in range(5):
        for n in range(2):
            x = parts[p, :, n]
            summed[p] += weights[n] * (x - x.mean()) / (x.std(ddof=1) + 1e-6)
    expected = (summed - summed.mean()) / (summed.std(ddof=1) + 1e-6)
    rewards = parts @ np.array(weights)
    np.testing.assert_allclose(advantages("gdpo", rewards, parts=parts, part_weights=weights), expected, rtol=1e-12)
    scaled = advantages("gdpo", rewards, parts=parts * np.array([1.0, 3.0]), part_weights=weights)
    np.testing.assert_allclose(scaled, expected, atol=1e-4)  # 1e-6 is added to a deviation of about 0.1
    with pytest.raises(ValueError, match=r"1 part_weights\] for rewards \(5, 4\), got \(5, 4, 2\)"):
        advantages("gdpo", rewards, parts=parts, part_weights=(1.0,))


@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (-1.0, 1.0), (-3.5, 0.25)])
def test_maxrl_divides_by_the_success_rate_whatever_a_success_and_a_failure_earn(wrong, right):
    """arXiv:2602.02710 Algorithm 1: (s − p)/p with s ∈ {0, 1}; nothing where nobody succeeds."""
    successes = np.array([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, -1, 1 / 3], [0] * 4, [0] * 4]
    found = advantages("maxrl", np.where(successes, right, wrong))
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # f32


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [2, 4])
def test_maxrl_is_unbiased_for_the_first_terms_of_the_log_likelihoods_gradient(size):
    """E[mean of A ∇log π] over every group of `size` is Σ_{k<size} ∇pass@k / k, pass@k = 1 − (1 − p)^k."""
    logits, right = jnp.asarray([0.3, -0.9, 0.4]), np.array([1.0, 0.0, 0.0])
    groups = np.array(list(itertools.product(range(3), repeat=size)))
    scores = np.asarray(jax.jacobian(jax.nn.log_softmax)(logits))
    probabilities = np.prod(np.asarray(jax.nn.softmax(logits))[groups], axis=1)
    a = np.asarray(advantages("maxrl", right[groups]))
    found = np.einsum("n,ng,ngv->v", probabilities, a, scores[groups]) / size

    def terms(logits):
        fails = 1 - jax.nn.softmax(logits) @ right
        return sum((1 - fails**k) / k for k in range(1, size))

    np.testing.assert_allclose(found, jax.grad(terms)(logits), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["whitened_returns", "whitened_group_mean"])
def test_whitened_advantages_have_mean_zero_and_variance_one_over_tokens(name):
    tokens = np.repeat(np.asarray(advantages(name, REWARDS, lengths=LENGTHS)).ravel(), LENGTHS.ravel())
    np.testing.assert_allclose([tokens.mean(), tokens.var(ddof=1)], [0, 1], atol=1e-6)


@pytest.mark.parametrize("name", ["whitened_returns", "whitened_group_mean"])
def test_whitening_needs_lengths_and_survives_a_single_token(name):
    with pytest.raises(ValueError, match="lengths"):
        advantages(name, REWARDS)
    assert np.isfinite(advantages(name, np.ones((1, 1)), lengths=np.ones((1, 1), int))).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_carry_no_gradient(name):
    weights = np.arange(9.0).reshape(3, 3)
    gradient = jax.grad(lambda r: jnp.sum(weights * advantages(name, r, lengths=LENGTHS)))(jnp.asarray(REWARDS))
    assert not np.any(gradient)


@pytest.mark.parametrize("name", LEARNED_ADVANTAGES)
def test_a_learned_advantage_is_not_one_of_rewards(name):
    assert name not in ADVANTAGES
    with pytest.raises(ValueError, match=f"'{name}' comes from the values of a critic.*group_mean, .*batch_mean"):
        advantages(name, REWARDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("group_means", REWARDS), "Did you mean 'group_mean'"),
        (("group_mean", REWARDS[0]), "prompts"),
        (("whitened_returns", REWARDS, LENGTHS[:2]), r"\(3, 3\).*\(2, 3\)"),
    ],
)
def test_what_cannot_be_an_advantage_is_refused(arguments, message):
    name, rewards, *lengths = arguments
    with pytest.raises(ValueError, match=message):
        advantages(name, rewards, lengths=lengths[0] if lengths else None)


@pytest.mark.parametrize("reward", (0.1, 1 / 3, -0.7))
@pytest.mark.parametrize("name", ("whitened_returns", "whitened_group_mean"))
def test_equal_rewards_have_whitened_advantages_of_exactly_zero(name, reward):
    """A rounded mean, divided by the square root of the variance's floor, would be an advantage of a thousandth."""
    lengths = jnp.asarray([[3, 7, 0], [11, 1, 5]])
    rewards = jnp.full((2, 3), reward, jnp.float32)
    trained = np.asarray(lengths) > 0
    np.testing.assert_array_equal(np.asarray(advantages(name, rewards, lengths=lengths))[trained], 0)
    if name == "whitened_returns":  # a completion without trained tokens does not count
        np.testing.assert_array_equal(
            np.asarray(advantages(name, rewards.at[0, 2].set(5.0), lengths=lengths))[trained], 0
        )


def by_definition(name, groups):
    """Advantages of groups of any sizes, in numpy; a group is (rewards, lengths, parts [G, 2])."""

    def standardised(x):
        return (x - x.mean()) / (x.std(ddof=1) + 1e-6)

    def whitened(values):
        tokens = np.repeat(np.concatenate(values), np.concatenate([n for _, n, _ in groups]))
        return [(x - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for x in values]

    rewards = [r for r, _, _ in groups]
    summed = [standardised(q[:, 0]) + 0.5 * standardised(q[:, 1]) for _, _, q in groups] if name == "gdpo" else rewards
    own = {
        "group_mean": lambda r: r - r.mean(),
        "group_standardised": standardised,
        "leave_one_out": lambda r: (r - r.mean()) * len(r) / (len(r) - 1),
        "maxrl": lambda r: (r - r.mean()) / (r.mean() - r.min()),
    }
    if name in own:
        return [own[name](r) for r in rewards]
    if name == "batch_mean":
        return [r - np.concatenate(rewards).mean() for r in rewards]
    if name == "gdpo":
        every = np.concatenate(summed)
        return [(x - every.mean()) / (every.std(ddof=1) + 1e-6) for x in summed]
    return whitened([r - r.mean() for r in rewards] if name == "whitened_group_mean" else rewards)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_is_not_counted_changes_no_advantage_and_has_none(name):
    """Of five completions none, one, two, four and all are left out. Where one remains, it has no advantage either."""
    rng = np.random.default_rng(3)
    rewards, lengths, parts = rng.normal(size=(5, 5)), rng.integers(1, 9, (5, 5)), rng.normal(size=(5, 5, 2))
    counted = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]) == 1
    given = {"lengths": lengths, "parts": parts, "part_weights": (1.0, 0.5)}
    found = np.asarray(advantages(name, rewards, counted=counted, **given))
    left = [(rewards[p][counted[p]], lengths[p][counted[p]], parts[p][counted[p]]) for p in range(3)]
    expected = by_definition(name, left)
    np.testing.assert_allclose(found[:3][counted[:3]], np.concatenate(expected), rtol=1e-12)
    assert not found[~counted].any() and not found[3:].any()
    unknown = np.where(counted, rewards, np.nan)
    np.testing.assert_array_equal(advantages(name, unknown, counted=counted, **given), found)
    every = np.asarray(advantages(name, rewards, counted=np.ones((5, 5), bool), **given))
    np.testing.assert_allclose(every, advantages(name, rewards, **given), rtol=1e-12)


@pytest.fixture
def own_advantage():
    """Declares an advantage "outside:own" for the test."""
    yield lambda function: declare_own_advantage("outside:own", function)
    ADVANTAGES.pop("outside:own", None)


def test_an_advantage_of_ones_own_gets_what_it_asks_for_in_any_order(own_advantage):
    def own(rewards, counted, lengths):
        return jnp.where(counted, rewards * lengths, 0)

    own_advantage(own)
    counted = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1]], bool)
    found = advantages("outside:own", REWARDS, lengths=LENGTHS, counted=counted)
    np.testing.assert_allclose(found, np.where(counted, REWARDS * LENGTHS, 0))


def test_an_advantage_that_asks_for_counted_gets_an_array_also_where_all_completions_count(own_advantage):
    def own(rewards, counted):
        assert counted.shape == rewards.shape and counted.dtype == bool
        return rewards - jnp.mean(rewards, axis=1, keepdims=True, where=counted)

    own_advantage(own)
    found = advantages("outside:own", REWARDS, lengths=LENGTHS)
    np.testing.assert_allclose(found, REWARDS - REWARDS.mean(axis=1, keepdims=True), rtol=1e-6, atol=1e-6)


def test_an_advantage_keeps_its_own_default_of_counted(own_advantage):
    own_advantage(lambda rewards, counted=2.0: counted * rewards)
    np.testing.assert_allclose(advantages("outside:own", REWARDS), 2 * REWARDS)
