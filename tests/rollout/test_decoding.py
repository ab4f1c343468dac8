from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.rollout.decoding import completion_keys, sample, token_keys

draw = jax.jit(sample)


def keys(n: int, seed: int = 0) -> jax.Array:
    zeros = jnp.zeros(n, jnp.uint32)
    return token_keys(completion_keys(zeros + seed, zeros, zeros, jnp.arange(n, dtype=jnp.uint32)), zeros)


def parameters(n: int, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    f32 = [jnp.full(n, x, jnp.float32) for x in (temperature, top_p, min_p)]
    return f32[0], f32[1], jnp.full(n, top_k, jnp.int32), f32[2]


def random_logits(shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale


def reference_distribution(logits, temperature, top_p, top_k, min_p=0.0):
    """f64 probabilities by sorting: top-k, then the smallest head of the sorted list with mass >= top_p."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    keep = np.zeros(len(scaled), bool)
    keep[order[: top_k or len(scaled)]] = True
    p = np.where(keep, np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= top_p]] = False
        p = np.where(keep, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("vocabulary", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 9)), 50])
def test_frequencies_are_the_softmax(vocabulary):
    n, logits = 40_000, random_logits(vocabulary)
    tokens, _ = draw(jnp.tile(logits, (n, 1)), keys(n), *parameters(n, temperature=1.3))
    expected = reference_distribution(logits, 1.3, 1.0, 0)
    frequencies = np.bincount(tokens, minlength=vocabulary) / n
    # Five standard deviations of a binomial frequency.
    np.testing.assert_array_less(np.abs(frequencies - expected), 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        *((1, 1, 0, 0), (0.6, 0.9, 0, 0), (1.4, 1, 7, 0), (1, 0.5, 20, 0), (1, 0.999, 0, 0), (1, 0.1, 1, 0)),
        *((1, 1, 0, 0.05), (1.4, 0.9, 9, 0.3), (1, 1, 0, 1)),
    ],
)
def test_logprobs_are_those_of_the_renormalised_distribution(temperature, top_p, top_k, min_p):
    n = 300
    logits = random_logits((n, 97))
    tokens, logprobs = draw(jnp.asarray(logits), keys(n), *parameters(n, temperature, top_p, top_k, min_p))
    expected = np.stack([reference_distribution(row, temperature, top_p, top_k, min_p) for row in logits])
    chosen = expected[np.arange(n), tokens]
    assert (chosen > 0).all()
    # f32 logits divided by the temperature and one f32 log-sum-exp.
    np.testing.assert_allclose(logprobs, np.log(chosen), atol=3e-6)


def test_every_kept_token_and_no_other_is_drawn():
    n, logits = 20_000, random_logits(12, scale=1.0)
    expected = reference_distribution(logits, 1.0, 0.8, 8)
    tokens, _ = draw(jnp.tile(logits, (n, 1)), keys(n), *parameters(n, 1.0, 0.8, 8))
    assert set(np.unique(tokens)) == set(np.flatnonzero(expected))


@pytest.mark.parametrize("top_k", [97, 98, 2**31 - 1])
def test_a_top_k_of_the_whole_vocabulary_or_more_cuts_nothing(top_k):
    logits = jnp.asarray(random_logits((20, 97)))
    for got, expected in zip(
        draw(logits, keys(20), *parameters(20, top_k=top_k)), draw(logits, keys(20), *parameters(20)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-40, 1e-30])
def test_however_small_top_p_is_the_most_probable_token_is_kept(top_p):
    """`Sampling` refuses 0, but 1e-50 is 0 in f32, and other numbers below 1e-38 may be."""
    logits = random_logits((20, 97))
    tokens, logprobs = draw(jnp.asarray(logits), keys(20), *parameters(20, top_p=top_p))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_array_equal(logprobs, 0)


def test_temperature_zero_takes_the_first_of_the_largest_with_log_probability_zero():
    logits = random_logits((5, 70))
    logits[:, 33] = logits[:, 66] = logits.max() + 1
    tokens, logprobs = draw(jnp.asarray(logits), keys(5), *parameters(5, temperature=0.0, top_p=0.3))
    assert tokens.tolist() == [33] * 5
    assert logprobs.tolist() == [0.0] * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_show_in_the_log_probability(temperature):
    logits = random_logits((3, 70))
    logits[0], logits[1, 40] = np.nan, np.inf
    _, logprobs = draw(jnp.asarray(logits), keys(3), *parameters(3, temperature=temperature))
    assert np.isnan(logprobs).tolist() == [True, True, False]


def test_slots_with_different_parameters_do_not_touch_each_other():
    n, logits = 6, jnp.asarray(random_logits((6, 40)))
    mixed = (
        jnp.array([0, 1, 0.5, 1, 2, 1], jnp.float32),
        jnp.array([1, 1, 0.7, 0.4, 1, 0.9], jnp.float32),
        jnp.array([0, 0, 0, 3, 5, 0]),
        jnp.array([0, 0.2, 0, 0, 0.1, 0], jnp.float32),
    )
    tokens, logprobs = draw(logits, keys(n), *mixed)
    for s in range(n):
        alone = draw(logits[s : s + 1], keys(n)[s : s + 1], *(x[s : s + 1] for x in mixed))
        assert int(alone[0][0]) == int(tokens[s])
        np.testing.assert_allclose(alone[1][0], logprobs[s], atol=1e-6)


def test_a_key_is_a_function_of_every_counter_and_of_nothing_else():
    counters = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]], np.uint32)
    made = np.asarray(completion_keys(*counters.T))
    assert len({tuple(k) for k in made}) == len(counters)
    shuffled = np.asarray(completion_keys(*counters[::-1].T))
    np.testing.assert_array_equal(shuffled[::-1], made)
    positions = jax.random.key_data(token_keys(jnp.tile(made[0], (3, 1)), jnp.arange(3)))
    assert len({tuple(k) for k in np.asarray(positions)}) == 3


def test_the_vocabulary_is_never_sorted_and_never_searched_unless_some_slot_cuts():
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((4, 4096)), keys(4), *parameters(4)).jaxpr
    everywhere = primitives(jaxpr)
    assert "cond" in everywhere and everywhere & {"while", "scan"}
    assert "sort" not in everywhere
    assert not primitives(jaxpr, skip="cond") & {"while", "scan"}


def primitives(jaxpr, skip: str | None = None) -> set[str]:
    """Names of all primitives, except inside the equations of a primitive `skip`."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name != skip:
            parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
            found |= set().union(*(primitives(p.jaxpr, skip) for p in parameters if hasattr(p, "jaxpr")))
    return found
