"""Values and gradients agree with the paper's public PyTorch code.

`golden/official.json` holds numbers computed once, in float64 with torch 2.13.0, by the functions of
complex-reasoning/RPG, verl/trainer/ppo/core_algos.py, commit 620920672c6d85280f8a78b7b1598332e6450a16: random
log-probabilities whose ratios reach from 1 to far beyond every clip, the loss of each function on them, and its
gradient by autograd.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import advantages, policy_loss

GOLDEN = json.loads((Path(__file__).parent / "golden" / "official.json").read_text())
# Both sides round a few dozen float64 operations on numbers below 1e4.
TOLERANCE = 1e-11


def label(case):
    options = {k: v for k, v in case["hyperparameters"].items() if isinstance(v, str)}
    return "-".join([case["name"], *options.values()])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=label)
def test_loss_and_gradient_agree_with_the_public_code(case):
    inputs = {name: jnp.asarray(x) for name, x in GOLDEN["inputs"].items()}

    def loss(logprobs):
        total, weight, _ = policy_loss(case["name"], **inputs | {"logprobs": logprobs}, **case["hyperparameters"])
        return total / weight

    value, gradient = jax.value_and_grad(loss)(inputs["logprobs"])
    np.testing.assert_allclose(value, case["value"], rtol=TOLERANCE)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.usefixtures("x64")
def test_the_golden_inputs_reach_every_clip_and_the_clamp():
    inputs = {name: np.asarray(x) for name, x in GOLDEN["inputs"].items()}
    kept = inputs["mask"] > 0
    w, a = np.exp(inputs["logprobs"] - inputs["behaviour_logprobs"])[kept], inputs["advantages"][kept]
    log_r = (inputs["logprobs"] - inputs["ref_logprobs"])[kept]
    assert ((a > 0) & (w > 1.28)).any() and ((a < 0) & (w < 0.8)).any() and ((a < 0) & (w > 3)).any()
    assert (np.exp(log_r) * log_r > 10).any() and (np.exp(-log_r) - 1 + log_r > 10).any()


@pytest.mark.usefixtures("x64")
def test_clip_fractions_agree_with_the_public_code():
    case = next(c for c in GOLDEN["cases"] if c["name"] == "ppo")
    inputs = {name: jnp.asarray(x) for name, x in GOLDEN["inputs"].items()}
    metrics = policy_loss("ppo", **inputs, **case["hyperparameters"])[2]
    mean = {name: total / weight for name, (total, weight) in metrics.items()}
    outside = mean["clip_high_fraction"] + mean["clip_low_fraction"]
    np.testing.assert_allclose(outside, GOLDEN["clip_fraction"], rtol=TOLERANCE)
    np.testing.assert_allclose(mean["clip_dual_fraction"], GOLDEN["clip_fraction_dual"], rtol=TOLERANCE)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("group", [0, 1], ids=["groups_of_four", "groups_of_one"])
@pytest.mark.parametrize("name", GOLDEN["advantages"][0]["advantages"])
def test_advantages_agree_with_the_public_code(name, group):
    case = GOLDEN["advantages"][group]
    ours = advantages(name, jnp.asarray(case["rewards"]), lengths=jnp.asarray(case["lengths"]))
    np.testing.assert_allclose(ours, case["advantages"][name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.usefixtures("x64")
def test_the_published_reinforce_recipes_are_dapo_without_a_kl_term():
    """The public trainer calls `compute_policy_loss` for every recipe; without its KL loss nothing of RPG is left."""
    inputs = {name: jnp.asarray(x) for name, x in GOLDEN["inputs"].items()}
    recipe = dict(form="verl", estimator="differentiable", clip="reward", kl_coef=0.0)
    as_run = policy_loss("rpg", **inputs, **recipe, divergence="urkl")[0]
    np.testing.assert_array_equal(as_run, policy_loss("ppo", **inputs, clip_high=0.28)[0])
    meant = policy_loss("rpg", **inputs, divergence="urkl", estimator="reinforce", clip="dual")[0]
    assert abs(as_run - meant) > 1e-2


@pytest.mark.usefixtures("x64")
def test_in_the_public_reinforce_loss_a_reference_changes_nothing():
    inputs = {name: jnp.asarray(x) for name, x in GOLDEN["inputs"].items()}
    options = dict(divergence="rkl", estimator="reinforce", clip="dual", kl_coef=0.5)
    without = inputs | {"ref_logprobs": None}
    verl, paper = (
        [policy_loss("rpg", **x, form=form, **options)[0] for x in (inputs, without)] for form in ("verl", "paper")
    )
    assert verl[0] == verl[1] and abs(paper[0] - paper[1]) > 1e-2
