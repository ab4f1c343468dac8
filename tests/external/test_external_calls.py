"""Losses, KL terms and advantages agree with the functions of TRL, verl, OpenRLHF and Tunix.

`call_libraries.py` calls the functions of the installed packages on one batch. Each value and each gradient is in
`called.json`, with the version of the package and the function's file and line.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import losses
from rpg_jax.losses import policy_loss

CALLED = json.loads(Path(__file__).with_name("called.json").read_text(encoding="utf-8"))
INPUTS = {name: np.asarray(values) for name, values in CALLED["inputs"].items()}
REWARDS = INPUTS.pop("rewards")
LENGTHS = INPUTS["mask"].sum(1).astype(int)
# Tunix computes in float32, and so does OpenRLHF's KL; verl adds 1e-8 to a length.
TOLERANCE = {"google-tunix": 1e-5, "openrlhf": 1e-6, "verl": 2e-8, "trl": 1e-10}


def label(case):
    ours = {k: v for k, v in case["ours"].items() if isinstance(v, str)} if isinstance(case["ours"], dict) else {}
    return "-".join([case["library"], case["function"], *(ours.values() or [case["ours"]])])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CALLED["called_losses"], ids=label)
def test_loss_and_gradient_are_those_of_the_library(case):
    tolerance = TOLERANCE[case["library"]]
    ours = dict(case["ours"])
    inputs = {name: jnp.asarray(x) for name, x in INPUTS.items()}
    if case.get("kl_only"):
        inputs["advantages"] = jnp.zeros_like(inputs["advantages"])
    if case.get("without_reference"):
        del inputs["ref_logprobs"]
    name = ours.pop("name")

    def loss(logprobs):
        total, weight, _ = policy_loss(name, **inputs | {"logprobs": logprobs}, **ours)
        return total / weight

    value, gradient = jax.value_and_grad(loss)(inputs["logprobs"])
    if bound := case.get("weight_bound"):  # OpenRLHF bounds w in its gradient of the KL; this code does not
        w = np.exp(INPUTS["logprobs"] - INPUTS["behaviour_logprobs"])
        assert (w > bound).any()
        gradient *= np.minimum(w, bound) / w
    if case["value"] is not None:
        np.testing.assert_allclose(value, case["value"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CALLED["called_advantages"], ids=label)
def test_advantages_are_those_of_the_library(case):
    options = {"lengths": LENGTHS.reshape(2, 4)} if case["ours"] == "whitened_group_mean" else {}
    found = losses.advantages(case["ours"], jnp.asarray(REWARDS), **options)
    np.testing.assert_allclose(found, case["values"], rtol=2e-6, atol=2e-6)
