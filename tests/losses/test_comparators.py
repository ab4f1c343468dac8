"""The losses of 2025 and 2026 against their equations, by hand in float64: numpy per token, sums over all sequences."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.losses import LOSSES, aggregate, policy_loss, token_loss
from rpg_jax.losses.tokens import checked

pytestmark = pytest.mark.usefixtures("x64")
# float64; values of order one.
EXACT = dict(rtol=1e-11, atol=1e-13)


@pytest.fixture
def tokens():
    """Ragged float64 completions, off-policy; a probability is above 0.9 here and there."""
    rng = np.random.default_rng(3)
    old = np.log(rng.beta(1, 0.7, (6, 5)))
    policy = np.log(np.clip(np.exp(old + rng.normal(0, 0.5, old.shape)), 1e-4, 0.995))
    mask = np.arange(5) < np.array([5, 4, 3, 5, 2, 1])[:, None]
    rewards = np.array([1.0, -0.7, 0.4, -1.5, 0.0, -0.2])
    return dict(logprobs=policy, behaviour_logprobs=old, advantages=rewards, mask=mask)


def gradient(name, tokens, **hyperparameters):
    """∂(loss sum)/∂log π_θ, f64[B, T]; of the loss function alone, whose metrics cost most of the time."""
    constants = {x: tokens.get(x) for x in ("behaviour_logprobs", "ref_logprobs", "sampler_logprobs", "completion_ids")}
    kind = hyperparameters.pop("aggregate", LOSSES[name].aggregate)

    def loss(logprobs):
        row = checked(logprobs=logprobs, advantages=tokens["advantages"], mask=tokens["mask"], **constants)
        return aggregate(token_loss(name, row, **hyperparameters).values, row, kind)[0]

    return np.asarray(jax.grad(loss)(jnp.asarray(tokens["logprobs"])))


def numbers(tokens):
    p, q = np.exp(tokens["logprobs"]), np.exp(tokens["behaviour_logprobs"])
    return p, q, p / q, np.broadcast_to(tokens["advantages"][:, None], p.shape)


@pytest.mark.parametrize("drift", [1.0, 0.1])
def test_ctpo_clips_the_ratio_of_the_prefix_in_a_window_that_grows(tokens, drift):
    tokens["logprobs"] = tokens["behaviour_logprobs"] + drift * (tokens["logprobs"] - tokens["behaviour_logprobs"])
    *_, w, a = numbers(tokens)
    prefix, root = np.cumprod(w, axis=1), np.sqrt(np.arange(1, 6))
    low, high = np.exp(-0.025 * root), np.exp(0.05 * root)
    kept = np.where(a > 0, prefix <= high, (prefix >= low) & (prefix <= high)) * tokens["mask"]
    assert 0 < kept.sum() < tokens["mask"].sum()
    np.testing.assert_allclose(gradient("ctpo", tokens, aggregate="token_mean"), -prefix * a * kept, **EXACT)
    packed = {name: np.concatenate([tokens[name][:3], tokens[name][3:]], axis=1) for name in ("logprobs", "mask")}
    packed |= {"behaviour_logprobs": np.concatenate(np.split(tokens["behaviour_logprobs"], 2), axis=1)}
    packed["advantages"] = np.concatenate(np.split(a, 2), axis=1)
    packed["completion_ids"] = np.where(packed["mask"], np.repeat([[1, 2]], 5, axis=1).repeat(3, axis=0), 0)
    expected = np.concatenate(np.split(-prefix * a * kept, 2), axis=1)
    np.testing.assert_allclose(gradient("ctpo", packed, aggregate="token_mean"), expected, **EXACT)


def test_ctpo_has_the_gradient_of_its_public_code(tokens):
    """horizon-llm/CTPO at acc4021, `cum-token-cumprod-la` with its defaults, called on these tokens in torch 2.11."""
    tokens["logprobs"] = tokens["behaviour_logprobs"] + 0.1 * (tokens["logprobs"] - tokens["behaviour_logprobs"])
    expected = np.zeros((6, 5))
    expected[0, 3:] = -1.097962128575, -1.114178693801
    expected[1, :4] = 0.691534872983, 0.720376440769, 0.69232226137, 0.69698475638
    expected[2, :2], expected[5, 0] = (-0.411016153476, -0.414245743144), 0.200433427975
    np.testing.assert_allclose(gradient("ctpo", tokens, aggregate="token_mean"), expected, rtol=1e-10, atol=1e-12)
    assert policy_loss("ctpo", **tokens, aggregate="token_mean")[0] == pytest.approx(3.5056437749036764, rel=1e-10)


@pytest.mark.parametrize("region", [0.05, 0.15, np.inf])
def test_drpo_fades_until_a_probability_has_moved_by_its_region_and_pulls_it_back_beyond(tokens, region):
    p, q, w, a = numbers(tokens)
    weight = a * (1 - np.sign(a) * (p - q) / region)
    found = gradient("drpo", tokens, aggregate="token_mean", trust_region=region)
    np.testing.assert_allclose(found, -w * weight * tokens["mask"], **EXACT)
    back = (weight * a < 0) & (tokens["mask"] > 0)
    np.testing.assert_array_equal(back, (np.sign(a) * (p - q) > region) & (a != 0) & (tokens["mask"] > 0))
    assert back.any() == np.isfinite(region)


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.15), ("kl", 0.05)])
def test_dppo_drops_the_tokens_whose_probability_has_moved_far_as_the_advantage_asks(tokens, divergence, threshold):
    p, q, w, a = numbers(tokens)
    moved = {"tv": np.abs(p - q), "kl": q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))}[divergence]
    dropped = (moved > threshold) & (((a > 0) & (w > 1)) | ((a < 0) & (w < 1)))
    expected = np.where(dropped, 0, -w * a) * tokens["mask"]
    options = dict(aggregate="token_mean", mask_divergence=divergence, mask_threshold=threshold)
    np.testing.assert_allclose(gradient("dppo", tokens, **options), expected, **EXACT)
    total, _, metrics = policy_loss("dppo", **tokens, **options)
    np.testing.assert_allclose(total, expected.sum(), **EXACT)  # the value of −M w A is its own gradient
    assert metrics["clip_fraction"][0] == (dropped & tokens["mask"]).sum() > 0
    assert ((moved > threshold) & ~dropped & tokens["mask"]).any()


def test_dppo_and_ppo_disagree_on_rare_and_on_common_tokens():
    """A rare token may grow a hundredfold; a common one may not lose a fifth, which is within PPO's range."""
    old, new = np.log([[1e-5, 0.99]]), np.log([[1e-3, 0.8]])
    tokens = dict(logprobs=new, behaviour_logprobs=old, advantages=np.array([[1.0, -1.0]]), mask=np.ones((1, 2)))
    trains = {name: (gradient(name, tokens) != 0).tolist() for name in ("ppo", "dppo")}
    assert trains == {"ppo": [[False, True]], "dppo": [[True, False]]}


def test_the_binary_kl_is_the_kl_over_a_vocabulary_of_two_and_no_more_over_a_larger_one():
    for p, q, binary in (([0.2, 0.8], [0.6, 0.4], True), ([0.1, 0.3, 0.6], [0.5, 0.2, 0.3], False)):
        p, q = np.array([p]), np.array([q])
        exact = np.sum(q * np.log(q / p))
        moved = np.where(p > q, 1.0, -1.0)  # as the advantage asks
        batch = dict(logprobs=np.log(p), behaviour_logprobs=np.log(q), advantages=moved, mask=np.ones_like(p))
        for threshold, all_train in ((exact * (1 + 1e-9), True), (exact * (1 - 1e-9), not binary)):
            options = dict(mask_divergence="kl", mask_threshold=threshold)
            assert (gradient("dppo", batch, **options) != 0).all() == all_train


def test_dppo_masks_a_token_that_becomes_certain_or_was_certain_and_trains_one_that_stays_so():
    """Also where rounding has put a probability just above 1."""
    half = np.log(0.5)
    cases = [(x, y, a) for x in (0.0, 1e-17, half) for y in (0.0, 1e-17, half) for a in (1.0, -1.0)]
    policy, old, a = np.array(cases).T[:, None]
    tokens = dict(logprobs=policy, behaviour_logprobs=old, advantages=a, mask=np.ones_like(a))
    got = gradient("dppo", tokens, mask_divergence="kl")
    moved_as_asked = (policy - old) * a > 0.1
    np.testing.assert_allclose(got, np.where(moved_as_asked, 0, -np.exp(policy - old) * a), rtol=1e-12)


def test_sapo_has_the_gradient_of_its_gate(tokens):
    p, q, w, a = numbers(tokens)
    tau = np.where(a > 0, 1.3, 2.1)
    gate = 1 / (1 + np.exp(-tau * (w - 1)))
    lengths = tokens["mask"].sum(1, keepdims=True)
    options = dict(tau_positive=1.3, tau_negative=2.1)
    expected = -4 * gate * (1 - gate) * w * a * tokens["mask"] / lengths
    np.testing.assert_allclose(gradient("sapo", tokens, **options), expected, **EXACT)
    total, weight, _ = policy_loss("sapo", **tokens, **options)
    np.testing.assert_allclose(total, np.sum(-4 / tau * gate * a * tokens["mask"] / lengths), **EXACT)
    assert weight == 6


def test_sapo_has_the_policy_gradient_on_policy_and_none_far_off_policy():
    log_w, a = np.array(list(itertools.product([0.0, 30.0, 100.0, -100.0, 1000.0], [1.0, -1.0]))).T[:, None]
    tokens = dict(logprobs=0 * log_w, behaviour_logprobs=-log_w, advantages=a, mask=np.ones_like(a))
    got = gradient("sapo", tokens, aggregate="token_mean")
    np.testing.assert_allclose(got, -a * (log_w == 0), rtol=0, atol=1e-12)


def test_gmpo_is_the_geometric_mean_of_ratios_that_are_clipped_one_by_one(tokens):
    _, _, w, _ = numbers(tokens)
    mask, rewards = tokens["mask"], tokens["advantages"]
    low, high = np.exp(-0.2), np.exp(0.3)
    total, expected = 0.0, np.zeros_like(w)
    for i, a in enumerate(rewards):
        mine = w[i, mask[i]]
        bounded = np.minimum(mine, high) if a > 0 else np.maximum(mine, low)
        mean = np.prod(bounded) ** (1 / len(mine))
        total -= a * mean
        expected[i, mask[i]] = np.where(bounded == mine, -a * mean / len(mine), 0)  # ∂w̄/∂log π_θ = w̄ or 0
    options = dict(clip_low=1 - low, clip_high=high - 1)
    np.testing.assert_allclose(gradient("gmpo", tokens, **options), expected, **EXACT)
    loss_sum, weight, metrics = policy_loss("gmpo", **tokens, **options)
    np.testing.assert_allclose(loss_sum, total, **EXACT)
    assert weight == 6 and all(metrics[f"clip_{end}_fraction"][0] > 0 for end in ("low", "high"))
    trained = rewards != 0
    assert ((expected == 0) & mask)[trained].any() and (np.abs(expected).sum(1) > 0)[trained].all()


def sequences(seed, *, size=3, length=2):
    """Logits of θ, π_old, π_ref per prefix, and every sequence: its tokens and the row of each prefix."""
    rng = np.random.default_rng(seed)
    every = np.array(list(itertools.product(range(size), repeat=length)))
    prefixes = [np.sum(every[:, :t] * size ** np.arange(t), axis=1) + size**t - 1 for t in range(length)]
    logits = rng.normal(0, 0.8, (3, sum(size**t for t in range(length)) + size**length, size))
    return jnp.asarray(logits), np.stack(prefixes, 1), every, jnp.asarray(rng.normal(0, 1, len(every)))


def of_sequences(logits, prefixes, every):
    """log π of each token of each sequence, f64[N, T]."""
    return jax.nn.log_softmax(logits)[prefixes, every]


@pytest.mark.parametrize(("correction", "exact"), [("sequence", True), ("truncate", False), ("mask", False)])
def test_ctpo_on_stale_completions_needs_a_correction_of_completions(correction, exact):
    (theta, old, stale), prefixes, every, rewards = sequences(0)

    def gradient(sampled, **options):
        """The expectation over the completions of `sampled`, without a clip and without bounds."""
        log_old, log_sampled = (of_sequences(x, prefixes, every) for x in (old, sampled))
        widths = dict.fromkeys(("width_low", "width_high", "width_dual"), np.inf)

        def one(log_pi, log_old, log_sampled, a):
            row = dict(logprobs=log_pi, behaviour_logprobs=log_old, sampler_logprobs=log_sampled)
            row = {name: x[None] for name, x in (row | {"mask": jnp.ones_like(log_pi)}).items()}
            return policy_loss("ctpo", **row, advantages=a[None], **widths, **options)[0]

        def expected(theta):
            log_pi = of_sequences(theta, prefixes, every)
            return jnp.exp(log_sampled.sum(1)) @ jax.vmap(one)(log_pi, log_old, log_sampled, rewards)

        return jax.grad(expected)(theta)

    unbounded = {"sampler_high": np.inf} | ({} if correction == "truncate" else {"sampler_low": 0.0})
    fresh, corrected = gradient(old), gradient(stale, sampler_correction=correction, **unbounded)
    distance = float(jnp.linalg.norm(corrected - fresh) / jnp.linalg.norm(fresh))
    assert distance < 1e-12 if exact else distance > 0.1


@pytest.mark.parametrize("penalty_level", ["completion", "token"])
def test_opmd_descends_the_squared_error_over_all_completions_of_the_behaviour_policy(penalty_level):
    (theta, old, ref), prefixes, every, rewards = sequences(0)
    log_old, log_ref = of_sequences(old, prefixes, every), of_sequences(ref, prefixes, every)
    probabilities = jnp.exp(log_old.sum(1))
    advantages = rewards - probabilities @ rewards

    def exact(theta):
        """E_old[−A log π_θ(x) + (β/2)(log r_x)²], or the square of each token."""
        log_pi = of_sequences(theta, prefixes, every)
        log_r = log_pi - log_ref
        squares = jnp.sum(log_r, 1) ** 2 if penalty_level == "completion" else jnp.sum(log_r**2, 1)
        return probabilities @ (-advantages * log_pi.sum(1) + 0.15 * squares)

    def library(theta):
        def one(log_pi, log_old, log_ref, a):
            row = dict(logprobs=log_pi, behaviour_logprobs=log_old, ref_logprobs=log_ref, mask=jnp.ones_like(log_pi))
            row = {name: x[None] for name, x in row.items()}
            options = dict(kl_coef=0.3, penalty_level=penalty_level)
            return policy_loss("opmd", **row, advantages=a[None], **options)[0]

        return probabilities @ jax.vmap(one)(of_sequences(theta, prefixes, every), log_old, log_ref, advantages)

    (value, got), (expected_value, expected) = (jax.jit(jax.value_and_grad(f))(theta) for f in (library, exact))
    np.testing.assert_allclose(value, expected_value, **EXACT)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
    assert np.abs(expected).max() > 0.01


def test_opmd_ends_at_a_mixture_of_kl_and_chi_square_and_not_at_the_optimum_of_the_kl():
    """Its fixed point solves β log w + λw = A; π* ∝ π_old exp(A/β) is not one."""
    rng = np.random.default_rng(2)
    q, beta = rng.dirichlet(np.ones(4)), 0.5
    a = np.array([1.0, -1.0, 1.0, -1.0])
    a = a - q @ a

    def solve(lam):
        low, high = np.full(4, -30.0), np.full(4, 30.0)
        for _ in range(200):
            middle = (low + high) / 2
            above = beta * middle + lam * np.exp(middle) > a
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.exp(low)

    least, most = 0.0, 10.0
    for _ in range(200):
        lam = (least + most) / 2
        least, most = (lam, most) if q @ solve(lam) > 1 else (least, lam)
    end = q * solve(lam)
    optimum = q * np.exp(a / beta) / (q @ np.exp(a / beta))

    def pull(policy):
        batch = dict(logprobs=np.log(policy)[:, None], behaviour_logprobs=np.log(q)[:, None], advantages=a)
        g = q * gradient("opmd", batch | {"mask": np.ones((4, 1))}, kl_coef=beta)[:, 0]
        return np.abs(g - g.sum() * policy).max()  # in the logits

    assert pull(end) < 1e-12 < 0.01 < pull(optimum)
