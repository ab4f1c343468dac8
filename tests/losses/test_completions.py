"""RPG for completions against −∇J of the completions' J, with every completion enumerated in float64.

A tabular policy has a softmax at every prefix. Action 0 ends a completion, so completions have different lengths. The
oracle is the divergence of the two distributions over completions, differentiated; it shares no code with the losses.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import tiny
from rpg_jax import losses
from rpg_jax.losses import completions, token_loss
from rpg_jax.losses.divergences import DIVERGENCES, gradient_weight
from rpg_jax.losses.tokens import checked
from rpg_jax.runs.resolve import resolve
from tests.losses.oracles import OF_COMPLETIONS, ORACLES

pytestmark = pytest.mark.usefixtures("x64")
KL_COEF, ACTIONS = 0.7, 3
# Sums of fewer than a hundred float64 terms of order one.
EXACT = dict(rtol=0, atol=1e-12)
OFFLINE = dict(level="sequence", clip="none", weight="product", kl_coef=KL_COEF)


@functools.cache
def tree(length):
    """Every completion of at most `length` actions: actions, prefix number and mask, [N, length] each."""
    sequences = sorted({x[: x.index(0) + 1] if 0 in x else x for x in itertools.product(range(ACTIONS), repeat=length)})
    prefixes = {x[:t] for x in sequences for t in range(len(x))}
    number = {x: i for i, x in enumerate(sorted(prefixes))}
    actions, nodes, mask = np.zeros((3, len(sequences), length), int)
    for i, x in enumerate(sequences):
        actions[i, : len(x)], mask[i, : len(x)] = x, 1
        nodes[i, : len(x)] = [number[x[:t]] for t in range(len(x))]
    return actions, nodes, mask, len(prefixes)


def logprobs(theta, length):
    """log π of every action of every completion, f64[N, length]; 0 where there is none."""
    actions, nodes, mask, _ = tree(length)
    return jnp.where(mask, jax.nn.log_softmax(theta)[nodes, actions], 0)


@functools.cache
def case(length, policy="off", reference="other"):
    """θ, and π_old and π_ref as log-probs f64[N, length], rewards f64[N]."""
    rng = np.random.default_rng(length)
    _, _, mask, prefixes = tree(length)
    theta, old, ref = (jnp.asarray(rng.normal(0, 0.7, (prefixes, ACTIONS))) for _ in range(3))
    old = old if policy == "off" else theta
    ref = old if reference == "behaviour" else ref
    return theta, logprobs(old, length), logprobs(ref, length), jnp.asarray(rng.normal(0, 1, len(mask)))


def tokens_of(theta, case_, length):
    _, old, ref, rewards = case_
    columns = {"behaviour_logprobs": old, "ref_logprobs": ref, "advantages": rewards, "mask": tree(length)[2]}
    return checked(logprobs=logprobs(theta, length), sampler_logprobs=None, completion_ids=None, **columns)


def losses_of(theta, case_, length, **hyperparameters):
    """The loss of every completion, f64[N]: the sum over its tokens."""
    tokens = tokens_of(theta, case_, length)
    return jnp.sum(token_loss("rpg", tokens, **hyperparameters).values * tree(length)[2], axis=1)


@functools.cache
def gradients_of(length, **hyperparameters):
    """(θ, π_old, π_ref, advantages) -> ∇ of every completion's loss, and of its mean under π_old: compiled once."""

    @jax.jit
    def both(theta, old, ref, advantages):
        each = jax.jacrev(lambda x: losses_of(x, (x, old, ref, advantages), length, **hyperparameters))(theta)
        return each, jnp.tensordot(jnp.exp(jnp.sum(old, axis=1)), each, 1)

    return both


def each_gradient(case_, length, **hyperparameters):
    return gradients_of(length, **hyperparameters)(*case_)[0]


def expected_gradient(case_, length, **hyperparameters):
    """∇ of the expected loss over completions from π_old."""
    return gradients_of(length, **hyperparameters)(*case_)[1]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def exact_gradient(divergence, case_, length, logprobs=logprobs):
    """−∇J of the completions' objective."""
    theta, _, ref, rewards = case_
    q = jnp.exp(jnp.sum(ref, axis=1))

    def objective(theta):
        p = jnp.exp(jnp.sum(logprobs(theta, length), axis=1))
        return p @ rewards - KL_COEF * jnp.sum(ORACLES[divergence].objective(p, q))

    return -jax.grad(objective)(theta)


CASES = tuple(itertools.product(("on", "off"), ("behaviour", "other")))


@pytest.mark.parametrize(
    "divergence", [pytest.param(d, marks=() if d in ("urkl", "fkl") else pytest.mark.slow) for d in OF_COMPLETIONS]
)
def test_the_product_weight_is_exact_for_completions(divergence, length=4):
    chain = dict(OFFLINE, level="to_go", trace_decay=1.0, trace_cap=float("inf"))
    for policy, reference in CASES:
        case_ = case(length, policy, reference)
        exact = exact_gradient(divergence, case_, length)
        for options in (OFFLINE, OFFLINE | {"estimator": "differentiable"}, chain):
            got = expected_gradient(case_, length, divergence=divergence, **options)
            np.testing.assert_allclose(got, exact, **EXACT, err_msg=f"{policy} {reference} {options}")


def with_environment(theta, length):
    """`logprobs` of conversations: every second token is drawn by an environment, which may end one too."""
    _, nodes, mask, _ = tree(length)
    answers = np.unique(nodes[:, 1::2][mask[:, 1::2] == 1])
    table = np.random.default_rng(1).normal(0, 1, (len(answers), ACTIONS))
    return logprobs(theta.at[answers].set(table), length)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", OF_COMPLETIONS)
def test_the_product_weight_is_exact_for_conversations(divergence, length=5):
    theta, old, ref, rewards = (jnp.asarray(np.random.default_rng(i).normal(0, 0.7, (31, ACTIONS))) for i in range(4))
    old, ref, rewards = with_environment(old, length), with_environment(ref, length), rewards.ravel()[: len(tree(5)[0])]
    mask = tree(length)[2] * (np.arange(length) % 2 == 0)
    exact = exact_gradient(divergence, (theta, old, ref, rewards), length, with_environment)

    @jax.jit
    def expected(theta):
        """The mean of the gradient over conversations of π_old, for both levels."""
        unknown = jnp.where(mask, 0, jnp.nan)  # nobody knows how likely an environment's tokens are
        columns = {"behaviour_logprobs": old + unknown, "ref_logprobs": ref + unknown, "advantages": rewards}
        columns |= {"mask": mask, "sampler_logprobs": None, "completion_ids": None}

        def loss(theta, options):
            tokens = checked(logprobs=with_environment(theta, length) + unknown, **columns)
            values = token_loss("rpg", tokens, divergence=divergence, **options).values
            return jnp.exp(jnp.sum(old, axis=1)) @ jnp.sum(values * mask, axis=1)

        chain = dict(OFFLINE, level="to_go", trace_decay=1.0, trace_cap=float("inf"))
        return [jax.grad(loss)(theta, options) for options in (OFFLINE, chain)]

    for got in expected(theta):
        np.testing.assert_allclose(got, exact, **EXACT)
    assert np.max(np.abs(exact)) > 0.01


@pytest.mark.slow
def test_the_advantages_of_turns_have_the_expected_gradient_of_all_rewards(length=5):
    """Every pair of conversations is a group; a turn is paid by what has been said so far."""
    rng, (actions, nodes, mask, prefixes) = np.random.default_rng(7), tree(length)
    theta, paid = jnp.asarray(rng.normal(0, 0.7, (prefixes, ACTIONS))), rng.normal(0, 1, (prefixes, ACTIONS))
    mask = mask * (np.arange(length) % 2 == 0)
    rewards = paid[nodes, actions] * mask
    returns = [own[row == 1] for own, row in zip(np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1], mask, strict=True)]
    i, j = (x.ravel() for x in np.indices((len(mask), len(mask))))
    members = np.stack([i, j], axis=1).ravel()
    found = losses.turn_advantages("leave_one_out", [[returns[a], returns[b]] for a, b in zip(i, j, strict=True)])
    advantages = np.zeros((len(members), length))
    advantages[mask[members] == 1] = np.concatenate([own for group in found for own in group])
    probabilities = jnp.exp(jnp.sum(with_environment(theta, length), axis=1))

    def loss(x):
        new = with_environment(x, length)
        tokens = checked(
            logprobs=new[members],
            behaviour_logprobs=with_environment(theta, length)[members],
            advantages=advantages,
            mask=mask[members],
            ref_logprobs=None,
            sampler_logprobs=None,
            completion_ids=None,
        )
        values = token_loss("rpg", tokens, clip="none", kl_coef=0.0).values
        return 0.5 * jnp.sum((probabilities[i] * probabilities[j]).repeat(2)[:, None] * values)

    def objective(x):
        return -jnp.exp(jnp.sum(with_environment(x, length), axis=1)) @ rewards.sum(axis=1)

    exact = jax.grad(objective)(theta)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(theta), exact, rtol=0, atol=1e-7)  # advantages are f32
    assert np.max(np.abs(exact)) > 0.1


@pytest.mark.parametrize("divergence", ("rkl", "urkl"))
def test_both_estimators_of_a_reverse_divergence_agree_for_every_completion(divergence):
    case_, estimators = case(2), ("differentiable", "reinforce")
    gradients = (each_gradient(case_, 2, divergence=divergence, estimator=e, **OFFLINE) for e in estimators)
    np.testing.assert_allclose(*gradients, **EXACT)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if DIVERGENCES[name].coefficients])
def test_the_coefficients_are_those_of_the_gradient_weight(divergence):
    log_w, log_rho = jnp.asarray(np.random.default_rng(0).normal(0, 1, (2, 9)))
    a, b, c = DIVERGENCES[divergence].of_completions()
    w, rho = jnp.exp(log_w), jnp.exp(log_rho)
    weight = gradient_weight(DIVERGENCES[divergence], log_w, log_rho)
    np.testing.assert_allclose(w * (a * (log_w - log_rho) + b) - c * rho, weight, **EXACT)


@pytest.mark.parametrize("divergence", ("rkl", "urkl"))
def test_to_go_is_exact_on_policy_and_without_a_trace_it_is_the_token_level(divergence):
    length = 4
    options = dict(divergence=divergence, clip="none", kl_coef=KL_COEF)
    case_ = case(length, "on")
    to_go = expected_gradient(case_, length, level="to_go", trace_decay=1.0, **options)
    np.testing.assert_allclose(to_go, exact_gradient(divergence, case_, length), **EXACT)
    case_ = case(length, "off")
    token = expected_gradient(case_, length, **options)
    np.testing.assert_allclose(
        expected_gradient(case_, length, level="to_go", trace_decay=0.0, **options), token, **EXACT
    )
    assert np.max(np.abs(token - exact_gradient(divergence, case_, length))) > 0.05


@pytest.mark.parametrize("divergence", ("rkl", pytest.param("ufkl", marks=pytest.mark.slow)))
@pytest.mark.parametrize(
    "clip",
    [pytest.param(c, marks=() if c == "dual" else pytest.mark.slow) for c in ("none", "dual", "truncate", "reward")],
)
def test_a_completion_of_one_token_is_a_token(divergence, clip):
    options = dict(divergence=divergence, clip=clip, kl_coef=KL_COEF)
    token = each_gradient(case(1), 1, **options)
    for level, weight in itertools.product(("sequence", "to_go"), ("token", "product" if clip == "none" else "capped")):
        cap = {"weight_cap": 1e9} if weight == "capped" else {}  # none: W under a clip
        got = each_gradient(case(1), 1, level=level, weight=weight, **cap, **options)
        np.testing.assert_allclose(got, token, **EXACT, err_msg=f"{level} {weight}")


def test_the_regularized_return_is_that_of_the_present_policy_and_kl_in_the_reward_that_of_the_behaviour_policy():
    length = 2
    theta, old, ref, rewards = case_ = case(length)
    options = dict(divergence="urkl", level="sequence", clip="none", kl_coef=KL_COEF)
    probabilities = jnp.exp(jnp.sum(old, axis=1))
    for kl_ratio, log_policy in (("present", logprobs(theta, length)), ("behaviour", old)):
        returns = rewards - KL_COEF * jnp.sum(log_policy - ref, axis=1)
        w = jnp.exp(logprobs(theta, length) - old)
        by_hand = jax.grad(
            lambda x: -jnp.sum((probabilities * returns)[:, None] * w * logprobs(x, length))  # noqa: B023
        )(theta)
        got = expected_gradient(case_, length, kl_ratio=kl_ratio, **options)
        np.testing.assert_allclose(got, by_hand, **EXACT)


def test_weight_one_is_the_gradient_of_the_log_variance_loss():
    length = 3
    theta, old, ref, rewards = case(length)
    probabilities = jnp.exp(jnp.sum(old, axis=1))

    def returns(x):
        return rewards - KL_COEF * jnp.sum(logprobs(x, length) - ref, axis=1)

    def half_variance(x):
        return 0.5 * (probabilities @ jnp.square(returns(x)) - jnp.square(probabilities @ returns(x)))

    centred = rewards - probabilities @ returns(theta)
    options = dict(divergence="urkl", level="sequence", weight="none", clip="none", kl_coef=KL_COEF)
    got = expected_gradient((theta, old, ref, centred), length, **options)
    np.testing.assert_allclose(KL_COEF * got, jax.grad(half_variance)(theta), **EXACT)


def test_no_completion_has_a_gradient_at_the_optimum():
    """π* ∝ π_ref exp(R/β), factored into softmaxes at every prefix by summing over what follows."""
    length = 3
    _, old, ref, rewards = case(length)
    actions, nodes, mask, prefixes = tree(length)
    log_mass = jnp.sum(ref, axis=1) + rewards / KL_COEF
    theta = np.zeros((prefixes, ACTIONS))
    for node, action in itertools.product(range(prefixes), range(ACTIONS)):
        below = np.any((nodes == node) & (actions == action) & (mask == 1), axis=1)
        theta[node, action] = jax.nn.logsumexp(log_mass[below])
    advantages = rewards - KL_COEF * jax.nn.logsumexp(log_mass)
    case_ = (jnp.asarray(theta), old, ref, advantages)
    for weight, clip in (("product", "none"), ("token", "dual"), ("none", "none")):
        options = dict(level="sequence", weight=weight, clip=clip, kl_coef=KL_COEF, divergence="urkl")
        np.testing.assert_allclose(each_gradient(case_, length, **options), 0, **EXACT)


@pytest.mark.parametrize("divergence", ("rkl", "js"))
def test_the_leave_one_out_baseline_is_unbiased_over_groups(divergence):
    """Every pair of completions, each pair one group of a batch: 49 groups of two."""
    length = 2
    theta, old, ref, rewards = case_ = case(length)
    count = len(rewards)
    i, j = (x.ravel() for x in np.indices((count, count)))
    members = np.stack([i, j], axis=1).ravel()
    probabilities = jnp.exp(jnp.sum(old, axis=1))
    group_probabilities = (probabilities[i] * probabilities[j]).repeat(2)
    advantages = losses.advantages("leave_one_out", rewards[members].reshape(-1, 2)).ravel()

    def loss(x):
        tokens = checked(
            logprobs=logprobs(x, length)[members],
            behaviour_logprobs=old[members],
            ref_logprobs=ref[members],
            advantages=advantages,
            mask=tree(length)[2][members],
            sampler_logprobs=None,
            completion_ids=None,
            group_ids=np.arange(count**2).repeat(2),
        )
        values = token_loss("rpg", tokens, divergence=divergence, **OFFLINE).values
        return 0.5 * jnp.sum(group_probabilities[:, None] * values)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(theta), exact_gradient(divergence, case_, length), **EXACT)


# What promises −∇J: with W off-policy too, with the token's weight and the default clip on-policy.
PROMISED = {
    "sequence, W": (dict(level="sequence", weight="product", clip="none"), ("on", "off")),
    "sequence, w": (dict(level="sequence"), ("on",)),
    "to-go, W": (dict(level="to_go", weight="product", clip="none", trace_cap=float("inf")), ("on", "off")),
    "to-go, w": (dict(level="to_go"), ("on",)),
}
AGGREGATE = {kind: {"constant_length": 5} if kind == "constant" else {} for kind in losses.AGGREGATES}


@functools.cache
def accepted(level, advantage, kind, dynamic):
    """Whether a run may have this combination."""
    config = tiny.get_config()
    changes = {"method": "RPG-SEQ-RKL", "loss.level": level, "loss.advantage": advantage, "loss.aggregate": kind}
    config.update_from_flattened_dict(changes | {"dynamic_sampling.enabled": dynamic})
    try:
        return resolve(config) is not None
    except ValueError as error:
        assert f"loss.level={level} does not have the gradient of completions with" in str(error)
        return False


def groups_of_three(case_, length, advantage, options):
    """Every group of three: its completions, its advantages as a batch of its own, and its probability."""
    _, old, ref, rewards = case_
    members = np.stack([x.ravel() for x in np.indices((len(rewards),) * 3)], axis=1)
    lengths = jnp.asarray(tree(length)[2].sum(axis=1)[members])
    of_batch = jax.vmap(lambda paid, lengths: losses.advantages(advantage, paid[None], lengths=lengths[None])[0])
    baseline = losses.kl_baseline(jnp.sum(old - ref, axis=1)[members], **options)
    probabilities = jnp.prod(jnp.exp(jnp.sum(old, axis=1))[members], axis=1)
    return members, of_batch(rewards[members], lengths) + baseline, probabilities


def aggregated(kind, length, options):
    """(θ, π_old, π_ref, members, advantages) -> ∇ of the loss of each group, through `aggregate`: compiled once."""

    def loss(theta, old, ref, group, advantages):
        columns = {"behaviour_logprobs": old[group], "ref_logprobs": ref[group], "advantages": advantages}
        columns |= {"mask": jnp.asarray(tree(length)[2])[group], "sampler_logprobs": None, "completion_ids": None}
        tokens = checked(logprobs=logprobs(theta, length)[group], **columns)
        total, weight = losses.aggregate(token_loss("rpg", tokens, **options).values, tokens, kind, **AGGREGATE[kind])
        return total / weight

    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, None, None, 0, 0)))


@pytest.mark.parametrize("promise", [pytest.param(p, marks=() if p[-1] == "w" else pytest.mark.slow) for p in PROMISED])
@pytest.mark.parametrize("divergence", ("rkl", pytest.param("fkl", marks=pytest.mark.slow)))
def test_a_run_is_accepted_exactly_if_its_aggregated_gradient_is_exact(promise, divergence, length=2):
    """Completions have one and two tokens, rewards are 0 or 1; dynamic sampling keeps groups whose rewards differ."""
    options, policies = PROMISED[promise]
    options = options | {"divergence": divergence, "kl_coef": KL_COEF}
    gradients, allowed = {kind: aggregated(kind, length, options) for kind in losses.AGGREGATES}, []
    for policy, advantage in itertools.product(policies, losses.ADVANTAGES):
        theta, old, ref, rewards = case(length, policy)
        case_ = theta, old, ref, jnp.where(rewards > 0, 1.0, 0.0)
        exact = exact_gradient(divergence, case_, length)
        members, advantages, probabilities = groups_of_three(case_, length, advantage, options)
        informative = np.ptp(case_[3][members], axis=1) > 0
        for kind, dynamic in itertools.product(losses.AGGREGATES, (False, True)):
            weight = probabilities * informative if dynamic else probabilities
            each = gradients[kind](theta, old, ref, members, advantages)
            got = jnp.tensordot(weight / jnp.sum(weight), each, 1)
            scale = jnp.vdot(exact, got) / jnp.vdot(exact, exact)
            error = float(jnp.linalg.norm(got / scale - exact) / jnp.linalg.norm(exact))
            here = f"{policy} {advantage} {kind} dynamic={dynamic}"
            if accepted(options["level"], advantage, kind, dynamic):
                allowed.append((kind, dynamic))
                assert error < 1e-12, here  # sums of fewer than a thousand float64 terms of order one
                assert scale * AGGREGATE[kind].get("constant_length", 1) == pytest.approx(1, rel=1e-12), here
            else:
                assert error > 0.003, here  # also at its best scale
    assert set(allowed) == {("sequence_mean_token_sum", False), ("constant", False)}


def packed(x, length):
    """[N, T] as [N / 2, 2T]: two completions a row."""
    return np.asarray(x).reshape(-1, 2 * length)


@pytest.mark.parametrize(
    ("level", "weight"),
    (("sequence", "token"), pytest.param("sequence", "capped", marks=pytest.mark.slow), ("to_go", "product")),
)
def test_packing_padding_and_split_groups_change_nothing(level, weight):
    length, groups = 3, np.arange(12) // 4
    theta, old, ref, rewards = (x[:12] for x in case(length))
    new, mask = logprobs(case(length)[0], length)[:12], tree(length)[2][:12].copy()
    mask[3, 1] = 0  # an observation between two actions
    ids = mask * 0 + np.arange(1, 13)[:, None] % 2 + 1
    options = dict(level=level, weight=weight, divergence="js", kl_coef=KL_COEF)
    options |= {"trace_decay": 0.9} if level == "to_go" else {}
    options |= dict(clip="none" if weight == "product" else "truncate", aggregate="sequence_mean_token_sum")
    arrays = {"logprobs": new, "behaviour_logprobs": old, "ref_logprobs": ref, "mask": mask}
    arrays["advantages"] = np.broadcast_to(np.asarray(rewards)[:, None], mask.shape)
    grouped = {"group_ids": groups} if level == "sequence" else {}

    @jax.jit
    def gradient_of(arrays):
        return jax.grad(lambda x: losses.policy_loss("rpg", **arrays | {"logprobs": x}, **options)[0])(
            arrays["logprobs"]
        )

    def gradient(arrays, **more):
        return gradient_of(jax.tree.map(jnp.asarray, arrays | more))

    plain = gradient(arrays, **grouped)
    assert np.all((np.asarray(plain) != 0) == (mask != 0)), "every trained token has a gradient, no other one has"
    behind = np.argsort(mask == 0, axis=1, kind="stable")  # the observation is behind the last action, as padding is
    cut = gradient({name: np.take_along_axis(np.asarray(x), behind, 1) for name, x in arrays.items()}, **grouped)
    np.testing.assert_allclose(cut, np.take_along_axis(plain, behind, 1), **EXACT)
    rows = {name: packed(x, length) for name, x in arrays.items()}
    packed_groups = {"group_ids": packed(np.repeat(groups[:, None], length, 1), length)} if grouped else {}
    got = gradient(rows, completion_ids=packed(ids, length), **packed_groups)
    np.testing.assert_allclose(got.reshape(plain.shape), plain, **EXACT)
    padded = {
        name: np.pad(np.asarray(x, float), ((0, 2), (0, 3)), constant_values=np.nan) for name, x in arrays.items()
    }
    padded["mask"] = np.nan_to_num(padded["mask"])
    more = {"group_ids": np.pad(groups, (0, 2))} if grouped else {}
    np.testing.assert_allclose(gradient(padded, **more)[:12, :length], plain, **EXACT)
    if grouped:  # the advantages hold the baseline: groups may be split over micro-batches
        log_ratios = jnp.sum((old - ref) * mask, axis=1).reshape(3, 4)
        baseline = losses.kl_baseline(log_ratios, divergence="js", kl_coef=KL_COEF, level="sequence").reshape(12, 1)
        arrays["advantages"] = arrays["advantages"] + baseline
        split = [gradient({name: x[part] for name, x in arrays.items()}) for part in (slice(0, 6), slice(6, 12))]
        np.testing.assert_allclose(np.concatenate(split), plain, **EXACT)


def test_one_completion_a_prompt_takes_the_batch_as_its_group():
    log_ratios = jnp.asarray([[1.0], [2.0], [6.0]])
    baseline = losses.kl_baseline(log_ratios, divergence="rkl", kl_coef=0.5, level="sequence")
    np.testing.assert_allclose(baseline, [[2.5], [2.25], [1.25]], **EXACT)
    tokens = checked(
        logprobs=jnp.zeros((3, 1)),
        behaviour_logprobs=log_ratios,
        ref_logprobs=jnp.zeros((3, 1)),
        advantages=jnp.zeros(3),
        mask=jnp.ones((3, 1)),
        sampler_logprobs=None,
        completion_ids=None,
        group_ids=jnp.arange(3),
    )
    grouped = completions.grouped_kl_baseline(tokens, DIVERGENCES["rkl"], 0.5)
    np.testing.assert_allclose(grouped, baseline, **EXACT)


def test_a_baseline_of_an_unknown_divergence_is_refused_with_the_closest_name():
    with pytest.raises(ValueError, match="unknown divergence 'ukrl'. Did you mean 'urkl'"):
        losses.kl_baseline(jnp.zeros((1, 2)), divergence="ukrl", level="sequence")


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"weight": "product"}, "level='sequence'"),
        ({"kl_ratio": "behaviour"}, "no effect with level='token', form='paper': use level='sequence'$"),
        ({"trace_decay": 0.9}, "no effect with level='token', form='paper': use level='to_go'$"),
        ({"weight": "capped"}, "no effect with level='token', form='paper': use level='sequence' or 'to_go'$"),
        ({"form": "verl", "trace_cap": 2.0}, "no effect with level='token', form='verl': use level='to_go'$"),
        ({"level": "sequence", "trace_decay": 0.9}, "trace_decay=0.9 .* need level='to_go'"),
        ({"level": "sequence", "weight_cap": 3.0}, "no effect with weight='token': use weight='capped'"),
        ({"kl_ratio": "behaviour", "level": "to_go"}, "need level='sequence'"),
        ({"form": "verl", "level": "sequence"}, "use form='paper'"),
        ({"clip": "dual_through"}, "needs estimator='differentiable'"),
        ({"level": "sequence", "weight": "product", "clip": "dual"}, "clip='dual' would bound: use clip='none'"),
    ),
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        losses_of(case(1)[0], case(1), 1, **options)


@pytest.mark.parametrize("level", ("sequence", "to_go"))
def test_an_aggregate_that_weights_completions_by_their_length_is_refused(level):
    tokens = dict(logprobs=jnp.zeros((1, 2)), behaviour_logprobs=jnp.zeros((1, 2)), advantages=jnp.ones(1))
    for aggregate in ({}, {"aggregate": "token_mean"}, {"aggregate": "sequence_mean_token_mean"}):
        with pytest.raises(ValueError, match=f"level={level!r} would not .* use aggregate='sequence_mean_token_sum'"):
            losses.policy_loss("rpg", **tokens, mask=jnp.ones((1, 2)), level=level, **aggregate)
