"""A loss and an advantage from outside the repository, in a config: found by name, checked, and filled in."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any

import jax.numpy as jnp
import pytest

import rpg_jax
from configs import tiny
from examples import own_loss
from rpg_jax import losses
from rpg_jax.runs.arguments import loss_arguments
from rpg_jax.runs.learner import policy_objective
from rpg_jax.runs.resolve import resolve, with_method

OWN, MEDIAN = "examples.own_loss:tempered", "examples.own_loss:median_baseline"


@pytest.fixture(autouse=True)
def tables():
    """The tables of losses and advantages are as before after each test."""
    before = [(table, dict(table)) for table in (losses.LOSSES, losses.ADVANTAGES)]
    yield
    for table, rows in before:
        table.clear()
        table.update(rows)


def resolved(**fields: Any):
    config = tiny.get_config()
    config.update_from_flattened_dict(fields)
    return resolve(config)


def test_a_loss_by_name_has_its_arguments_and_what_it_declares_of_the_method():
    config = resolved(**{"loss.name": OWN, "loss.arguments": '{"tau":0.5}', "method": "RPG-REINFORCE-URKL"})
    name, hyperparameters = loss_arguments(config)
    assert name == OWN and hyperparameters == {"tau": 0.5, "kl_coef": 1e-4, "aggregate": "token_mean"}
    assert config.loss.arguments == '{"tau": 0.5}' and config.loss.divergence is None
    assert resolved(**{"loss.name": OWN, "loss.kl_coef": 0.3}).loss.kl_coef == 0.3


def test_a_config_that_is_resolved_again_is_the_same():
    once = resolved(**{"loss.name": OWN, "loss.arguments": '{"tau": 0.5}', "loss.advantage": MEDIAN})
    assert with_method(once).to_dict() == once.to_dict()


def test_the_arguments_have_the_hyperparameters_of_a_row_that_have_no_field():
    filled = {}
    for method in losses.METHODS:
        config = tiny.get_config()
        config.method = method
        if with_method(config).loss.arguments is not None:
            filled[method] = json.loads(with_method(config).loss.arguments)
    assert filled == {
        "GRPO": {"kl_clamp": 10.0},
        "CTPO": {"width_low": 0.025, "width_high": 0.05, "width_dual": 0.05},
        "DPPO-TV": {"mask_divergence": "tv", "mask_threshold": 0.15},
        "DPPO-KL": {"mask_divergence": "kl", "mask_threshold": 0.05},
        "DRPO": {"trust_region": 0.15},
        "SAPO": {"tau_positive": 1.0, "tau_negative": 1.05},
    }
    one = resolved(**{"method": "SAPO", "loss.arguments": '{"tau_positive": 2.0}'})
    assert loss_arguments(one)[1]["tau_positive"] == 2.0 and loss_arguments(one)[1]["tau_negative"] == 1.05


def test_another_loss_of_ours_takes_from_the_row_what_both_declare():
    config = resolved(**{"method": "RPG-REINFORCE-URKL", "loss.name": "sapo", "loss.arguments": '{"tau_positive": 2}'})
    assert loss_arguments(config)[1] == {"tau_positive": 2, "aggregate": "token_mean"}
    assert loss_arguments(resolved(**{"loss.name": "ppo"}))[1]["clip_high"] == 0.28  # of the row


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss.arguments": "tau=1"}, r'loss.arguments=.tau=1. is not JSON .*: write it as \{"tau": 0.5\}'),
        ({"loss.arguments": "[1]"}, "must be an object of JSON"),
        ({"loss.arguments": '{"tou": 1}'}, "unknown hyperparameter of loss '.*tempered': 'tou'. Did you mean 'tau'"),
        ({"loss.arguments": '{"tau": "1"}'}, r"tau of loss '.*tempered' must be in \(0, 1\]; got '1'"),
        ({"loss.arguments": '{"tau": [1]}'}, r"tau of loss '.*tempered' must be in \(0, 1\]; got \[1\]"),
        ({"loss.arguments": '{"tau": 2}'}, r"tau of loss '.*tempered' must be in \(0, 1\]; got 2"),
        ({"loss.arguments": '{"kl_coef": 1}', "loss.kl_coef": 1.0}, "loss.arguments sets kl_coef, which has a field"),
        ({"loss.clip": "dual"}, "unknown hyperparameter of loss '.*tempered': 'clip'"),
        ({"loss.name": "examples.own_loss:missing"}, "has no function or class 'missing' for the loss"),
        ({"loss.name": "no_such_module:f"}, "cannot import 'no_such_module' for the loss"),
        (
            {"loss.name": "examples/own_loss.py:tempered"},
            "for the loss 'examples/own_loss.py:tempered': .*; drop the .py",
        ),
        ({"loss.name": "examples.own_loss:"}, "not of the form module:name"),
        ({"loss.name": "math:sin"}, "the loss 'math:sin' must be a function, made with def"),
        ({"loss.advantage": "math:sin"}, "the advantage 'math:sin' must be a function, made with def"),
        (
            {"loss.advantage": "examples.own_loss:main"},
            r"called as main\(rewards\).*it asks for steps, tau, overrides",
        ),
        ({"loss.advantage": MEDIAN, "loss.credit": "turn"}, "may do so, and has no form for turns"),
        ({"loss.level": "sequence"}, "loss.level=sequence does not have the gradient of completions"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_config_is_resolved(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        resolved(**{"loss.name": OWN} | fields)
    assert "\n" not in str(error.value)


def failing(tokens: losses.Tokens, *, tau: Annotated[float, losses.Range("(0, 1]")] = 1.0) -> losses.TokenLoss:
    raise KeyError("no such thing\nand more")


def flat(rewards):
    return jnp.zeros(3)


def above_value(parts, part_weights):
    right, _value = part_weights
    return right * (parts[..., 0] - parts[..., 1])


@pytest.mark.parametrize("group_size", [1, 8])
def test_an_advantage_of_parts_is_tried_with_as_many_parts_as_the_reward_has(group_size):
    losses.declare_own_advantage("outside:above_value", above_value)
    fields = {
        "rollout.group_size": group_size,
        "dynamic_sampling.enabled": False,
        "loss.advantage": "outside:above_value",
    }
    resolved(**fields | {"rewards.parts": "exact:1,length:0", "rewards.overlong_shaping": False})
    with pytest.raises(ValueError, match="not enough values"):
        resolved(**fields | {"rewards.parts": "exact", "rewards.overlong_shaping": False})


def test_what_a_function_raises_or_returns_is_told_in_one_line():
    losses.declare_own_loss("outside:failing", failing)
    losses.declare_own_advantage("outside:flat", flat)
    with pytest.raises(ValueError, match=r"loss.name=outside:failing raises KeyError: .*own_losses\.py, line 112\)$"):
        resolved(**{"loss.name": "outside:failing"})
    with pytest.raises(ValueError, match=r"'outside:flat' must return the shape of rewards \(2, 2\), got \(3,\)"):
        resolved(**{"loss.advantage": "outside:flat"})


def test_another_function_of_the_same_name_is_another_objective():
    """A notebook's cell that is run again: nothing compiled of the old function may be used."""
    config = resolved(**{"loss.name": OWN})
    first = policy_objective(config).loss
    assert policy_objective(config).loss is first
    losses.declare_own_loss(OWN, lambda tokens: own_loss.tempered(tokens, tau=0.1))
    with config.unlocked():
        config.loss.kl_coef = None
    assert policy_objective(config).loss is not first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": 3}, "a loss is a function or the name, got int"),
        ({"loss": functools.partial(own_loss.tempered, None)}, "give functools.partial a function and keywords alone"),
        ({"loss": own_loss.tempered, "overrides": {"loss.name": "ppo"}}, "say the same thing twice"),
        (
            {"loss": functools.partial(own_loss.tempered, tau=1), "overrides": {"loss.arguments": "{}"}},
            "overrides of loss.arguments say the same thing twice",
        ),
        ({"advantage": own_loss.main}, "it asks for steps, tau, overrides"),
        ({"advantage": flat, "overrides": {"loss.advantage": "maxrl"}}, "say the same thing twice"),
    ],
)
def test_what_a_program_hands_over_wrongly_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rpg_jax.train("tiny", **arguments)
