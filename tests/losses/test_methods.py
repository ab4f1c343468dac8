"""Every entry of the published methods against values written down by hand; every row is a loss that can be computed.

A row of `METHODS` that is not in `ROWS` is a user's own: no source states its values.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from rpg_jax.losses import (
    ADVANTAGES,
    AGGREGATES,
    LEARNED_ADVANTAGES,
    METHODS,
    PrefixKL,
    advantages,
    get_method,
    policy_loss,
)

RPG_RECIPE = dict(  # arXiv:2505.17508 section 5: DAPO's batches; section 4: a reference refreshed every K updates
    loss="rpg",
    advantage="group_mean",
    aggregate="token_mean",
    reference="every",
    dynamic_sampling=True,
    overlong_shaping=True,
)
RPG_NUMBERS = dict(kl_coef=1e-4, clip_low=0.2, clip_high=0.28, clip_dual=10.0)
PLAIN_BATCHES = dict(dynamic_sampling=False, overlong_shaping=False, learning_rate=1e-6)
DAPO_BATCHES = dict(dynamic_sampling=True, overlong_shaping=True, learning_rate=1e-6)
SEQUENCES = dict(
    loss="rpg",
    advantage="leave_one_out",
    aggregate="sequence_mean_token_sum",
    reference="fixed",
    **PLAIN_BATCHES,
)
SEQUENCE_NUMBERS = dict(
    estimator="reinforce", level="sequence", kl_coef=0.1, clip_low=0.2, clip_high=0.28, clip_dual=10.0
)

# The comment above a row names the source of its values. c = 10 and the learning rates are those of the public recipes
# of arXiv:2505.17508; tests/test_recipes.py has all of their fields.
ROWS = {
    # The four public recipes: ε = (0.2, 0.2) as in section 5 (appendix H says 0.1), β = 1e-3, token mean, k3 clamped at
    # 10, a fixed reference, no dynamic sampling, no overlong shaping.
    "GRPO": dict(
        loss="grpo",
        advantage="group_standardised",
        aggregate="token_mean",
        reference="fixed",
        **PLAIN_BATCHES,
        hyperparameters=dict(kl_coef=1e-3, kl_clamp=10.0, clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2402.03300; public recipes of arXiv:2505.17508",
    ),
    # arXiv:2402.03300 eq. 3 and 4: the mean over sequences, and k3 without a clamp. ε and β as in the row above.
    "GRPO-DeepSeekMath": dict(
        loss="grpo",
        advantage="group_standardised",
        aggregate="sequence_mean_token_mean",
        reference="fixed",
        **PLAIN_BATCHES,
        hyperparameters=dict(kl_coef=1e-3, clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2402.03300 eq. 3 and 4; ε and β of GRPO",
    ),
    # arXiv:2503.14476: no KL term (section 2.3), clip-higher (3.1), dynamic sampling (3.2), token mean (3.3), overlong
    # shaping (3.4), the values of ε (4.1).
    "DAPO": dict(
        loss="ppo",
        advantage="group_standardised",
        aggregate="token_mean",
        reference="behaviour",
        **DAPO_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.28, clip_dual=10.0),
        source="arXiv:2503.14476",
    ),
    # arXiv:2501.03262: advantages whitened over the batch. The public recipes: k1 as a loss, ε, β, DAPO's batches, and
    # an iterative reference.
    "REINFORCE++": dict(
        loss="reinforce_pp",
        advantage="whitened_returns",
        aggregate="token_mean",
        reference="every",
        **DAPO_BATCHES,
        hyperparameters=dict(kl_coef=1e-4, clip_low=0.2, clip_high=0.28, clip_dual=10.0),
        source="public recipes of arXiv:2505.17508; arXiv:2501.03262 has k₁ in the reward, not in the loss",
    ),
    # The same with the mean of the group as baseline.
    "REINFORCE++-Baseline": dict(
        loss="reinforce_pp",
        advantage="whitened_group_mean",
        aggregate="token_mean",
        reference="every",
        **DAPO_BATCHES,
        hyperparameters=dict(kl_coef=1e-4, clip_low=0.2, clip_high=0.28, clip_dual=10.0),
        source="public recipes of arXiv:2505.17508; arXiv:2501.03262 has k₁ in the reward, not in the loss",
    ),
    # arXiv:2505.17508 Tables 1 and 4 (differentiable) and Table 2 (reinforce). The public differentiable loss clips the
    # reward's term alone; Algorithm 2 clips by the regularized advantage.
    **{
        f"{prefix}-{name}": RPG_RECIPE
        | dict(
            hyperparameters=dict(divergence=divergence, estimator=estimator, clip=clip, **RPG_NUMBERS),
            learning_rate=rate,
            source=f"arXiv:2505.17508 {source}",
        )
        for prefix, estimator, clip, rate, source in (
            ("RPG", "differentiable", "reward", 1e-6, "Tables 1 and 4; clip of the public recipes"),
            ("RPG-REINFORCE", "reinforce", "dual", 5e-7, "sections 4 and 5, Algorithm 2"),
        )
        for name, divergence in (("FKL", "fkl"), ("UFKL", "ufkl"), ("RKL", "rkl"), ("URKL", "urkl"))
    },
    # arXiv:1707.06347 eq. 7, and ε = 0.2 of its Table 1; the dual clip of arXiv:1912.09729 eq. 5.
    "PPO": dict(
        loss="ppo",
        advantage="gae",
        aggregate="token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:1707.06347, with the dual clip of arXiv:1912.09729; a learned baseline",
    ),
    # arXiv:2402.14740: the mean of the other completions as baseline. PPO's ε.
    "RLOO": dict(
        loss="ppo",
        advantage="leave_one_out",
        aggregate="token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2402.14740, with PPO's clip since batches are reused",
    ),
    # arXiv:2503.20783 section 3: neither the length nor the standard deviation divides. PPO's ε.
    "Dr.GRPO": dict(
        loss="ppo",
        advantage="group_mean",
        aggregate="constant",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2503.20783",
    ),
    # arXiv:2507.18071 eq. 5 to 7: the sequence ratio. Its section 5.1: ε.
    "GSPO": dict(
        loss="gspo",
        advantage="group_standardised",
        aggregate="sequence_mean_token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=3e-4, clip_high=4e-4),
        source="arXiv:2507.18071",
    ),
    # arXiv:2506.13585 eq. 4 and 5: the upper bound alone. ε₂ is Trinity-RFT's default.
    "CISPO": dict(
        loss="cispo",
        advantage="group_standardised",
        aggregate="token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_high=0.28),
        source="arXiv:2506.13585, which gives no ε₂; that of Trinity-RFT",
    ),
    # Ours; β and the leave-one-out returns of the laboratory of completions.
    "RPG-SEQ-FKL": dict(
        **SEQUENCES,
        hyperparameters=dict(divergence="fkl", clip="dual", **SEQUENCE_NUMBERS),
        source="ours: arXiv:2505.17508 with x a completion",
    ),
    "RPG-SEQ-RKL": dict(
        **SEQUENCES,
        hyperparameters=dict(divergence="rkl", clip="dual", **SEQUENCE_NUMBERS),
        source="ours: arXiv:2505.17508 with x a completion",
    ),
    "KL-in-reward": dict(
        **SEQUENCES,
        hyperparameters=dict(divergence="urkl", clip="dual", kl_ratio="behaviour", **SEQUENCE_NUMBERS),
        source="KL in the reward with a leave-one-out baseline, arXiv:2402.14740",
    ),
    "Log-variance": dict(
        **SEQUENCES,
        hyperparameters=dict(divergence="urkl", clip="none", weight="none", **SEQUENCE_NUMBERS),
        source="VarGrad, arXiv:2010.10436, on the regularized return; its baseline has π_old's log-ratios",
    ),
    # arXiv:2602.04879 eq. 11 to 14 and section 5.2: the ratio to the rollout engine's policy. verl-project/verl pull
    # request 5397: δ, no standard deviation, a constant length.
    **{
        f"DPPO-{divergence.upper()}": dict(
            loss="dppo",
            advantage="group_mean",
            aggregate="constant",
            reference="behaviour",
            **PLAIN_BATCHES,
            hyperparameters=dict(mask_divergence=divergence, mask_threshold=delta, sampler_correction="anchor"),
            source="arXiv:2602.04879; δ of verl, not its cap of w",
        )
        for divergence, delta in (("tv", 0.15), ("kl", 0.05))
    },
    # horizon-llm/CTPO at acc4021, ctpo.sh: GRPO's advantage, no KL, `la_clip_low`, `la_clip_high`, `la_clip_c`.
    "CTPO": dict(
        loss="ctpo",
        advantage="group_standardised",
        aggregate="token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(width_low=0.025, width_high=0.05, width_dual=0.05),
        source="arXiv:2605.07331 and its code",
    ),
    # arXiv:2606.09821, in DPPO's recipe.
    "DRPO": dict(
        loss="drpo",
        advantage="group_mean",
        aggregate="constant",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(trust_region=0.15, sampler_correction="anchor"),
        source="arXiv:2606.09821; its δ was not read: DPPO's",
    ),
    # arXiv:2511.20347 eq. 5 and 6: the mean over completions, τ by the sign of the advantage; its values as in TRL at
    # f2cd577.
    "SAPO": dict(
        loss="sapo",
        advantage="group_standardised",
        aggregate="sequence_mean_token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(tau_positive=1.0, tau_negative=1.05),
        source="arXiv:2511.20347",
    ),
    # arXiv:2507.20673: ratios are clipped to [e^-0.4, e^0.4].
    "GMPO": dict(
        loss="gmpo",
        advantage="group_standardised",
        aggregate="sequence_mean_token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1),
        source="arXiv:2507.20673",
    ),
    # arXiv:2602.02710 Algorithm 1; its public code (tajwarfahim/maxrl at c0698eb): PPO's clip, ε = 0.2.
    "MaxRL": dict(
        loss="ppo",
        advantage="maxrl",
        aggregate="token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2602.02710, with PPO's clip since batches are reused",
    ),
    # arXiv:2601.05242: GRPO's clipped objective, the mean over completions. PPO's ε.
    "GDPO": dict(
        loss="ppo",
        advantage="gdpo",
        aggregate="sequence_mean_token_mean",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0),
        source="arXiv:2601.05242, for rewards of several parts",
    ),
    # arXiv:2501.12599 section 2.3.2: the baseline is the group's mean reward. β is ours.
    "OPMD": dict(
        loss="opmd",
        advantage="group_mean",
        aggregate="sequence_mean_token_sum",
        reference="behaviour",
        **PLAIN_BATCHES,
        hyperparameters=dict(kl_coef=0.1),
        source="arXiv:2501.12599 section 2.3.2; it gives no β",
    ),
}


# Ours; the KL is all of the loss where the rewards have the weight 0.
DISTILLED = {
    "OPD": dict(divergence="urkl", estimator="reinforce"),
    "OPD-EXACT": dict(divergence="rkl", estimator="exact"),
    "OPD-FKL": dict(divergence="fkl", estimator="exact"),
    "OPD-TO-GO": dict(divergence="rkl", estimator="reinforce", level="to_go"),
    "OPD-SEQ": dict(divergence="rkl", estimator="reinforce", level="sequence"),
}


def test_there_are_the_rows_of_the_papers_tables_and_the_later_baselines():
    assert len(ROWS) == 31 and set(ROWS) | set(DISTILLED) <= set(METHODS)


@pytest.mark.parametrize("name", DISTILLED)
def test_a_row_of_distillation_has_the_kl_to_a_teacher_alone(name):
    row, completions = METHODS[name], "level" in DISTILLED[name]
    assert dict(row.hyperparameters) == dict(clip="none", kl_coef=1.0) | DISTILLED[name]
    assert (row.loss, row.reference, row.dynamic_sampling, row.overlong_shaping) == ("rpg", "teacher", False, False)
    assert (row.advantage, row.aggregate) == (
        ("leave_one_out", "sequence_mean_token_sum") if completions else ("group_mean", "token_mean")
    )


@pytest.mark.parametrize("name", ROWS)
def test_every_entry_of_a_row_is_the_published_one(name):
    row = METHODS[name]
    found = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    assert found | {"hyperparameters": dict(row.hyperparameters)} == ROWS[name]
    assert get_method(name) is row


def test_no_two_rows_are_the_same_method():
    for (first, a), (second, b) in itertools.combinations(METHODS.items(), 2):
        settings = [(m.loss, m.advantage, m.aggregate, dict(m.hyperparameters)) for m in (a, b)]
        assert settings[0] != settings[1], (first, second)


@pytest.mark.usefixtures("x64")
def test_the_two_estimators_of_a_divergence_are_two_methods(batch):
    """With one clip their gradients are equal (test_regularized_pg); so their rows have two."""

    @jax.jit
    def gradients(logprobs):
        def loss(name, logprobs):
            return policy_loss("rpg", **batch | {"logprobs": logprobs}, **METHODS[name].hyperparameters)[0]

        return [jax.grad(loss, argnums=1)(name, logprobs) for name in ("RPG-URKL", "RPG-REINFORCE-URKL")]

    first, second = gradients(batch["logprobs"])
    different = np.abs(first - second) > 1e-5  # β is 1e-4
    assert different.any() and not different.all(), "they differ where a token is clipped"


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_a_loss_that_can_be_computed(name, batch):
    method = METHODS[name]
    assert method.advantage in (*ADVANTAGES, *LEARNED_ADVANTAGES) and method.aggregate in AGGREGATES
    if method.advantage in ADVANTAGES:
        rewards = batch["advantages"][:, 0].reshape(2, 2)
        lengths = batch["mask"].sum(axis=1).reshape(2, 2)
        batch["advantages"] = advantages(method.advantage, rewards, lengths=lengths).reshape(4)
    batch["prefix_kl"] = PrefixKL(*np.ones((2, *batch["mask"].shape)))
    total, weight, _ = policy_loss(
        method.loss, **batch, aggregate=method.aggregate, constant_length=6, **method.hyperparameters
    )
    assert abs(total / weight) > 0


def test_an_unknown_method_names_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match="Did you mean 'RPG-REINFORCE-URKL'.*GRPO, GRPO-DeepSeekMath, DAPO"):
        get_method("RPG-REINFORCE-URLK")
    with pytest.raises(ValueError, match="Did you mean 'RPG-URKL'"):
        get_method("rpg-urkl")  # as the folders of runs have it


def test_the_eight_rpg_rows_are_ppos_clip_with_group_means_to_two_in_ten_thousand(x64):
    """At their β of 1e-4 with the reference at π_old, and log-ratios as in training: 0.08 in the mean.

    A token's KL gradient is about β = 1e-4 for fkl and rkl, the same for every token, which is noise: E[∇log π] = 0. It
    is about β |log w| for ufkl and urkl. The advantages are of order one. So 2e-4 and 2e-5 of the gradient.
    """
    rng, size = np.random.default_rng(0), 16
    rewards = np.where(rng.random((64, size)) < rng.random((64, 1)), 1.0, -1.0)
    rewards = rewards[np.ptp(rewards, axis=1) > 0]  # dynamic sampling
    old = -rng.exponential(0.5, (rewards.size, 30))
    log_w = rng.normal(0, 0.1, old.shape)  # the mean of its absolute values is 0.08
    arrays = dict(behaviour_logprobs=old, advantages=advantages("group_mean", rewards).ravel())

    def gradient(method, **options):
        def loss(logprobs):
            total, weight, _ = policy_loss(
                method.loss, logprobs=logprobs, mask=np.ones_like(old), aggregate=method.aggregate, **arrays, **options
            )
            return total / weight

        return np.asarray(jax.grad(loss)(old + log_w))

    ppo = gradient(METHODS["DAPO"], **METHODS["DAPO"].hyperparameters)
    rows = {f"{kind}-{d}" for kind in ("RPG", "RPG-REINFORCE") for d in ("FKL", "UFKL", "RKL", "URKL")}
    assert all(METHODS[row].advantage == "group_mean" and METHODS[row].reference == "every" for row in rows)
    for row in rows:
        difference = gradient(METHODS[row], **METHODS[row].hyperparameters) - ppo
        distance = np.linalg.norm(difference) / np.linalg.norm(ppo)
        normalised = row.endswith("-FKL") or row.endswith("-RKL")
        assert distance < (2e-4 if normalised else 2e-5), row
        assert distance > 1e-6, row
