"""Losses called as functions of arrays, and losses from outside the repository."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import losses
from rpg_jax.losses.declaration import declare_own_loss

RPG = ("divergence", "estimator", "clip", "kl_coef", "clip_low", "clip_high", "clip_dual")
OTHERS = ("ppo", "grpo", "reinforce_pp", "gspo", "cispo", "dppo", "sapo", "gmpo", "opmd")
FUNCTIONS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # function, row of the registry, what the row needs
    "rpg": (losses.rpg, "rpg", {}),
    "rpg_completions": (
        losses.rpg_completions,
        "rpg",
        {"level": "sequence", "aggregate": "sequence_mean_token_sum"},
    ),
    "verl_form": (losses.verl_form, "rpg", {"form": "verl"}),
    **{name: (getattr(losses, name), name, {}) for name in OTHERS},
}


def arrays(batch):
    given = {name: x for name, x in batch.items() if name != "sampler_logprobs"}
    return [given.pop(name) for name in ("logprobs", "behaviour_logprobs", "advantages", "mask")], given


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_arrays_has_value_and_gradient_of_the_registrys_row(batch, name):
    function, row, needed = FUNCTIONS[name]
    (logprobs, *rest), more = arrays(batch)
    (found, metrics), gradient = jax.value_and_grad(function, has_aux=True)(logprobs, *rest, **more)

    def quotient(logprobs):
        given = {**batch, "logprobs": logprobs, "sampler_logprobs": None}
        total, weight, metrics = losses.policy_loss(row, **given, **needed)
        return total / weight, metrics

    (expected, others), wanted = jax.value_and_grad(quotient, has_aux=True)(logprobs)
    assert found == expected and np.array_equal(gradient, wanted)
    assert losses.divided(metrics) == losses.divided(others)


def test_rpg_is_the_formula_of_the_paper(x64):
    """Two tokens by hand: URKL, reinforce, no clip: L = −mean SG(w (A − β log r)) log π_θ."""
    logprobs, old, ref = np.log([[0.5, 0.2]]), np.log([[0.4, 0.25]]), np.log([[0.3, 0.5]])
    w, r, beta = np.array([[1.25, 0.8]]), np.array([[5 / 3, 0.4]]), 0.1
    weight = w * (2.0 - beta * np.log(r))
    mask = np.ones((1, 2))

    def loss(x):
        return losses.rpg(x, old, np.array([2.0]), mask, ref_logprobs=ref, clip="none", kl_coef=beta)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logprobs))
    np.testing.assert_allclose(value, -np.mean(weight * logprobs), rtol=1e-12)  # float64
    np.testing.assert_allclose(gradient, -weight / 2, rtol=1e-12)


def test_each_function_has_the_hyperparameters_of_its_own_loss():
    def own(function):
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        of_all = ("ref_logprobs", "completion_ids", "group_ids", "prefix_kl", "aggregate", "constant_length")
        assert tuple(names[:6]) == of_all
        return set(names[6:])

    assert own(losses.rpg) == own(losses.verl_form) == set(RPG)
    completions = {"level", "weight", "weight_cap", "kl_ratio", "trace_decay", "trace_cap"}
    assert own(losses.rpg_completions) == {*RPG, *completions}
    row = set(losses.LOSSES["rpg"].hyperparameters)
    assert row == {*RPG, *completions, "form", "behaviour_mass"}
    for name, (function, _, _) in FUNCTIONS.items():
        assert function.__name__ == name and "log π_old of the same tokens" in function.__doc__


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rpg", {"kl_coef": -1.0}, r"kl_coef of loss 'rpg' must be in \[0, inf\); got -1.0"),
        ("rpg", {"weight": "product"}, "unknown hyperparameter of loss 'rpg': 'weight'"),
        ("rpg", {"group_ids": np.zeros(4, int)}, "group_ids need level='sequence'"),
        ("verl_form", {"group_ids": np.zeros(4, int)}, "group_ids need level='sequence'"),
        ("ppo", {"group_ids": np.zeros(4, int)}, "'ppo' reads no group_ids: leave them out"),
        ("verl_form", {"clip": "dual_through"}, "unknown clip 'dual_through'. Known: none, dual, truncate, reward"),
        ("verl_form", {"divergence": "rlk"}, "Did you mean 'rkl'"),
        ("rpg_completions", {"aggregate": "token_mean"}, "would not have the gradient of completions"),
        ("rpg_completions", {"level": "to_go", "kl_ratio": "behaviour"}, "need level='sequence', not 'to_go'"),
        ("rpg", {"aggregate": "constant"}, "needs constant_length"),
    ],
)
def test_what_a_function_does_not_take_is_refused(batch, name, options, message):
    given, more = arrays(batch)
    with pytest.raises(ValueError, match=message):
        getattr(losses, name)(*given, **more | options)


def gated(
    tokens: losses.Tokens,
    *,
    tau: Annotated[float, losses.Range("(0, inf)")],
    steps: Annotated[int, losses.Range("[1, 9]")] = 1,
    kind: Literal["soft", "hard"] = "soft",
) -> losses.TokenLoss:
    """−A tanh(τ log w)/τ."""
    return losses.TokenLoss(-tokens.advantages * jnp.tanh(tau * tokens.log_w) / tau, {"far": tokens.log_w > 1})


@pytest.fixture
def table():
    """`LOSSES`, which is as before after the test."""
    before = dict(losses.LOSSES)
    yield losses.LOSSES
    losses.LOSSES.clear()
    losses.LOSSES.update(before)


def test_a_loss_from_outside_is_called_and_reported_like_ours(batch, table):
    declare_own_loss("outside:gated", gated)
    total, weight, metrics = losses.policy_loss("outside:gated", **batch, tau=0.5)
    shown = losses.divided(metrics)
    log_w = np.asarray(batch["logprobs"] - batch["behaviour_logprobs"])
    values, kept = -np.asarray(batch["advantages"]) * np.tanh(0.5 * log_w) / 0.5, np.asarray(batch["mask"])
    np.testing.assert_allclose(total / weight, values[kept].mean(), rtol=1e-5)  # float32
    assert shown["far_fraction"] == pytest.approx((log_w > 1)[kept].mean()) and shown["kl"] >= 0
    given, more = arrays(batch)
    np.testing.assert_array_equal(losses.of_arrays(gated)(*given, **more, tau=0.5)[0], total / weight)


def test_the_same_function_keeps_its_entry_and_another_function_of_its_name_replaces_it(table):
    first = declare_own_loss("outside:gated", gated)
    assert declare_own_loss("outside:gated", gated) is first
    assert declare_own_loss("outside:gated", lambda tokens: gated(tokens, tau=1.0)) is not first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "loss 'outside:gated' needs the hyperparameter tau, which has no default"),
        ({"tau": 0}, r"tau of loss 'outside:gated' must be in \(0, inf\); got 0"),
        ({"tau": [1]}, r"tau of loss 'outside:gated' must be in \(0, inf\); got \[1\]"),
        ({"tau": 1, "steps": 1.5}, r"steps of loss 'outside:gated' must be a whole number in \[1, 9\]; got 1.5"),
        ({"tau": 1, "kind": ["soft"]}, "unknown kind"),
        ({"tau": 1, "tou": 1}, "unknown hyperparameter of loss 'outside:gated': 'tou'. Did you mean 'tau'"),
    ],
)
def test_its_hyperparameters_are_checked(batch, table, options, message):
    declare_own_loss("outside:gated", gated)
    with pytest.raises(ValueError, match=message):
        losses.policy_loss("outside:gated", **batch, **options)


def undeclared(tokens, *, tau=1.0): ...


def crowded(tokens, tau, *, strength: Annotated[float, losses.Range("[0, 1]")] = 1.0): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undeclared, r"the loss 'outside:f': undeclared must declare tau as Literal\[...\] or Annotated"),
        (crowded, r"write def crowded\(tokens, \*, tau=…\); it has the positional arguments \['tokens', 'tau'\]"),
        (jnp.tanh, "must be a function, made with def; got"),
    ],
)
def test_a_function_of_another_form_is_no_loss(table, function, message):
    with pytest.raises(ValueError, match=message):
        declare_own_loss("outside:f", function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tokens: tokens.w, "must return a losses.TokenLoss, got"),
        (lambda tokens: losses.TokenLoss(jnp.sum(tokens.w)), r"must return values as float32\[4, 6\].*float32\[\]"),
        (
            lambda tokens: losses.TokenLoss(tokens.w.astype(jnp.bfloat16)),
            r"must return values as float32.*got bfloat16\[4, 6\]",
        ),
        (lambda tokens: losses.TokenLoss(tokens.w, {"far": tokens.w}), r"must return far as bool\[4, 6\]"),
        (lambda tokens: losses.TokenLoss(1.0), "must return values as .* got float"),
    ],
)
def test_what_a_loss_returns_is_checked(batch, table, function, message):
    declare_own_loss("outside:f", function)
    with pytest.raises(ValueError, match=f"loss 'outside:f' {message}"):
        losses.policy_loss("outside:f", **batch)
