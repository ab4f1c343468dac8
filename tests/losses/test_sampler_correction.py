"""Corrections of the gap between sampler and trainer: weights by hand, and exact means over every completion of π_s."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import LOSSES, SAMPLER_CORRECTIONS, aggregate, policy_loss, token_loss
from rpg_jax.losses.tokens import checked

SIZE, LENGTH = 3, 3


def gradient(name, batch, **hyperparameters):
    """∂(loss sum)/∂log π_θ f64[B, T], and the events bool[B, T]; metrics cost most of the time and are left out."""
    arrays = dict.fromkeys(("ref_logprobs", "sampler_logprobs", "completion_ids")) | batch
    kind = hyperparameters.pop("aggregate", LOSSES[name].aggregate)

    def loss(logprobs):
        tokens = checked(**arrays | {"logprobs": logprobs})
        result = token_loss(name, tokens, **hyperparameters)
        return aggregate(result.values, tokens, kind)[0], result.events

    got, events = jax.grad(loss, has_aux=True)(batch["logprobs"])
    return np.asarray(got, np.float64), events


def by_hand(kind, x, low, high):
    """Weights f64[B, T] and the tokens of the event, by loops over completions."""
    weights, events = np.zeros(x["mask"].shape), np.zeros(x["mask"].shape, bool)
    for i, row in enumerate(x["mask"]):
        t = np.flatnonzero(row)
        u = np.exp(x["behaviour_logprobs"] - x["sampler_logprobs"])[i, t]
        if kind == "truncate":
            weights[i, t], events[i, t] = np.minimum(u, high), u > high
            continue
        drift = np.exp(np.mean((x["logprobs"] - x["sampler_logprobs"])[i, t]))
        of_token = {"mask": u, "sequence": np.full(len(t), np.prod(u))}.get(kind, np.ones(len(t)))
        ratio = {"geometric": np.full(len(t), np.prod(u) ** (1 / len(t)))}.get(kind, of_token)
        if kind == "off_policy":
            kept = (x["advantages"][i, t] >= 0) | (drift >= low)
        else:
            kept = (low <= ratio) & (ratio <= high)
        weights[i, t], events[i, t] = np.where(kept, of_token, 0), ~kept
    return weights, events


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("truncate", None, 1.05),
        ("mask", 0.9, 1.1),
        ("sequence", 0.8, 1.2),
        ("geometric", 0.93, 1.07),
        ("off_policy", 1.0, None),
    ],
)
def test_a_token_is_weighted_or_dropped_as_its_ratio_or_that_of_its_completion_says(batch, kind, low, high):
    bounds = dict(sampler_low=low, sampler_high=high)
    (plain, _), (got, found) = (
        gradient("rpg", batch, kl_coef=0.1, **options) for options in ({}, dict(sampler_correction=kind, **bounds))
    )
    weights, events = by_hand(kind, {name: np.asarray(x, np.float64) for name, x in batch.items()}, low, high)
    np.testing.assert_allclose(got, plain * weights, rtol=5e-6, atol=1e-8)  # f32
    event = "sampler_ratio_truncated" if kind == "truncate" else "sampler_rejected"
    kept = np.asarray(batch["mask"])
    np.testing.assert_array_equal(np.asarray(found[event])[kept], events[kept])
    assert 0 < events.sum() < kept.sum()


def test_packed_completions_are_rejected_one_by_one(batch):
    packed = {name: x.reshape(2, 12) for name, x in batch.items()}
    packed["completion_ids"] = jnp.where(batch["mask"], jnp.array([1, 2, 1, 2])[:, None], 0).reshape(2, 12)
    options = dict(sampler_correction="geometric", sampler_low=0.97, sampler_high=1.1)
    together, apart = gradient("ppo", packed, **options)[0], gradient("ppo", batch, **options)[0]
    np.testing.assert_allclose(together.reshape(4, 6), apart, rtol=2e-6, atol=1e-8)
    dropped = np.all(apart == 0, axis=1)
    assert dropped.any() and not dropped.all()


def test_anchor_puts_the_sampler_in_place_of_the_behaviour_policy_clips_included(batch):
    for name in ("rpg", "dppo"):
        got, _ = gradient(name, batch, sampler_correction="anchor")
        moved = batch | {"behaviour_logprobs": batch["sampler_logprobs"]}
        np.testing.assert_array_equal(got, gradient(name, moved)[0])
        assert np.any(got != gradient(name, batch)[0])
    metrics = policy_loss("ppo", **batch, sampler_correction="anchor")[2]
    assert metrics["sampler_ratio"][0] != metrics["sampler_ratio"][1]  # the metrics still tell the two apart


def completions():
    """Every completion, and log π_θ, log π_old, log π_s of its tokens; logits of θ; rewards."""
    rng = np.random.default_rng(11)
    every = np.array(list(itertools.product(range(SIZE), repeat=LENGTH)))
    prefix = np.stack([every[:, :t] @ SIZE ** np.arange(t) + 40 * t for t in range(LENGTH)], 1)
    theta, old, sampler = jnp.asarray(rng.normal(0, 0.7, (3, 40 * LENGTH, SIZE)))
    return every, prefix, theta, old, sampler, jnp.asarray(rng.normal(0, 1, len(every)))


def mean_gradient(drawn_by, name, **options):
    """E[∇loss] in the logits, summed over every completion x with its probability under `drawn_by`."""
    every, prefix, theta, old, sampler, rewards = completions()

    def logprobs(logits):
        return jax.nn.log_softmax(logits)[prefix, every]

    log_old, log_sampler = logprobs(old), logprobs(sampler)
    probability = jnp.exp({"old": log_old, "sampler": log_sampler}[drawn_by].sum(1))

    def expected(theta):
        def one(log_pi, log_old, log_sampler, a):
            row = dict(logprobs=log_pi, behaviour_logprobs=log_old, sampler_logprobs=log_sampler)
            row = {key: x[None] for key, x in row.items()} | {"mask": jnp.ones((1, LENGTH)), "advantages": a[None]}
            return policy_loss(name, **row, aggregate="sequence_mean_token_sum", **options)[0]

        return probability @ jax.vmap(one)(logprobs(theta), log_old, log_sampler, rewards)

    return np.asarray(jax.jit(jax.grad(expected))(theta))


@pytest.mark.usefixtures("x64")
def test_the_ratio_of_the_completion_undoes_the_sampler_exactly_and_the_tokens_ratio_does_not():
    wanted = mean_gradient("old", "gspo", clip_low=0.2, clip_high=0.2)
    everything = dict(clip_low=0.2, clip_high=0.2, sampler_low=0.0, sampler_high=float("inf"))
    exact = mean_gradient("sampler", "gspo", sampler_correction="sequence", **everything)
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-12)
    assert np.abs(mean_gradient("sampler", "gspo", sampler_correction="mask", **everything) - wanted).max() > 1e-2


@pytest.mark.usefixtures("x64")
def test_the_tokens_ratio_is_exact_for_the_token_given_its_prefix():
    """Completions of one token: truncated at ∞ and masked by [0, ∞] both give the mean of π_old, for any loss."""
    rng = np.random.default_rng(4)
    log_pi, log_old, log_sampler = jax.nn.log_softmax(jnp.asarray(rng.normal(0, 1, (3, 6))))
    batch = dict(logprobs=log_pi, behaviour_logprobs=log_old, sampler_logprobs=log_sampler, mask=jnp.ones(6))
    batch = {name: x[:, None] for name, x in batch.items()} | {"advantages": jnp.asarray(rng.normal(0, 1, 6))}
    plain, _ = gradient("rpg", batch, kl_coef=0.1)
    for options in (dict(sampler_correction="truncate"), dict(sampler_correction="mask", sampler_low=0.0)):
        got, _ = gradient("rpg", batch, kl_coef=0.1, sampler_high=float("inf"), **options)
        drawn, old = np.exp(np.asarray([log_sampler, log_old]))[..., None]
        np.testing.assert_allclose(drawn * got, old * plain, rtol=1e-12)


def test_bounds_that_are_not_given_are_those_of_the_kind(batch):
    for kind, bounds in {
        "truncate": dict(sampler_high=2.0),
        "mask": dict(sampler_low=0.5, sampler_high=5.0),
        "sequence": dict(sampler_low=0.5, sampler_high=2.0),
        "geometric": dict(sampler_low=0.999, sampler_high=1.001),
        "off_policy": dict(sampler_low=float(np.exp(-0.5))),
        "anchor": {},
    }.items():
        without, given = (gradient("ppo", batch, sampler_correction=kind, **b)[0] for b in ({}, bounds))
        np.testing.assert_array_equal(without, given)
    assert set(SAMPLER_CORRECTIONS) == {"truncate", "mask", "sequence", "geometric", "off_policy", "anchor"}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("correction", [None, *SAMPLER_CORRECTIONS])
def test_no_correction_makes_up_for_a_sampler_that_cuts_the_distribution(correction):
    """Why training refuses top-p: exact means over tokens of a nucleus that holds 0.95 of the probability.

    The mean gap |log π_s − log π| is less than 0.06 nats and passes for rounding in bfloat16. The tokens that the
    nucleus leaves out are never sampled, and the reward prefers them.
    """
    logits = jnp.asarray([3.0, 2.4, 1.5, 0.2, -0.1, -0.6])
    policy = jax.nn.log_softmax(logits)
    kept = np.cumsum(np.exp(policy)) - np.exp(policy) < 0.95
    rewards = jnp.asarray(np.where(kept, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], 3.0))
    sampler = jnp.where(kept, policy - jax.nn.logsumexp(policy, where=kept), -40.0)
    drawn = jnp.where(kept, jnp.exp(sampler), 0)
    assert 0 < float(drawn @ jnp.abs(sampler - policy)) < 0.06

    def found(sampled, reported):
        """The mean gradient in the logits, over single tokens with the probabilities `sampled`."""
        advantages = rewards - sampled @ rewards

        def loss(x):
            own = jax.nn.log_softmax(x)[:, None]
            columns = dict(behaviour_logprobs=policy[:, None], sampler_logprobs=reported[:, None])
            columns |= dict(advantages=advantages, mask=jnp.ones_like(own), ref_logprobs=None, completion_ids=None)
            tokens = checked(logprobs=own, **columns)
            options = dict(clip="none", kl_coef=0.0, sampler_correction=correction)
            return sampled @ token_loss("rpg", tokens, **options).values[:, 0]

        return jax.grad(loss)(logits)

    exact = -jax.grad(lambda x: jax.nn.softmax(x) @ rewards)(logits)
    np.testing.assert_allclose(found(jnp.exp(policy), policy), exact, rtol=0, atol=1e-12)
    assert np.linalg.norm(found(drawn, sampler) - exact) > 0.5 * np.linalg.norm(exact)
