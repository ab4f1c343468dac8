"""The estimator `exact` against −∇J with every completion enumerated in float64, as in `test_completions`.

The KL of a prefix is summed over the actions at the prefix. Both tables, θ and π_ref, are needed for the sum.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import DIVERGENCES, PrefixKL, policy_loss, token_loss
from rpg_jax.losses.tokens import checked
from tests.losses.oracles import OF_COMPLETIONS, ORACLES
from tests.losses.test_completions import (
    ACTIONS,
    EXACT,
    KL_COEF,
    exact_gradient,
    logprobs,
    tree,
    with_environment,
)

pytestmark = pytest.mark.usefixtures("x64")
CHAIN = dict(level="to_go", clip="none", weight="product", trace_cap=float("inf"), kl_coef=KL_COEF)


@functools.cache
def tables(length, policy="off"):
    """θ, and the tables of π_old and π_ref, f64[prefixes, ACTIONS]; rewards f64[N]."""
    rng, (_, _, mask, prefixes) = np.random.default_rng(length), tree(length)
    theta, old, ref = (jnp.asarray(rng.normal(0, 0.7, (prefixes, ACTIONS))) for _ in range(3))
    return theta, old if policy == "off" else theta, ref, jnp.asarray(rng.normal(0, 1, len(mask)))


def prefix_kl(theta, ref, length):
    """KL of the next-action distributions at every prefix of every completion, f64[N, length] each."""
    _, nodes, _, _ = tree(length)
    p, q = (jax.nn.log_softmax(x) for x in (theta, ref))
    return PrefixKL(*(jnp.sum(jnp.exp(of) * (of - to), axis=1)[nodes] for of, to in ((p, q), (q, p))))


def expected_loss(theta, case, length, mask=None, along=logprobs, **options):
    """The expectation of the loss over completions of π_old."""
    _, old, ref, rewards = case
    mask = tree(length)[2] if mask is None else mask
    tokens = checked(
        logprobs=along(theta, length),
        behaviour_logprobs=along(old, length),
        ref_logprobs=along(ref, length),
        advantages=rewards,
        mask=mask,
        sampler_logprobs=None,
        completion_ids=None,
        prefix_kl=prefix_kl(theta, ref, length) if options["estimator"] == "exact" else None,
    )
    values = token_loss("rpg", tokens, **options).values
    return jnp.exp(jnp.sum(along(old, length), axis=1)) @ jnp.sum(values * mask, axis=1)


def gradient(case, length, **options):
    return jax.jit(jax.grad(lambda x: expected_loss(x, case, length, **options)))(case[0])


@pytest.mark.parametrize("divergence", OF_COMPLETIONS)
def test_to_go_with_the_product_weight_is_exact_for_completions(divergence, length=4):
    for policy in ("on", "off"):
        case = tables(length, policy)
        theta, old, ref, rewards = case
        exact = exact_gradient(divergence, (theta, logprobs(old, length), logprobs(ref, length), rewards), length)
        got = gradient(case, length, divergence=divergence, estimator="exact", **CHAIN)
        np.testing.assert_allclose(got, exact, **EXACT, err_msg=policy)
        assert np.max(np.abs(exact)) > 0.05


@pytest.mark.parametrize("divergence", ("rkl", "urkl"))
def test_to_go_is_exact_on_policy_without_the_weights_of_prefixes(divergence, length=4):
    theta, old, ref, rewards = case = tables(length, "on")
    exact = exact_gradient(divergence, (theta, logprobs(old, length), logprobs(ref, length), rewards), length)
    got = gradient(case, length, divergence=divergence, estimator="exact", **CHAIN | {"weight": "token"})
    np.testing.assert_allclose(got, exact, **EXACT)


@pytest.mark.parametrize("divergence", OF_COMPLETIONS)
def test_at_the_level_of_tokens_it_has_the_expected_gradient_of_samples(divergence, length=3):
    """Off-policy: the prefixes are those of π_old for both. Without a trace `to_go` is the level of tokens."""
    case, options = tables(length), dict(divergence=divergence, clip="none", kl_coef=KL_COEF)
    sampled = gradient(case, length, estimator="reinforce", **options)
    np.testing.assert_allclose(gradient(case, length, estimator="exact", **options), sampled, **EXACT)
    reverse = DIVERGENCES[divergence].of_completions().c == 0  # a forward KL has prefixes of the reference in `to_go`
    short = gradient(case, length, estimator="exact", **CHAIN | options | {"weight": "token", "trace_decay": 0.0})
    assert np.allclose(short, sampled, **EXACT) == reverse


@pytest.mark.parametrize("divergence", OF_COMPLETIONS)
def test_given_a_prefix_the_kl_has_no_noise(divergence):
    """Completions of one token share their prefix: all of them have one gradient."""
    theta, old, ref, rewards = tables(1)
    options = dict(divergence=divergence, clip="none", kl_coef=KL_COEF)

    columns = {"behaviour_logprobs": logprobs(old, 1), "ref_logprobs": logprobs(ref, 1), "advantages": 0 * rewards}
    columns |= {"mask": tree(1)[2], "sampler_logprobs": None, "completion_ids": None}

    def each(estimator):
        def losses(x):
            tokens = checked(logprobs=logprobs(x, 1), prefix_kl=prefix_kl(x, ref, 1), **columns)
            return token_loss("rpg", tokens, estimator=estimator, **options).values[:, 0]

        return jax.jacrev(losses)(theta)

    exact, sampled = each("exact"), each("reinforce")
    np.testing.assert_allclose(exact, jnp.broadcast_to(exact[0], exact.shape), **EXACT)
    assert np.max(np.ptp(sampled, axis=0)) > 0.1


@pytest.mark.parametrize("divergence", ("rkl", "fkl", "ujs"))
def test_it_is_exact_for_conversations(divergence, length=5):
    """An environment draws every second action: its tokens are masked, and count neither in weights nor in the KL."""
    theta, old, ref, rewards = (jnp.asarray(np.random.default_rng(i).normal(0, 0.7, (31, ACTIONS))) for i in range(4))
    rewards = rewards.ravel()[: len(tree(length)[0])]
    mask = tree(length)[2] * (np.arange(length) % 2 == 0)
    columns = (theta, with_environment(old, length), with_environment(ref, length), rewards)
    exact = exact_gradient(divergence, columns, length, with_environment)

    def loss(x):
        case = x, old, ref, rewards
        return expected_loss(x, case, length, mask, with_environment, divergence=divergence, estimator="exact", **CHAIN)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(theta), exact, **EXACT)
    assert np.max(np.abs(exact)) > 0.01


def arrays(rng, shape=(2, 6)):
    names = ("logprobs", "behaviour_logprobs", "ref_logprobs", "advantages")
    given = {name: jnp.asarray(rng.normal(0, 0.5, shape)) for name in names}
    return given | {"prefix_kl": PrefixKL(*jnp.asarray(rng.uniform(0, 1, (2, *shape)))), "mask": jnp.ones(shape)}


@pytest.mark.parametrize("clip", ("none", "dual", "truncate", "reward"))
def test_a_clip_bounds_the_term_of_the_reward_alone(clip):
    given, options = arrays(np.random.default_rng(0)), dict(clip=clip, divergence="js")

    def loss(logprobs, kl, kl_coef, **more):
        arguments = given | {"logprobs": logprobs, "prefix_kl": kl}
        return policy_loss("rpg", **arguments, kl_coef=kl_coef, **options, **more)[0]

    with_kl, of_kl = jax.grad(loss, argnums=(0, 1))(given["logprobs"], given["prefix_kl"], 0.3, estimator="exact")
    without = jax.grad(loss)(given["logprobs"], given["prefix_kl"], 0.0)
    np.testing.assert_allclose(with_kl, without, **EXACT)
    for x in of_kl:
        np.testing.assert_allclose(x, jnp.full(x.shape, 0.15), **EXACT)  # β/2 at every token, clipped or not


@pytest.mark.parametrize("clip", ("dual", "truncate", "reward"))
def test_the_kl_to_come_is_clipped_as_a_part_of_the_advantage(clip):
    """It has the gradient of the same loss without a KL, whose advantages are A − β F."""
    given, beta = arrays(np.random.default_rng(1)), 0.3
    options = dict(clip=clip, divergence="rkl", level="to_go", aggregate="sequence_mean_token_sum", weight="none")
    w, reverse = jnp.exp(given["logprobs"] - given["behaviour_logprobs"]), given["prefix_kl"].reverse
    ahead = np.zeros(reverse.shape)
    for t in range(reverse.shape[1] - 2, -1, -1):
        ahead[:, t] = 0.9 * np.minimum(w[:, t], 1.0) * (reverse[:, t + 1] + ahead[:, t + 1])

    def loss(logprobs, advantages, kl_coef, **more):
        arguments = given | {"logprobs": logprobs, "advantages": advantages}
        return policy_loss("rpg", **arguments, kl_coef=kl_coef, **options, **more)[0]

    got = jax.grad(loss)(given["logprobs"], given["advantages"], beta, estimator="exact", trace_decay=0.9)
    if clip == "reward":  # the clip bounds −A alone
        kept = jax.grad(loss)(given["logprobs"], given["advantages"], 0.0)
        np.testing.assert_allclose(got, kept + beta * ahead, **EXACT)
    else:
        np.testing.assert_allclose(
            got, jax.grad(loss)(given["logprobs"], given["advantages"] - beta * ahead, 0.0), **EXACT
        )


@pytest.mark.parametrize("weight", ("product", "capped", "token"))
def test_the_kl_of_a_prefix_has_the_weight_of_the_prefix_and_of_no_later_token(weight):
    """A later token's ratio would change no mean, and add noise."""
    given = arrays(np.random.default_rng(5))
    options = dict(CHAIN, weight=weight, estimator="exact", divergence="js", aggregate="sequence_mean_token_sum")

    def loss(kl):
        return policy_loss("rpg", **given | {"prefix_kl": kl}, **options)[0]

    found = jax.grad(loss)(given["prefix_kl"])
    before = [given[x] - given["behaviour_logprobs"] for x in ("logprobs", "ref_logprobs")]
    prefix, of_reference = (np.exp(np.cumsum(x, axis=1) - x) for x in before)
    prefix = {"product": prefix, "capped": np.minimum(prefix, 2.0), "token": np.ones(prefix.shape)}[weight]
    np.testing.assert_allclose(found.reverse, KL_COEF / 2 * prefix, **EXACT)
    np.testing.assert_allclose(found.forward, KL_COEF / 2 * of_reference, **EXACT)


@pytest.mark.slow  # compiles, or waits, for seconds
def test_packed_completions_and_masked_tokens_change_no_number():
    rng = np.random.default_rng(2)
    given, options = arrays(rng), dict(CHAIN, estimator="exact", divergence="js", aggregate="constant")
    options |= {"constant_length": 1}

    def loss(given):
        return policy_loss("rpg", **given, **options)[0]

    packed = jax.tree.map(lambda x: x.reshape(1, 12), given)
    ids = {"completion_ids": jnp.repeat(jnp.array([[1, 2]]), 6, axis=1)}
    np.testing.assert_allclose(loss(packed | ids), loss(given), **EXACT)
    short = jax.tree.map(lambda x: x[:, :4], given)
    broken = jax.tree.map(lambda x: x.at[:, 4:].set(jnp.nan), given) | {"mask": given["mask"].at[:, 4:].set(0)}
    np.testing.assert_allclose(loss(broken), loss(short), **EXACT)
    tokens = checked(**broken, sampler_logprobs=None, completion_ids=None)
    assert not any(np.any(x[:, 4:]) for x in tokens.prefix_kl)


def test_the_metric_is_the_mean_of_the_reverse_kl_of_prefixes():
    given = arrays(np.random.default_rng(3))
    given["mask"] = given["mask"].at[:, 4:].set(0)
    total, weight = policy_loss("rpg", **given)[2]["kl_exact"]
    np.testing.assert_allclose(total / weight, jnp.mean(given["prefix_kl"].reverse[:, :4]), **EXACT)
    assert "kl_exact" not in policy_loss("rpg", **given | {"prefix_kl": None})[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(level="sequence"), "level='to_go'"),
        (dict(form="verl"), "estimator 'exact'"),
        (dict(prefix_kl=None), "give prefix_kl"),
        (dict(clip="dual_through"), "estimator='differentiable'"),
        (dict(prefix_kl=PrefixKL(*np.zeros((2, 2, 5)))), "prefix_kl.reverse must be"),
    ],
)
def test_what_has_no_exact_gradient_is_refused_with_the_way_out(change, message):
    options = dict(
        arrays(np.random.default_rng(4)), estimator="exact", clip="none", aggregate="sequence_mean_token_sum"
    )
    with pytest.raises(ValueError, match=message):
        policy_loss("rpg", **options | change)


def test_a_divergence_of_tokens_alone_is_told_both_ways_out(monkeypatch):
    monkeypatch.setitem(DIVERGENCES, "own", dataclasses.replace(DIVERGENCES["rkl"], coefficients=None))
    options = dict(arrays(np.random.default_rng(4)), clip="none", divergence="own")
    policy_loss("rpg", **options)
    with pytest.raises(ValueError, match="declare its Coefficients.*level='token' without estimator='exact'"):
        policy_loss("rpg", **options, estimator="exact")


def test_every_divergence_is_covered():
    """A new divergence needs its row in `ORACLES`; with `Coefficients` the tests above hold its exact gradient too."""
    assert set(ORACLES) == set(DIVERGENCES)
    assert {"fkl", "ufkl", "rkl", "urkl", "js", "ujs"} <= set(OF_COMPLETIONS), "these keep their Coefficients"
