"""Advantages of a packed batch: RPG for completions gets the baseline that whole groups in one batch would have."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data, losses
from rpg_jax.losses.declaration import Loss, Range
from rpg_jax.losses.regularized_pg import rpg_completions
from rpg_jax.training.objective import advantages_fn, policy_loss_fn
from rpg_jax.types import Completion, Turns

LENGTHS = ((3, 1, 4), (2, 5, 2))
OPTIONS = dict(divergence="rkl", clip="none", kl_coef=0.3, level="sequence", aggregate="sequence_mean_token_sum")


def turns_of(length):
    """Of a conversation whose second token is an observation, if it has three or more; else None."""
    return Turns(np.arange(length) == 1, np.zeros(2, np.float32)) if length > 2 else None


def packed_batch(rows, rng):
    """Two groups of three completions in micro-batches of so many rows, with log π_old and log π_ref."""
    groups = []
    for lengths in LENGTHS:
        completions = [
            Completion(np.full(n, 5, np.int32), np.zeros(n, np.float32), "stop", 0, turns=turns_of(n)) for n in lengths
        ]
        rewards = rng.normal(size=3).astype(np.float32)
        groups.append(data.Group(data.Problem(0, "?", "!", ""), np.array([3]), completions, [], rewards, rewards))
    batch = data.pack(groups, data.RowShape(rows, 8, 6))
    columns = [[[rng.normal(size=n).astype(np.float32) for n in own] for own in LENGTHS] for _ in range(3)]
    old, ref, new = (batch.scatter(x) for x in columns)
    return batch.add(behaviour_logprobs=old, ref_logprobs=ref), new


@pytest.mark.parametrize("rows", (2, pytest.param(6, marks=pytest.mark.slow)))
def test_the_advantages_of_split_groups_hold_the_baseline_of_whole_groups(rows):
    """A gradient by `group_ids` over all completions at once is that of the micro-batches with these advantages."""
    batch, new = packed_batch(rows, np.random.default_rng(5))
    given = advantages_fn("leave_one_out", "rpg", **OPTIONS)(batch)["advantages"]
    batch = batch.add(advantages=batch.scatter(given))

    @jax.jit
    def gradient(logprobs, **inputs):
        return jax.grad(lambda x: losses.policy_loss("rpg", logprobs=x, **inputs, **OPTIONS)[0])(logprobs)

    parts = [gradient(x, **b.loss_inputs) for x, b in zip(new, batch.batches, strict=True)]
    rewards = losses.advantages("leave_one_out", np.stack([g.rewards for g in batch.groups]))
    plain = batch.add(advantages=batch.scatter(np.asarray(rewards)))
    known = [name for name, column in plain.batches[0].loss_inputs.items() if column is not None]
    whole = {name: np.concatenate([b.loss_inputs[name] for b in plain.batches]) for name in known}
    places = {(m * rows + row): p for p, own in enumerate(batch.places) for m, row, _, _ in own}
    group_ids = np.array([places[row] for row in range(6)])
    at_once = gradient(np.concatenate(new), group_ids=group_ids, **whole)
    # Sums of f32 in another order.
    np.testing.assert_allclose(np.concatenate(parts), at_once, rtol=1e-5, atol=1e-6)
    assert np.abs(np.array(given) - rewards).max() > 0.1


def test_other_losses_and_levels_have_the_advantages_of_the_rewards_alone():
    batch, _ = packed_batch(2, np.random.default_rng(6))
    plain = losses.advantages("leave_one_out", np.stack([g.rewards for g in batch.groups]))
    for loss, options in (("ppo", {}), ("rpg", {}), ("rpg", OPTIONS | {"level": "to_go"})):
        np.testing.assert_array_equal(advantages_fn("leave_one_out", loss, **options)(batch)["advantages"], plain)


def test_the_baseline_has_the_defaults_of_the_loss():
    log_ratios = jnp.asarray([[0.3, -0.2, 1.0]])
    defaults = {name: rpg_completions.__kwdefaults__[name] for name in ("divergence", "kl_coef")}
    expected = losses.kl_baseline(log_ratios, level="sequence", **defaults)
    np.testing.assert_array_equal(losses.kl_baseline(log_ratios, level="sequence"), expected)
    np.testing.assert_array_equal(losses.kl_baseline(log_ratios), 0)


def a_batch(rng, level):
    """The packed batch with the columns of its loss, and log π_θ of its micro-batches."""
    batch, new = packed_batch(2, rng)
    columns = advantages_fn("leave_one_out", "rpg", **OPTIONS | {"level": level})(batch)
    return batch.add(**{name: batch.scatter(values) for name, values in columns.items()}), new


@pytest.mark.parametrize("level", ("token", "sequence", "to_go"))
def test_the_kl_share_is_that_of_the_gradient_with_and_without_the_kl_whatever_the_split(level):
    """The gradient without the KL has the advantages of the rewards alone: no baseline of the KL is in it."""
    batch, new = a_batch(np.random.default_rng(7), level)
    options = OPTIONS | {"level": level}
    loss, squares = policy_loss_fn("rpg", **options), []
    rewards = losses.advantages("leave_one_out", np.stack([g.rewards for g in batch.groups]))
    plain = batch.add(advantages=batch.scatter(np.asarray(rewards)))
    for x, with_kl, without in zip(new, batch.batches, plain.batches, strict=True):
        whole, rest = (
            jax.grad(lambda x, b=b, beta=beta: policy_loss_fn("rpg", **options | {"kl_coef": beta})(x, b)[0])(x)
            for b, beta in ((with_kl, OPTIONS["kl_coef"]), (without, 0.0))
        )
        kept = with_kl.mask > 0
        squares.append([np.sum(np.square(y[kept])) for y in (whole - rest, whole)])
    part, whole = np.sum(squares, axis=0)
    merged = losses.merge([loss(x, b)[2] for x, b in zip(new, batch.batches, strict=True)])
    share = losses.divided(merged)["kl_gradient_share"]
    assert share == pytest.approx(np.sqrt(part / whole), rel=1e-5) and 0.1 < share < 10  # f32


def test_a_loss_without_a_kl_term_has_no_kl_share():
    batch, new = a_batch(np.random.default_rng(8), "token")
    for name, options in (("ppo", {}), ("rpg", {"kl_coef": 0.0})):
        assert "kl_gradient_share" not in policy_loss_fn(name, **options)(new[0], batch.batches[0])[2]
    for name in ("rpg", "grpo"):
        assert "kl_gradient_share" in policy_loss_fn(name)(new[0], batch.batches[0])[2]


def test_a_loss_whose_kl_coefficient_cannot_be_zero_has_no_kl_share():
    def squared(tokens, *, kl_coef: Annotated[float, Range("(0, 10]")] = 0.1) -> losses.TokenLoss:
        return losses.TokenLoss(kl_coef * (tokens.log_r - tokens.advantages / kl_coef) ** 2)

    batch, new = a_batch(np.random.default_rng(8), "token")
    assert "kl_gradient_share" not in policy_loss_fn(Loss(squared), kl_coef=0.1)(new[0], batch.batches[0])[2]


def test_the_kl_share_of_the_weights_is_that_of_the_tokens_gradients_carried_to_the_weights():
    """Two backward passes through a small policy. Its Jacobian J takes g to J'g, so the shares differ by at most the
    Jacobian's condition number; where every token has a weight of its own they are equal."""
    rng = np.random.default_rng(9)
    batch, _ = a_batch(rng, "token")
    one, count = batch.batches[0], int(np.sum(batch.batches[0].mask))
    jacobian = rng.normal(size=(count, 3 * count)).astype(np.float32)
    place = np.cumsum(np.asarray(one.mask).ravel() > 0).reshape(one.mask.shape) - 1

    def gradient(weights, beta, jacobian):
        loss = policy_loss_fn("rpg", **OPTIONS | {"level": "token", "kl_coef": beta})
        return jax.grad(lambda w: loss((jacobian @ w)[place], one)[0])(weights)

    def shares(weights, jacobian):
        with_kl, without = (gradient(weights, beta, jacobian) for beta in (OPTIONS["kl_coef"], 0.0))
        metrics = policy_loss_fn("rpg", **OPTIONS | {"level": "token"})((jacobian @ weights)[place], one)[2]
        of_tokens = losses.divided(metrics)["kl_gradient_share"]
        return of_tokens, float(jnp.linalg.norm(with_kl - without) / jnp.linalg.norm(with_kl))

    of_tokens, of_weights = shares(jnp.zeros(3 * count) - 0.01, jacobian)
    condition = np.linalg.cond(jacobian)
    assert of_tokens / condition < of_weights < of_tokens * condition and of_weights != pytest.approx(of_tokens, 1e-3)
    of_tokens, of_weights = shares(jnp.asarray(rng.normal(size=count), jnp.float32), np.eye(count, dtype=np.float32))
    assert of_weights == pytest.approx(of_tokens, rel=1e-5)  # f32
