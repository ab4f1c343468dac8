from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import kept
from experiments.estimators import __main__ as program
from experiments.estimators import completions, results, staleness
from experiments.estimators.completions import CompletionSettings, outcome
from experiments.estimators.estimators import ESTIMATORS, VOCABULARY
from experiments.estimators.staleness import StalenessSettings
from experiments.estimators.sums import end_of_descent, exact_gradient, expected_advantages, moments, tokens_of
from experiments.estimators.trees import Tree, make_prompts
from rpg_jax import losses
from rpg_jax.training.objective import supervised_loss

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"
ROWS = {e.key: e for e in (*ESTIMATORS, *VOCABULARY)}
TOKEN, SEQUENCE, EXACT_TO_GO = (ROWS[f"{name}: URKL"] for name in ("per token", "sequence, weight W", "to-go, exact"))
TREE = Tree(actions=2, length=3)
# Sums of a few float64 terms of order one.
ROUNDING = dict(rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def prompt(drift=0.3):
    stacked = make_prompts(1, TREE, drift=drift, behaviour_kl=0.5, rewarded=0.4)
    return jax.tree.map(lambda x: x[0], stacked)


def test_a_tree_finds_the_entries_that_each_completion_passes():
    sequences = list(itertools.product(range(2), repeat=3))
    prefixes = [x for t in range(3) for x in itertools.product(range(2), repeat=t)]
    table = np.random.default_rng(0).normal(size=(len(prefixes), 2))
    by_hand = [[table[prefixes.index(x[:t]), x[t]] for t in range(3)] for x in sequences]
    np.testing.assert_array_equal(TREE.along(jnp.asarray(table)), by_hand)
    passed = [[table[prefixes.index(x[:t])] for t in range(3)] for x in sequences]
    np.testing.assert_array_equal(TREE.at_prefixes(jnp.asarray(table)), passed)
    np.testing.assert_array_equal(Tree(actions=2, length=1).at_prefixes(jnp.asarray(table[:1])), [table[:1]] * 2)
    masses = np.random.default_rng(1).random(len(sequences))
    through = [[sum(m for m, x in zip(masses, sequences, strict=True) if x[: len(p) + 1] == (*p, a)) for a in range(2)]
               for p in prefixes]  # fmt: skip
    np.testing.assert_allclose(TREE.through(jnp.asarray(masses)), through, **ROUNDING)
    policy = prompt().policy
    np.testing.assert_allclose(TREE.policy(TREE.completions(policy)), policy, **ROUNDING)


def test_policies_of_completions_lie_at_the_distances_asked_for():
    np.testing.assert_allclose(TREE.kl(prompt().policy, prompt().behaviour), 0.3, rtol=1e-9)
    np.testing.assert_allclose(TREE.kl(prompt().behaviour, prompt().reference), 0.5, rtol=1e-9)
    assert jnp.sum(prompt().rewards) == 3


@pytest.mark.parametrize("estimator", [TOKEN, ROWS["sequence, weight 1: URKL"]], ids=lambda e: e.key)
def test_the_mean_gradient_is_that_of_groups_with_their_baseline(estimator):
    """Every pair of completions is one group of two. With weight 1 a baseline changes the mean off-policy."""
    x, pairs = prompt(), np.indices((8, 8)).reshape(2, -1).T.ravel()
    sampled = jnp.exp(TREE.completions(x.behaviour))
    weights = (sampled[pairs[0::2]] * sampled[pairs[1::2]]).repeat(2) / 2

    def expected(logits):
        columns = (TREE.along(p)[pairs] for p in (jax.nn.log_softmax(logits), x.behaviour, x.reference))
        names = ("logprobs", "behaviour_logprobs", "ref_logprobs")
        tokens = losses.tokens.checked(
            **dict(zip(names, columns, strict=True)),
            advantages=losses.advantages("leave_one_out", x.rewards[pairs].reshape(-1, 2)).ravel(),
            mask=jnp.ones((128, 3)),
            sampler_logprobs=None,
            completion_ids=None,
            group_ids=np.arange(64).repeat(2) if estimator.baseline else None,
        )
        return weights @ jnp.sum(estimator.losses(tokens, 0.7), axis=1)

    got = jax.jit(lambda: moments(estimator, TREE, x, 0.7))()
    np.testing.assert_allclose(got.mean, jax.jit(jax.grad(expected))(x.policy), **ROUNDING)


@pytest.mark.parametrize("estimator", (TOKEN, ROWS["to-go, exact, KL over the vocabulary: RKL"]), ids=lambda e: e.key)
def test_the_variance_is_that_of_each_completions_gradient(estimator):
    x = prompt()
    advantages = expected_advantages(estimator, TREE, x, 0.7, 1.0)

    def each(logits):
        now = dataclasses.replace(x, policy=jax.nn.log_softmax(logits))
        return jnp.sum(estimator.losses(tokens_of(TREE, now, advantages), 0.7), axis=1)

    gradients, sampled = jax.jit(jax.jacrev(each))(x.policy), jnp.exp(TREE.completions(x.behaviour))
    mean = jnp.tensordot(sampled, gradients, 1)
    by_hand = sampled @ jnp.sum((gradients - mean) ** 2, axis=(1, 2))
    np.testing.assert_allclose(jax.jit(lambda: moments(estimator, TREE, x, 0.7).variance)(), by_hand, **ROUNDING)


def test_the_likelihood_of_the_references_completions_descends_their_forward_kl():
    """What `rehearsal` adds to a loss, over every completion of π_ref."""
    x = prompt()

    def expected(logits):
        of_each = TREE.along(jax.nn.log_softmax(logits))
        each = jax.vmap(lambda own: supervised_loss(own, SimpleNamespace(mask=jnp.ones(3)))[0])(of_each)
        return jnp.exp(TREE.completions(x.reference)) @ each

    exact_ = exact_gradient("completions", "forward", TREE, x, 1.0, rewarded=0.0)
    np.testing.assert_allclose(jax.jit(jax.grad(expected))(x.policy), exact_, **ROUNDING)


def test_the_completions_gradient_needs_the_sequence_level_or_the_exact_chain_rule():
    @jax.jit
    def errors(x):
        exact = {level: exact_gradient(level, "reverse", TREE, x, 0.1) for level in ("completions", "tokens")}
        got = {e.key: moments(e, TREE, x, 0.1).mean for e in (TOKEN, SEQUENCE, EXACT_TO_GO)}
        norm = jnp.linalg.norm
        return {level: {key: norm(g - y) / norm(y) for key, g in got.items()} for level, y in exact.items()}

    found = errors(prompt())
    assert found["completions"][SEQUENCE.key] < 1e-9
    assert found["completions"][EXACT_TO_GO.key] < 1e-9
    assert found["tokens"][TOKEN.key] < 1e-9
    assert found["completions"][TOKEN.key] > 0.05
    assert found["tokens"][SEQUENCE.key] > 0.05


@pytest.mark.parametrize("refresh", (1, 0))
def test_the_sequence_level_ends_at_the_optimum_and_the_token_level_does_not(refresh):
    x = dataclasses.replace(prompt(), policy=prompt().behaviour)

    def regret(estimator):
        adam = optax.adam(optax.cosine_decay_schedule(0.1, 400))
        end = end_of_descent(estimator, TREE, x, 0.3, adam, refresh=refresh, steps=400)
        return outcome(TREE, x, end, 0.3)["regret_reverse"]

    sequence, token = jax.jit(lambda: (regret(SEQUENCE), regret(TOKEN)))()
    assert 0 <= sequence < 1e-6
    assert token > 3e-3


def test_a_sum_over_the_vocabulary_has_the_mean_of_samples_and_less_noise_but_not_at_the_optimum():
    """At the optimum the regularized return is one number: there `sequence` alone has no noise."""

    @jax.jit
    def found(x, rewarded):
        return {
            key: moments(e, TREE, x, 0.3, rewarded=rewarded) for key, e in ROWS.items() if e.term in ("RKL", "URKL")
        }

    here = found(prompt(), 0.0)
    for name in ("per token", "to-go, exact"):
        whole = here[f"{name}, KL over the vocabulary: RKL"]
        for term in ("RKL", "URKL"):
            np.testing.assert_allclose(here[f"{name}: {term}"].mean, whole.mean, **ROUNDING)
            assert whole.variance < 0.8 * here[f"{name}: {term}"].variance
    baseline = here["per token, baseline of the prefix (vOPD): URKL"]
    np.testing.assert_allclose(baseline.mean, here["per token: URKL"].mean, **ROUNDING)
    assert here["per token, KL over the vocabulary: RKL"].variance < baseline.variance
    optimum = TREE.policy(prompt().optimum(TREE, 0.3, "reverse"))
    there = found(dataclasses.replace(prompt(), policy=optimum, behaviour=optimum), 1.0)
    assert there["sequence, weight W: URKL"].variance < 1e-20
    assert there["to-go, exact, KL over the vocabulary: RKL"].variance > 1e-3


def test_the_optimum_has_no_regret_and_no_gradient():
    def at_optimum(x, divergence):
        optimum = TREE.policy(x.optimum(TREE, 0.3, divergence))
        gradient = exact_gradient("completions", divergence, TREE, dataclasses.replace(x, policy=optimum), 0.3)
        return outcome(TREE, x, optimum, 0.3)[f"regret_{divergence}"], gradient

    for divergence in ("reverse", "forward"):
        for zero in jax.jit(functools.partial(at_optimum, divergence=divergence))(prompt()):
            np.testing.assert_allclose(zero, 0, **ROUNDING)


@pytest.mark.slow  # compiles, or waits, for seconds
def test_an_update_of_many_completions_has_the_error_of_its_bias_and_few_that_of_the_noise():
    """By hand: the mean over all pairs of completions is the mean, and its variance is half of one completion's."""
    s = StalenessSettings(lengths=(2,), drifts=(0.05,), prompts=1)
    found = staleness.run(s)
    tree, prompts = staleness.prompts_at(s, 2)
    x = jax.tree.map(lambda a: a[0, 0], prompts)
    with jax.enable_x64(True):
        gradient = exact_gradient("completions", "reverse", tree, x, s.kl_coef)
        token = moments(ROWS["per token: URKL"], tree, x, s.kl_coef)
    size = np.linalg.norm(gradient)
    expected = np.linalg.norm(token.mean - gradient) / size, np.sqrt(token.variance) / size
    row = found["per token: URKL"]
    np.testing.assert_allclose((row["bias"][0][0], row["noise"][0][0]), expected, rtol=1e-6)
    np.testing.assert_allclose(staleness.error(row, 1e18), row["bias"], rtol=1e-6)
    np.testing.assert_allclose(staleness.error(row, 2), np.hypot(row["bias"], np.array(row["noise"]) / 2**0.5))
    assert found["sequence, weight W: URKL"]["bias"][0][0] < 1e-9 < found["sequence, weight w: URKL"]["bias"][0][0]


def test_a_distance_that_no_policy_has_is_refused():
    with pytest.raises(ValueError, match="ask for less"):
        staleness.prompts_at(StalenessSettings(lengths=(2,), drifts=(5.0,), prompts=1), 2)


def test_the_committed_page_gives_the_verdicts_of_completions_that_the_code_computes():
    lines = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
    ]
    verdicts = {(cells[0], cells[1]): cells[2] for cells in lines if len(cells) == 12}
    few = CompletionSettings(actions=2, length=3, prompts=2, drifts=(0.0, 0.1))
    found = completions.gradient_errors(few, [TOKEN, SEQUENCE])
    for shown, estimator in ((("per token", "URKL"), TOKEN), (("sequence, weight W", "RKL, URKL"), SEQUENCE)):
        level = "tokens" if estimator is TOKEN else "completions"
        assert results.gradient_of(found[estimator.key]) == f"KL(π_θ‖π_ref) of {level}, exactly"
        assert verdicts[shown] == f"KL(π_θ‖π_ref) of {level}, exactly"


@pytest.mark.slow
def test_the_program_leaves_numbers_and_tables(tmp_path, monkeypatch):
    one, sums, stale = program.QUICK
    sums = dataclasses.replace(sums, length=3, end_steps=32, offline_steps=32)
    stale = dataclasses.replace(stale, lengths=(3,))
    monkeypatch.setattr(program, "QUICK", (one, sums, stale))
    for name in ("ESTIMATORS", "ENDS", "VOCABULARY"):  # every row has its own compiled programs
        some = tuple(
            row for row in getattr(completions, name) if row.term in ("URKL", "k₂") or row.name.startswith("to-go")
        )
        for module in (completions, results):
            monkeypatch.setattr(module, name, some)
    titles = []
    for part in ("exact", "vocabulary", "staleness"):
        assert program.main([part, "--quick", f"--out={tmp_path}"]) == 0
        text = (tmp_path / "tables.md").read_text(encoding="utf-8")
        titles += [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert "sequence, weight W: URKL" in kept.read(tmp_path / "exact.json.gz", sums)["errors"]
    assert "sequence, weight W: URKL" in kept.read(tmp_path / "staleness.json.gz", stale)
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")
    assert titles == ["The KL term", "The whole loss", "Completions of several tokens: where does it end?",
                      "The KL summed over the vocabulary",
                      "Staleness and length: bias or noise?",
                      *(f"Least error of an update of {n:,} completions" for n in stale.completions)]  # fmt: skip
