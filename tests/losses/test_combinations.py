"""Every combination of a loss's choices, with aggregates, corrections, packing, stale and absurd numbers, against
`second_losses`: value, weight and every gradient. A combination is either equal there or refused by name."""

from __future__ import annotations

import itertools
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import losses
from tests.losses import second_losses

AGGREGATES = ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"]
CORRECTIONS = [
    {},
    *({"sampler_correction": kind} for kind in (*second_losses.BOUNDS, "anchor")),
    {"sampler_correction": "truncate", "sampler_high": 1.2},
    {"sampler_correction": "mask", "sampler_low": 0.9, "sampler_high": 1.3},
    {"sampler_correction": "sequence", "sampler_low": 0.0, "sampler_high": float("inf")},
    {"sampler_correction": "geometric", "sampler_low": 0.8, "sampler_high": 1.4},
    {"sampler_correction": "off_policy", "sampler_low": 0.9},
]
STALENESS = {"none": 0.0, "little": 0.02, "usual": 0.35, "much": 2.0, "absurd": None}
"""{name: the standard deviation of log π/π_old}; None: ratios up to e^45."""


def product(**choices):
    return [dict(zip(choices, chosen, strict=True)) for chosen in itertools.product(*choices.values())]


def both(first, second):
    return [a | b for a in first for b in second]


CLIPS = [{}, {"clip_low": 0.0, "clip_high": 0.0}, {"clip_low": 0.1, "clip_high": 0.5}]
DUAL_CLIPS = [*CLIPS[:2], CLIPS[2] | {"clip_dual": 3.0}, {"clip_dual": None}, {"clip_dual": float("inf")}]
OF_RPG = {
    "divergence": list(second_losses.COEFFICIENTS),
    "estimator": ["differentiable", "reinforce", "exact"],
    "clip": ["none", "dual", "dual_through", "truncate", "reward"],
}
OF_COMPLETIONS = product(
    level=["sequence", "to_go"],
    **OF_RPG | {"clip": ["none", "dual", "truncate", "reward"]},
    weight=["product", "capped", "token", "none"],
    kl_ratio=["present", "behaviour"],
)
TO_GO = [{"trace_decay": 0.5}, {"trace_cap": float("inf")}]
SIZES = [{"kl_coef": 0.1}, {"kl_coef": 2.0, "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 2.0, "behaviour_mass": 1.7}]
CASES = {
    "ppo": DUAL_CLIPS,
    "grpo": both(
        DUAL_CLIPS, product(kl_coef=[0.0, 0.1], kl_weighting=["none", "importance"], kl_clamp=[None, 10.0, 0.3])
    ),
    "reinforce_pp": both(DUAL_CLIPS, product(kl_coef=[0.0, 0.1])),
    "gspo": CLIPS,
    "cispo": [*CLIPS, {"clip_low": None}],
    "dppo": product(mask_divergence=["tv", "kl"], mask_threshold=[0.0, 0.05, 0.15, float("inf")]),
    "ctpo": [{}, {"width_low": 0.2, "width_high": 0.3, "width_dual": 0.6}],
    "drpo": product(trust_region=[0.15, 0.01, float("inf")]),
    "sapo": product(tau_positive=[1.0, 3.0], tau_negative=[1.05, 0.2]),
    "gmpo": CLIPS,
    "opmd": product(kl_coef=[0.0, 0.1, 2.0], penalty_level=["completion", "token"]),
    "rpg": [
        *both(product(**OF_RPG, kl_coef=[0.0, 0.1, 3.0]), DUAL_CLIPS),
        *both(product(form=["verl"], **OF_RPG, kl_coef=[0.0, 0.1]), DUAL_CLIPS[:3]),
        *both(OF_COMPLETIONS, SIZES),
        *both([case for case in OF_COMPLETIONS if case["level"] == "to_go"], TO_GO),
        *both([case for case in OF_COMPLETIONS if case["weight"] == "capped"], [{"weight_cap": 1.1}]),
    ],
}


def is_refused(case):
    """Whether the library must refuse a combination by name. It takes every other."""
    level, estimator, clip = (case.get(name) for name in ("level", "estimator", "clip"))
    if level is None:
        verl = case.get("form") == "verl" and (estimator == "exact" or clip == "dual_through")
        return verl or (clip == "dual_through" and estimator != "differentiable")
    wrong = estimator == "exact" if level == "sequence" else case["kl_ratio"] == "behaviour"
    return wrong or (case["weight"] == "product" and clip != "none")


def drawn(dice, staleness, packed):
    """Five rows of six tokens, one without any token, with junk where the mask is 0."""
    rows, columns = 5, 6
    lengths = dice.integers(1, columns + 1, rows)
    lengths[:2] = 1, columns
    mask, ids = (np.arange(columns) < lengths[:, None]).astype(float), None
    mask[2] = 0
    if packed:
        ids = np.zeros((rows, columns), int)
        ids[0, :1] = 1
        ids[1], ids[3], ids[4] = [1, 1, 2, 2, 2, 3], [2, 2, 2, 1, 1, 0], [1, 1, 1, 1, 4, 4]
        mask[1], mask[3], mask[4] = 1, [1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]
    if dice.random() < 0.3:
        mask[1, [0, 2]] = 0
    shape, spread = mask.shape, STALENESS[staleness]
    absurd = [-30.0, -25.0, -20.0, 0.0, 19.9999, 20.0, 30.0, 45.0, np.log(10.0)]
    log_w = dice.choice(absurd, shape) if spread is None else spread * dice.normal(size=shape)
    old = -dice.exponential(1.0, shape) - 1e-3 - np.maximum(log_w, 0)
    far = dice.choice([-30.0, -20.0, 0.0, 1.0, 20.0, 30.0], shape)
    advantages = dice.normal(size=shape if dice.random() < 0.5 else rows) * dice.choice([0.0, 1.0], p=[0.1, 0.9])
    groups = dice.integers(0, 3, rows)
    arrays = {
        "logprobs": old + log_w,
        "behaviour_logprobs": old,
        "ref_logprobs": old + (far if spread is None else 0.4 * dice.normal(size=shape)),
        "sampler_logprobs": old + dice.choice([0.001, 0.3, 2.0]) * dice.normal(size=shape),
        "reverse": dice.exponential(0.3, shape),
        "forward": dice.exponential(0.3, shape),
    }
    if advantages.ndim == 2:
        arrays["advantages"] = advantages
    junk = dice.choice([np.nan, np.inf, -np.inf, 1e30, -1e30, 7.0], shape)
    arrays = {name: np.where(mask == 0, junk, array) for name, array in arrays.items()}
    prefix = arrays.pop("reverse"), arrays.pop("forward")
    groups = groups if ids is None else (ids + groups[:, None]) % 3
    return {"advantages": advantages, **arrays, "mask": mask, "completion_ids": ids, "group_ids": groups}, prefix


def of_library(name, arrays, prefix, settings):
    arrays = {key: None if array is None else jnp.asarray(array) for key, array in arrays.items()}

    def loss(live):
        logprobs, *pair = live
        given = arrays | {"logprobs": logprobs, "prefix_kl": losses.PrefixKL(*pair) if pair else None}
        total, weight, _ = losses.policy_loss(name, **given, **settings)
        return total, weight

    live = [arrays["logprobs"], *map(jnp.asarray, prefix or ())]
    (total, weight), gradients = jax.value_and_grad(loss, has_aux=True)(live)
    return float(total), float(weight), np.asarray(gradients)


def close(found, expected):
    with np.errstate(invalid="ignore"):
        return np.all(np.abs(found - expected) <= 1e-9 * (0.1 + np.abs(expected).max()))


def compare(name, hyperparameters, dice):
    """Compares one case with what it draws for all that is beside the loss."""
    staleness, packed = dice.choice(list(STALENESS)), dice.random() < 0.4
    arrays, prefix = drawn(dice, staleness, packed)
    level = hyperparameters.get("level", "token")
    if not (level == "sequence" and dice.random() < 0.5):
        arrays["group_ids"] = None
    if not (name in ("grpo", "reinforce_pp") and hyperparameters.get("kl_coef")) and dice.random() < 0.3:
        arrays["ref_logprobs"] = None
    if hyperparameters.get("estimator") != "exact":
        prefix = None
    aggregate = dice.choice(AGGREGATES if level == "token" else ["sequence_mean_token_sum", "constant"])
    settings = hyperparameters | {"aggregate": str(aggregate)} | CORRECTIONS[dice.integers(len(CORRECTIONS))]
    if aggregate == "constant":
        settings["constant_length"] = 7
    if is_refused(hyperparameters):
        with pytest.raises(ValueError, match="level=|weight=|estimator|clip"):
            of_library(name, arrays, prefix, settings)
        return
    total, weight, gradients = of_library(name, arrays, prefix, settings)
    expected = second_losses.policy_loss(name, **arrays, prefix_kl=prefix, **settings)
    said = name, settings, staleness, packed
    assert np.isfinite(total) and np.isfinite(gradients).all(), said
    assert close(total, expected[0]) and weight == expected[1], (said, total, weight, expected[:2])
    assert close(gradients, expected[2]), (said, gradients, expected[2])


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.01, id="a hundredth"),
        pytest.param(0.1, id="a tenth", marks=pytest.mark.slow),
        pytest.param(1.0, id="all", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_what_it_is_by_another_hand_or_is_refused(name, share):
    cases, choose = CASES[name], random.Random(7)
    chosen = choose.sample(cases, max(min(3, len(cases)), round(share * len(cases))))
    dice = np.random.default_rng(zlib.crc32(name.encode()))
    with jax.enable_x64(True), jax.disable_jit():
        for hyperparameters in chosen:
            compare(name, hyperparameters, dice)
