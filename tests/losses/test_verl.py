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

from rpg_jax.losses import METHODS, advantages, policy_loss
from tests.losses.oracles import ORACLES

GOLDEN = json.loads((Path(__file__).parent / "golden" / "official.json").read_text(encoding="utf-8"))
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


def golden_gradient(name, **hyperparameters):
    """Σ over tokens of the public code's gradient, and the trained tokens whose ratio no clip touches."""
    [case] = [
        c
        for c in GOLDEN["cases"]
        if c["name"] == name and c["hyperparameters"].items() >= {"aggregate": "token_mean", **hyperparameters}.items()
    ]
    mask = np.asarray(GOLDEN["inputs"]["mask"])
    w = np.exp(np.subtract(GOLDEN["inputs"]["logprobs"], GOLDEN["inputs"]["behaviour_logprobs"]))
    return mask.sum() * np.asarray(case["gradient"]), (mask > 0) & (w > 0.8) & (w < 1.28), w


def row_gradient(ref_logprobs=None, **hyperparameters):
    """Σ over tokens of our gradient; by default the reference is the behaviour policy."""
    inputs = {name: jnp.asarray(x) for name, x in GOLDEN["inputs"].items()} | {"ref_logprobs": ref_logprobs}

    def loss(logprobs):
        return policy_loss("rpg", **inputs | {"logprobs": logprobs}, aggregate="token_mean", **hyperparameters)[0]

    return np.asarray(jax.jit(jax.grad(loss))(inputs["logprobs"]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("divergence", ["fkl", "ufkl", "rkl", "urkl"])
def test_what_the_public_loop_runs_for_its_reinforce_recipes_lacks_the_kl_term_of_our_rows(divergence):
    """The public `update_policy` calls `compute_policy_loss` alone, and adds no KL loss where a recipe has none."""
    public, inside, w = golden_gradient("ppo")
    row = METHODS[f"RPG-REINFORCE-{divergence.upper()}"].hyperparameters
    lacking = -row["kl_coef"] * np.asarray(ORACLES[divergence].weight(w, np.ones_like(w)))
    assert inside.sum() > 9 and np.abs(lacking[inside]).max() > 1e-6
    np.testing.assert_allclose((public - row_gradient(**row))[inside], lacking[inside], rtol=1e-6, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("divergence", ["fkl", "ufkl", "rkl", "urkl"])
def test_the_public_reinforce_loss_is_algorithm_2_against_the_behaviour_policy_where_nothing_is_clipped(divergence):
    """The function takes no reference: its numbers are those of another reference nowhere."""
    public, inside, w = golden_gradient("rpg", divergence=divergence, estimator="reinforce", clip="dual")
    options = dict(divergence=divergence, estimator="reinforce", clip="dual", kl_coef=0.05)
    np.testing.assert_allclose(row_gradient(**options)[inside], public[inside], rtol=1e-10)
    ref = jnp.asarray(GOLDEN["inputs"]["ref_logprobs"])
    other = row_gradient(ref, **options)
    rho = np.exp(np.asarray(ref) - GOLDEN["inputs"]["behaviour_logprobs"])
    weight = ORACLES[divergence].weight
    expected = 0.05 * np.asarray(weight(w, rho) - weight(w, np.ones_like(w)))
    assert np.all(np.abs(expected[inside]) > 1e-5)
    np.testing.assert_allclose((other - public)[inside], expected[inside], rtol=1e-8)


@pytest.mark.usefixtures("x64")
def test_the_public_v3_branch_lets_gains_beyond_the_upper_bound():
    """`clip_ppo_v3` asks for the sign of (A + κ/w) log π; `clip_ppo`, whose numbers are golden, for that of A."""
    public, _, w = golden_gradient("rpg", divergence="urkl", estimator="reinforce", clip="dual")
    logprobs, advantages, mask = (np.asarray(GOLDEN["inputs"][k]) for k in ("logprobs", "advantages", "mask"))
    clipped_w = np.clip(w, 0.8, 1.28)
    kappa = -0.05 * clipped_w * np.log(clipped_w)

    def gradient(gain):
        kept = np.where(gain, w < 1.28, (w >= 0.8) & (w < 3))
        return np.where(kept, -(w * advantages + kappa), 0) * mask

    np.testing.assert_allclose(gradient(advantages > 0), public, rtol=1e-10, atol=1e-12)
    v3 = gradient((advantages + kappa / w) * logprobs > 0)
    above = (advantages > 0.1) & (w > 1.28) & (w < 3) & (mask > 0)
    assert above.any() and np.all(public[above] == 0) and np.all(v3[above] < 0)
