"""The table of methods: its rows, and that each is a loss that can be computed."""

from __future__ import annotations

import itertools

import pytest

from rpg_jax.losses import ADVANTAGES, AGGREGATES, LEARNED_ADVANTAGES, METHODS, advantages, get_method, policy_loss

ROWS = (
    ["GRPO", "DAPO", "REINFORCE++", "REINFORCE++-Baseline", "PPO", "RLOO", "Dr.GRPO", "GSPO", "CISPO"]
    + [f"RPG-{d}" for d in ("FKL", "UFKL", "RKL", "URKL")]
    + [f"RPG-REINFORCE-{d}" for d in ("FKL", "UFKL", "RKL", "URKL")]
)


def test_there_are_the_rows_of_the_papers_tables_and_the_later_baselines():
    assert set(ROWS) <= set(METHODS)


def test_no_two_rows_are_the_same_method():
    for (first, a), (second, b) in itertools.combinations(METHODS.items(), 2):
        settings = [(m.loss, m.advantage, m.aggregate, dict(m.hyperparameters)) for m in (a, b)]
        assert settings[0] != settings[1], (first, second)


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_a_loss_that_can_be_computed(name, batch):
    method = METHODS[name]
    assert method.advantage in (*ADVANTAGES, *LEARNED_ADVANTAGES) and method.aggregate in AGGREGATES
    rewards = batch["advantages"][:, 0].reshape(2, 2)
    lengths = batch["mask"].sum(axis=1).reshape(2, 2)
    batch["advantages"] = advantages(method.advantage, rewards, lengths=lengths).reshape(4)
    total, weight, _ = policy_loss(
        method.loss, **batch, aggregate=method.aggregate, constant_length=6, **method.hyperparameters
    )
    assert abs(total / weight) > 0


def test_rpg_rows_are_the_published_recipe():
    row = get_method("RPG-REINFORCE-URKL")
    assert (row.loss, row.advantage, row.aggregate) == ("rpg", "group_mean", "token_mean")
    assert row.dynamic_sampling and row.overlong_shaping
    assert row.hyperparameters == {
        "divergence": "urkl",
        "estimator": "reinforce",
        "clip": "dual",
        "kl_coef": 1e-4,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "clip_dual": 10.0,
    }
    assert get_method("RPG-FKL").hyperparameters["estimator"] == "differentiable"


def test_grpo_has_its_own_batches_clip_and_fixed_reference():
    row = get_method("GRPO")
    assert row.reference == "fixed" and not row.dynamic_sampling and not row.overlong_shaping
    assert row.hyperparameters["clip_high"] == 0.2 and row.hyperparameters["kl_coef"] == 1e-3


def test_an_unknown_method_names_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match="Did you mean 'RPG-REINFORCE-URKL'.*GRPO, DAPO"):
        get_method("RPG-REINFORCE-URLK")
