"""Advantages of a packed batch: RPG for completions gets the baseline that whole groups in one batch would have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data, losses
from rpg_jax.losses.regularized_pg import rpg
from rpg_jax.training.objective import advantages_fn
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
    old, ref, new = (batch.packing.scatter(x) for x in columns)
    return batch.add(behaviour_logprobs=old, ref_logprobs=ref), new


@pytest.mark.parametrize("rows", (2, pytest.param(6, marks=pytest.mark.slow)))
def test_the_advantages_of_split_groups_hold_the_baseline_of_whole_groups(rows):
    """A gradient by `group_ids` over all completions at once is that of the micro-batches with these advantages."""
    batch, new = packed_batch(rows, np.random.default_rng(5))
    given = advantages_fn("leave_one_out", "rpg", **OPTIONS)(batch)
    batch = batch.add(advantages=batch.packing.scatter(given))

    @jax.jit
    def gradient(logprobs, **inputs):
        return jax.grad(lambda x: losses.policy_loss("rpg", logprobs=x, **inputs, **OPTIONS)[0])(logprobs)

    parts = [gradient(x, **b.loss_inputs) for x, b in zip(new, batch.batches, strict=True)]
    rewards = losses.advantages("leave_one_out", np.stack([g.rewards for g in batch.groups]))
    plain = batch.add(advantages=batch.packing.scatter(np.asarray(rewards)))
    whole = {
        name: np.concatenate([b.loss_inputs[name] for b in plain.batches]) for name in plain.batches[0].loss_inputs
    }
    places = {(m * rows + row): p for p, own in enumerate(batch.packing.places) for m, row, _, _ in own}
    group_ids = np.array([places[row] for row in range(6)])
    at_once = gradient(np.concatenate(new), group_ids=group_ids, **whole)
    # Sums of f32 in another order.
    np.testing.assert_allclose(np.concatenate(parts), at_once, rtol=1e-5, atol=1e-6)
    assert np.abs(given - rewards).max() > 0.1


def test_other_losses_and_levels_have_the_advantages_of_the_rewards_alone():
    batch, _ = packed_batch(2, np.random.default_rng(6))
    plain = losses.advantages("leave_one_out", np.stack([g.rewards for g in batch.groups]))
    for loss, options in (("ppo", {}), ("rpg", {}), ("rpg", OPTIONS | {"level": "to_go"})):
        np.testing.assert_array_equal(advantages_fn("leave_one_out", loss, **options)(batch), plain)


def test_the_baseline_has_the_defaults_of_the_loss():
    log_ratios = jnp.asarray([[0.3, -0.2, 1.0]])
    defaults = {name: rpg.__kwdefaults__[name] for name in ("divergence", "kl_coef")}
    expected = losses.kl_baseline(log_ratios, level="sequence", **defaults)
    np.testing.assert_array_equal(losses.kl_baseline(log_ratios, level="sequence"), expected)
    np.testing.assert_array_equal(losses.kl_baseline(log_ratios), 0)
