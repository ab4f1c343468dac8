"""The declarations of the losses: defaults and ranges against values written down by hand."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import LOSSES, PrefixKL, policy_loss
from rpg_jax.losses.declaration import Loss
from rpg_jax.losses.methods import of_completions

PPO = dict(clip_low=0.2, clip_high=0.2, clip_dual=10.0)  # arXiv:1707.06347 Table 1
HIGHER = dict(clip_low=0.2, clip_high=0.28, clip_dual=10.0)  # arXiv:2503.14476 section 4.1
DEFAULTS = {  # name: aggregate and hyperparameters; sources as in test_methods
    "rpg": (
        "token_mean",
        dict(divergence="urkl", estimator="reinforce", clip="dual", form="paper", kl_coef=1e-4, behaviour_mass=1.0)
        | dict(level="token", weight="token", weight_cap=2.0, kl_ratio="present", trace_decay=1.0, trace_cap=1.0)
        | HIGHER,
    ),
    "ppo": ("token_mean", PPO),
    "grpo": ("sequence_mean_token_mean", dict(kl_coef=1e-3, kl_weighting="none", kl_clamp=None) | PPO),
    "reinforce_pp": ("token_mean", dict(kl_coef=1e-4) | HIGHER),
    "gspo": ("sequence_mean_token_mean", dict(clip_low=3e-4, clip_high=4e-4)),
    "cispo": ("token_mean", dict(clip_low=None, clip_high=0.28)),
    "dppo": ("token_mean", dict(mask_divergence="tv", mask_threshold=0.15)),
    "sapo": ("sequence_mean_token_mean", dict(tau_positive=1.0, tau_negative=1.05)),
    "gmpo": ("sequence_mean_token_mean", dict(clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1)),
    "opmd": ("sequence_mean_token_sum", dict(kl_coef=0.1, penalty_level="completion")),
}
CHOICES = {
    "divergence": {"fkl", "ufkl", "rkl", "urkl", "js", "ujs"},
    "estimator": {"differentiable", "reinforce", "exact"},
    "clip": {"none", "dual", "dual_through", "truncate", "reward"},
    "form": {"paper", "verl"},
    "level": {"token", "sequence", "to_go"},
    "weight": {"token", "product", "capped", "none"},
    "kl_ratio": {"present", "behaviour"},
    "kl_weighting": {"none", "importance"},
    "mask_divergence": {"tv", "kl"},
    "penalty_level": {"completion", "token"},
}
TOKEN_SUMS = {"aggregate": "sequence_mean_token_sum"}
COMPLETIONS = {"level": "sequence", "clip": "none", **TOKEN_SUMS}
GO_TOGETHER = {"behaviour": COMPLETIONS, "sequence": TOKEN_SUMS, "to_go": TOKEN_SUMS}
GO_TOGETHER |= {"dual_through": {"estimator": "differentiable"}}
CHOICES_OF = {"kl_weighting": "grpo", "mask_divergence": "dppo", "penalty_level": "opmd"}  # the others: of rpg
TINY = 1e-9
RANGES = {  # name: how an error writes the range, values at its edge that are taken, and values beyond that are not
    "kl_coef": (r"\[0, inf\)", [0, 1e9], [-TINY, math.inf, None]),
    "clip_low": (r"\[0, 1\)", [0, 1 - TINY], [-TINY, 1.0, None]),
    "clip_high": (r"\[0, inf\)", [0, 1e9], [-TINY, math.inf, None]),
    "clip_dual": (r"\(1, inf\], or None", [1 + TINY, math.inf, None], [1.0, 0.5]),
    "kl_clamp": (r"\(0, inf\], or None", [TINY, math.inf, None], [0, -1.0]),
    "behaviour_mass": (r"\(0, inf\)", [TINY, 1e9], [0, math.inf, None]),
    "weight_cap": (r"\(0, inf\)", [TINY, 1e9], [0, math.inf, None]),
    "trace_decay": (r"\[0, 1\]", [0, 1], [-TINY, 1 + TINY, None]),
    "trace_cap": (r"\(0, inf\]", [TINY, math.inf], [0, -1.0, None]),
    "mask_threshold": (r"\[0, inf\]", [0, math.inf], [-TINY, None]),
    "tau_positive": (r"\(0, inf\)", [TINY, 1e9], [0, math.inf, None]),
    "tau_negative": (r"\(0, inf\)", [TINY, 1e9], [0, math.inf, None]),
    "sampler_low": (r"\[0, inf\), or None", [0, 1.0, None], [-TINY, math.inf]),
    "sampler_high": (r"\(0, inf\], or None", [0.6, math.inf, None], [0, -1.0]),
    "constant_length": (r"\(0, inf\), or None", [1, 1e9, None], [0, math.inf]),
}
_SUM = {"aggregate": "sequence_mean_token_sum"}
READ_WITH = {
    **dict.fromkeys(("sampler_low", "sampler_high"), {"sampler_correction": "mask"}),
    **dict.fromkeys(("trace_decay", "trace_cap"), {"level": "to_go", **_SUM}),
    "weight_cap": {"level": "sequence", "weight": "capped", **_SUM},
}
OF_EVERY_LOSS = {"sampler_low", "sampler_high", "constant_length"}


def evaluate(name, **hyperparameters):
    """Checks and shapes only: nothing is computed."""
    arrays = ("logprobs", "behaviour_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "mask")
    one = dict.fromkeys(arrays, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    one["prefix_kl"] = PrefixKL(one["mask"], one["mask"])
    return jax.eval_shape(lambda **arrays: policy_loss(name, **arrays, **hyperparameters), **one)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_defaults_of_a_loss_are_those_of_its_source(name):
    aggregate, defaults = DEFAULTS[name]
    parameters = inspect.signature(LOSSES[name].function).parameters.values()
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == defaults
    assert LOSSES[name].aggregate == aggregate
    assert set(LOSSES[name].hyperparameters) == set(defaults) <= CHOICES.keys() | RANGES.keys()


@pytest.mark.parametrize(
    ("name", "hyperparameter"),
    [(name, x) for name, (_, defaults) in DEFAULTS.items() for x in RANGES if x in defaults or x in OF_EVERY_LOSS],
)
def test_a_range_ends_where_it_says_and_the_error_has_the_value(name, hyperparameter):
    text, taken, refused = RANGES[hyperparameter]
    others = READ_WITH.get(hyperparameter, {})
    for value in taken:
        evaluate(name, **others, **{hyperparameter: value})
    for value in (*refused, math.nan, "1", True):
        if value is None and (name, hyperparameter) == ("cispo", "clip_low"):
            continue  # without a lower bound
        with pytest.raises(ValueError, match=f"{hyperparameter} of loss '{name}' must be in {text}.*; got {value!r}"):
            evaluate(name, **others, **{hyperparameter: value})


@pytest.mark.parametrize("hyperparameter", CHOICES)
def test_a_choice_takes_its_words_and_no_other(hyperparameter):
    name = CHOICES_OF.get(hyperparameter, "rpg")
    for word in CHOICES[hyperparameter]:
        together = COMPLETIONS if hyperparameter == "weight" else GO_TOGETHER.get(word, {})
        evaluate(name, **{hyperparameter: word} | together)
    with pytest.raises(ValueError, match=f"unknown {hyperparameter} 'x'. Known: ") as error:
        evaluate(name, **{hyperparameter: "x"})
    known = set(str(error.value).split("Known: ")[1].split(", "))
    assert known >= CHOICES[hyperparameter] and (hyperparameter == "divergence" or known == CHOICES[hyperparameter])


def test_a_scheduled_coefficient_may_be_a_tracer():
    evaluate("rpg", kl_coef=jnp.float32(0.1))
    jax.eval_shape(lambda beta: evaluate("rpg", kl_coef=beta)[0], jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(ValueError, match=r"kl_coef of loss 'rpg' must be in \[0, inf\); got array"):
        evaluate("rpg", kl_coef=np.ones(2))


def test_a_loss_whose_hyperparameter_declares_no_values_is_refused():
    def careless(tokens, *, strength: float = 1.0): ...

    with pytest.raises(TypeError, match="careless must declare strength as"):
        Loss(careless, "")


@pytest.mark.parametrize("name", LOSSES)
def test_the_equation_of_a_loss_is_that_of_its_defaults(name):
    loss = LOSSES[name]
    defaults = {
        k: p.default for k, p in inspect.signature(loss.function).parameters.items() if p.default is not p.empty
    }
    assert loss.latex() == loss.latex(**defaults) != ""


def test_a_row_of_completions_takes_bounds_of_its_own():
    own = of_completions("rkl", "mine", clip_low=0.1, kl_coef=0.5).hyperparameters
    assert (own["clip_low"], own["clip_high"], own["kl_coef"]) == (0.1, 0.28, 0.5)
