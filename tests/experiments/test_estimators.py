from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import kept
from experiments.estimators import __main__ as program
from experiments.estimators import results, token
from experiments.estimators.estimators import CLIPS, COMPARATORS, KL_TERMS
from experiments.estimators.sums import end_of_descent, exact_gradient, moments, tokens_of
from experiments.estimators.trees import OPTIMA, Tree, kl, make_scenes

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"
FEW = token.Settings(scenes=4, drifts=(1e-3, 1e-1), fixed_point_scenes=2, steps=2_000)
TREE = Tree(actions=7, length=1)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def scene(**distances):
    stacked = make_scenes(1, tokens=7, **{"drift": 0.2, "reference_kl": 0.1, "sampler_kl": 0.05} | distances)
    return jax.tree.map(lambda x: x[0], stacked)


def test_policies_lie_at_the_distances_asked_for():
    x = scene()
    for policy, distance in ((x.policy, 0.2), (x.reference, 0.1), (x.sampler, 0.05)):
        np.testing.assert_allclose(kl(policy[0], x.behaviour[0]), distance, rtol=1e-10)
        np.testing.assert_allclose(jnp.sum(jnp.exp(policy)), 1, rtol=1e-12)


# One of each kind in the default run: with a reference and without, clipped, of a completion's ratio.
IN_EVERY_RUN = {"RPG-URKL", "k₃ in the loss (GRPO)", "RPG-URKL, clip dual", "GSPO"}


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(e, marks=() if e.name in IN_EVERY_RUN else pytest.mark.slow)
        for e in (*KL_TERMS, *CLIPS, *COMPARATORS)
    ],
    ids=lambda e: e.name,
)
def test_moments_are_those_of_each_tokens_gradient(estimator):
    x = scene()
    got = moments(estimator, TREE, x, 0.3)
    tokens = tokens_of(TREE, x, x.rewards - jnp.exp(x.behaviour[0]) @ x.rewards)

    @jax.jit
    @jax.grad
    def gradient_of(logits, token):
        """Token's loss as a difference of sums: the others are held where they are."""
        policy = jax.nn.log_softmax(logits)[:, None]
        others = jax.lax.stop_gradient(policy)
        only = dataclasses.replace(tokens, logprobs=others.at[token].set(policy[token]))
        return jnp.sum(estimator.losses(only, 0.3))

    gradients = jnp.stack([gradient_of(x.policy[0], token) for token in range(7)])
    sampled = jnp.exp(x.sampler[0])
    mean = sampled @ gradients
    np.testing.assert_allclose(got.mean[0], mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.variance, sampled @ jnp.sum((gradients - mean) ** 2, -1), rtol=1e-9)


@pytest.mark.parametrize("divergence", OPTIMA)
def test_closed_form_optima_have_no_gradient_left(divergence):
    x = scene()
    at_optimum, at_start = (
        exact_gradient("completions", divergence, TREE, dataclasses.replace(x, policy=policy), 0.5)
        for policy in (TREE.policy(x.optimum(TREE, 0.5, divergence)), x.behaviour)
    )
    np.testing.assert_allclose(at_optimum, 0, atol=1e-12)
    assert jnp.linalg.norm(at_start) > 1e-2


def test_descending_the_mean_gradient_reaches_the_optimum_of_the_divergence():
    x = scene(drift=0, sampler_kl=0)
    fkl = next(e for e in KL_TERMS if e.name == "RPG-FKL")
    end = end_of_descent(fkl, TREE, x, 0.5, optax.sgd(0.2), refresh=16, steps=3_000)[0]
    assert kl(end, x.optimum(TREE, 0.5, "forward")) < 1e-6
    assert kl(end, x.optimum(TREE, 0.5, "reverse")) > 1e-3


@pytest.mark.slow  # each estimator in the default run has a test of its moments
def test_the_committed_page_gives_the_verdicts_that_the_code_computes():
    verdicts = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if len(cells) == 8:
            verdicts[cells[0].removeprefix("| ")] = cells[2]
    prompts = token.drifting(FEW)
    for estimator in KL_TERMS:
        assert verdicts[estimator.name] == results.verdict(token.kl_term(estimator, FEW, prompts))


def test_a_verdict_needs_the_numbers_for_it():
    exact, biased = [1e-15, 1e-15], [0.03, 0.8]
    assert results.descends({"error_reverse": exact, "error_forward": biased}) == ("reverse", "exactly")
    assert results.descends({"error_reverse": [0.3, 0.9], "error_forward": biased}) == (
        "forward",
        "on-policy only",
    )
    assert results.descends({"error_reverse": [1.0, 1.0], "error_forward": [0.9, 1.0]}) == (None, "neither")


@pytest.mark.slow
def test_the_program_leaves_numbers_tables_and_figure(tmp_path, capsys):
    assert program.main(["token", "--quick", f"--out={tmp_path}"]) == 0
    assert (tmp_path / "token.png").read_bytes().startswith(b"\x89PNG")
    found = kept.read(tmp_path / "token.json.gz", program.QUICK[0])
    assert "RPG-URKL" in found["kl_terms"]
    assert "| RPG-URKL | −wA + β(w log r − w) | KL(π_θ‖π_ref), exactly |" in (tmp_path / "tables.md").read_text(
        encoding="utf-8"
    )
    assert str(tmp_path / "tables.md") in capsys.readouterr().out.replace("\n", "")
    with pytest.raises(ValueError, match="results of other settings"):
        kept.read(tmp_path / "token.json.gz", program.SETTINGS[0])
