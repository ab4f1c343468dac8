"""Sampling ahead of training: the bound on staleness, what stale tokens are weighted by, and resuming."""

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data
from rpg_jax.data.groups import Group
from rpg_jax.losses import SAMPLER_CORRECTIONS, carried_ratio, divided, token_loss
from rpg_jax.losses.tokens import checked
from rpg_jax.rollout import RolloutError
from rpg_jax.training.ahead import AheadCollector, staleness, without_present
from rpg_jax.training.collect import Collected
from rpg_jax.training.loop import add_logprobs
from rpg_jax.types import Completion, Turns

PROBLEM = data.Problem(0, "p", "a", "t")


def group(version, tokens=1, logprob=-2.0):
    """One group of one completion of weights of this version."""
    completion = Completion(np.arange(tokens), np.full(tokens, logprob, np.float32), "stop", version)
    return Group(PROBLEM, np.array([1]), [completion], ["x"], np.zeros(1, np.float32), np.zeros(1, np.float32))


class Stream:
    """A position that never moves."""

    take = None

    def state(self):
        return {}

    def restore(self, state):
        assert state == {}


class Weights:
    """A rollout that only remembers its weights."""

    def __init__(self):
        self.version, self.weights = None, self

    def stage(self, params):
        return params

    def sync_weights(self, params, version):
        self.version, self.params = version, params

    def verify(self, params):
        assert params is self.params


@pytest.fixture(autouse=True)
def groups_by_the_generator(monkeypatch):
    def made(take, generator, *, step, pending, share, **_):
        return generator.collect(step, pending, share)

    monkeypatch.setattr("rpg_jax.training.collect.collect", made)


def ahead_by(collect, rollout, errors=None, **options):
    """The collector whose generator makes the groups of a step by `collect`."""
    generator = SimpleNamespace(collect=collect, rollout=rollout, take_errors=lambda: errors or {})
    return AheadCollector(generator=generator, stream=Stream(), prompts_per_step=1, **options)


def ahead_of(weights, collected, **options):
    def collect(step, pending, share):
        collected.append((step, weights.version))
        made = [group(weights.version)]
        return Collected(made, list(pending), made)

    options = {"max_staleness": 1, "steps": 100, **options}
    return ahead_by(collect, weights, {"timeout": 1}, **options)


@pytest.mark.parametrize("bound", [1, 3])
def test_a_batch_comes_from_the_weights_of_as_many_steps_before_as_the_bound_says(bound):
    weights, collected = Weights(), []
    ahead = ahead_of(weights, collected, max_staleness=bound, steps=8)
    for step in range(8):
        sampled = ahead.take(step, {"w": np.float32(step)}, 10 * step)
        assert sampled.trained[0].completions[0].weight_version == 10 * max(0, step - bound)
        assert sampled.errors == {"timeout": 1}
    assert collected == [(step, 10 * max(0, step - bound)) for step in range(8)]  # none beyond the last step


def test_sampling_overlaps_training_and_waits_at_the_bound():
    weights, begun, go = Weights(), [], threading.Event()

    def collect(step, pending, share):
        begun.append(step)
        assert step == 0 or go.wait(20)
        return Collected([group(weights.version)], [], [group(weights.version)])

    ahead = ahead_by(collect, weights, max_staleness=2, steps=100)
    ahead.take(0, {}, 0)
    while begun != [0, 1]:  # the batch of step 1 is under way while step 0 trains
        pass
    go.set()
    ahead.record()
    assert begun == [0, 1, 2]  # that of step 3 may not begin before step 1 does
    ahead.take(1, {}, 1)
    ahead.record()
    assert begun == [0, 1, 2, 3]


def test_a_token_older_than_the_bound_is_an_error():
    weights = Weights()

    def collect(step, pending, share):
        made = [group(weights.version - 5 * (step == 2))]
        return Collected(made, [], made)

    ahead = ahead_by(collect, weights, max_staleness=1, steps=100)
    ahead.take(0, {}, 10)
    ahead.take(1, {}, 11)
    with pytest.raises(RolloutError, match=r"step 2 would train on tokens of weights version 6, .* before version 11"):
        ahead.take(2, {}, 12)


def test_a_fault_in_sampling_is_raised_at_the_step_that_needs_the_batch():
    weights = Weights()

    def collect(step, pending, share):
        if step == 1:
            raise OSError("device fell off the bus")
        return Collected([group(0)], [], [group(0)])

    ahead = ahead_by(collect, weights, max_staleness=1, steps=100)
    ahead.take(0, {}, 0)
    with pytest.raises(OSError, match="fell off the bus"):
        ahead.take(1, {}, 1)


def test_stale_completions_keep_the_rollouts_logprobs_and_fresh_ones_are_left_to_the_trainer():
    stale, fresh = without_present([group(3, 2), group(4, 2)], version=4)
    np.testing.assert_array_equal(stale.behaviour_logprobs[0], [-2, -2])
    np.testing.assert_array_equal(fresh.behaviour_logprobs[0], [np.nan, np.nan])


def test_the_age_of_a_token_that_an_environment_wrote_does_not_count():
    turns = Turns(np.array([False, True, True]), np.zeros(2, np.float32))
    heard = group(0, 3)
    heard = dataclasses.replace(heard, completions=[dataclasses.replace(heard.completions[0], turns=turns)])
    assert staleness([heard, group(3, 1)], version=4) == {"staleness_updates": 2.5, "staleness_updates_max": 4}


SIZE, LENGTH, BETA = 3, 3, 0.1
EVERY = np.array(list(itertools.product(range(SIZE), repeat=LENGTH)))
PREFIX = np.stack([EVERY[:, :t] @ SIZE ** np.arange(t) + 40 * t for t in range(LENGTH)], 1)


@pytest.fixture
def policies():
    """Logits f64[prefixes, V] of π_s, of π_prox after a drift, of π_θ and of π_ref; advantages f64[N]."""
    rng = np.random.default_rng(7)
    sampler, ref = rng.normal(0, 1, (2, 40 * LENGTH, SIZE))
    present = sampler + 0.3 * rng.normal(size=sampler.shape)
    theta = present + 0.2 * rng.normal(size=sampler.shape)
    with jax.enable_x64(True):
        yield sampler, present, theta, ref, rng.normal(size=len(EVERY))


def along(logits):
    """Log-probs [N, T] of the tokens of every completion."""
    return jax.nn.log_softmax(jnp.asarray(logits))[PREFIX, EVERY]


def drawn(logits, version):
    """A group of every completion, with the log-probs under `logits`, of weights of this version."""
    logprobs = np.asarray(along(logits))
    every = [Completion(a, x, "length", version) for a, x in zip(EVERY, logprobs, strict=True)]
    zeros = np.zeros(len(EVERY))
    return Group(PROBLEM, np.array([1]), every, [""] * len(EVERY), zeros, zeros)


def with_logprobs(groups, present, ref=None, *, decoupled=False):
    """What the loop makes of `groups`, which weights `present` of version 1 train: its columns, and its metrics."""

    def collect(step, pending, share):
        return Collected(groups, [], groups)

    ahead = ahead_by(collect, Weights(), max_staleness=1, steps=2)
    ahead.publish(present, 0)
    ahead.take(0, present, 0)
    trained = ahead.take(1, present, 1).trained
    sampler = jnp.concatenate([jnp.stack([c.logprobs for c in g.completions]) for g in trained])
    rows = SimpleNamespace(unrouted=None)
    batch = SimpleNamespace(
        batches=[SimpleNamespace(mask=jnp.ones(sampler.shape), sampler_logprobs=sampler, rows=rows)],
        groups=trained,
        scatter=lambda arrays: (jnp.concatenate([jnp.stack(x) for x in arrays]),),
        add=lambda **columns: {"sampler_logprobs": sampler} | {name: column for name, (column,) in columns.items()},
    )

    def logprobs(logits, _):
        return jnp.tile(along(logits), (len(trained), 1)), jnp.zeros(sampler.shape), None

    anchor = {"coincides": lambda: False, "params": lambda: ref, "programs": None, "scores": None}
    reference = SimpleNamespace(is_behaviour=ref is None, **anchor)
    parts = {"collector": ahead, "reference": reference, "decoupled": decoupled}
    algorithm = SimpleNamespace(logprobs=logprobs, **parts)
    return add_logprobs(algorithm, batch, SimpleNamespace(params=present))


def mean_gradient(kind, policies, **bounds):
    """E_{π_s}[Σ_t ∇loss] in the logits of θ for stale completions, by the collector, the loop and the loss."""
    sampler, present, theta, ref, advantages = policies
    columns, _ = with_logprobs([drawn(sampler, 0)], present, ref, decoupled=carried_ratio(kind) is not None)
    probability = jnp.exp(along(sampler).sum(1))

    def expected(theta):
        more = {"mask": jnp.ones(EVERY.shape), "advantages": advantages, "completion_ids": None}
        tokens = checked(logprobs=along(theta), **columns, **more)
        options = {"divergence": "urkl", "clip": "none", "kl_coef": BETA, "sampler_correction": kind, **bounds}
        return probability @ token_loss("rpg", tokens, **options).values.sum(1)

    return np.asarray(jax.grad(expected)(jnp.asarray(theta)))


def by_hand(weigh, policies):
    """−E_{π_s}[Σ_t c_t (A − β log π_θ/π_ref) ∇log π_θ], where c = `weigh`(log π_s, log π_prox, log π_θ [T]; A)."""
    *logits, advantages = policies
    tables = [np.asarray(jax.nn.log_softmax(jnp.asarray(x))) for x in logits]
    gradient = np.zeros_like(tables[0])
    for completion, prefixes, advantage in zip(EVERY, PREFIX, advantages, strict=True):
        log_s, log_prox, log_theta, log_ref = (table[prefixes, completion] for table in tables)
        c = np.broadcast_to(weigh(log_s, log_prox, log_theta, advantage), LENGTH)
        for t, (prefix, token) in enumerate(zip(prefixes, completion, strict=True)):
            score = np.eye(SIZE)[token] - np.exp(tables[2][prefix])
            gradient[prefix] -= np.exp(log_s.sum()) * c[t] * (advantage - BETA * (log_theta - log_ref)[t]) * score
    return gradient


def whole(s, prox, theta, advantage):
    """π_θ/π_s of the token: exact for prefixes and continuations of π_s."""
    return np.exp(theta - s)


INFINITE = float("inf")
EXACT = {
    None: ({}, whole),
    "anchor": ({}, whole),
    "truncate": ({"sampler_high": INFINITE}, whole),
    "mask": ({"sampler_low": 0.0, "sampler_high": INFINITE}, whole),
    "off_policy": ({"sampler_low": 0.0}, whole),
    "geometric": ({}, whole),  # π_old is π_s: a ratio of 1 is within any bounds
    # E_{π_s}[u_x …] = E_{π_prox}[…]: exact for prefixes and continuations of π_prox
    "sequence": (
        {"sampler_low": 0.0, "sampler_high": INFINITE},
        lambda s, prox, theta, a: np.exp(theta - prox + (prox - s).sum()),
    ),
}
STATED = {
    "truncate": (
        {"sampler_high": 1.1},
        lambda s, prox, theta, a: np.exp(theta - prox) * np.minimum(np.exp(prox - s), 1.1),
    ),
    "mask": (
        {"sampler_low": 0.9, "sampler_high": 1.2},
        lambda s, prox, theta, a: np.exp(theta - s) * (np.abs(np.exp(prox - s) - 1.05) <= 0.15),
    ),
    "sequence": (
        {"sampler_low": 0.8, "sampler_high": 1.3},
        lambda s, prox, theta, a: np.exp(theta - prox + (prox - s).sum()) * (0.8 <= np.exp((prox - s).sum()) <= 1.3),
    ),
    "off_policy": (
        {"sampler_low": 0.95},
        lambda s, prox, theta, a: np.exp(theta - s) * (a >= 0 or np.exp((theta - s).mean()) >= 0.95),
    ),
}


@pytest.mark.parametrize("kind", [None, *SAMPLER_CORRECTIONS])
def test_the_mean_gradient_of_stale_completions_is_exact_where_a_correction_has_no_bounds(policies, kind):
    bounds, weigh = EXACT[kind]
    expected = by_hand(weigh, policies)
    np.testing.assert_allclose(mean_gradient(kind, policies, **bounds), expected, rtol=0, atol=1e-14)  # f64
    dropped = by_hand(lambda s, prox, theta, a: np.exp(theta - prox), policies)  # π_prox as π_old, u left out
    assert np.linalg.norm(dropped - expected) > 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize(("kind", "error"), [(None, 0), ("sequence", 0), ("truncate", 0.1), ("mask", 0.1)])
def test_an_objective_of_whole_completions_is_exact_without_a_correction_and_with_that_of_the_completion(
    policies, kind, error
):
    """The token's own ratio leaves out the other tokens' staleness, so the two are refused together."""
    bounds, _ = EXACT[kind]
    found = mean_gradient(kind, policies, level="sequence", weight="product", **bounds)
    sampler, present, theta, ref, advantages = policies

    def objective(theta):
        log_r = along(theta).sum(1) - along(ref).sum(1)
        return jnp.exp(along(theta).sum(1)) @ (advantages - BETA * log_r)

    expected = -np.asarray(jax.grad(objective)(jnp.asarray(theta)))
    missed = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert missed > error if error else missed < 1e-13  # f64


@pytest.mark.parametrize("kind", STATED)
def test_the_mean_gradient_of_stale_completions_is_the_stated_one_where_bounds_cut(policies, kind):
    bounds, weigh = STATED[kind]
    expected = by_hand(weigh, policies)
    np.testing.assert_allclose(mean_gradient(kind, policies, **bounds), expected, rtol=0, atol=1e-14)  # f64
    assert np.abs(expected - by_hand(EXACT[kind][1], policies)).max() > 1e-3, "the bounds cut something"


def test_every_correction_has_its_exact_case_and_its_stated_one():
    never_cut = {None, "anchor", "geometric"}
    assert EXACT.keys() == {None, *SAMPLER_CORRECTIONS} and STATED.keys() == EXACT.keys() - never_cut


def test_a_ratio_is_carried_by_the_corrections_whose_weight_has_it_as_a_factor():
    carried = {kind: carried_ratio(kind) for kind in (None, *SAMPLER_CORRECTIONS)}
    assert {kind: of for kind, of in carried.items() if of} == {
        "truncate": "token", "mask": "token", "sequence": "completion",
    }  # fmt: skip
    with pytest.raises(ValueError, match="unknown sampler_correction 'trunc'"):
        carried_ratio("trunc")


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_gap_compares_the_sampler_with_the_weights_that_sampled_and_with_no_others(policies, decoupled):
    sampler, present, *_ = policies
    rounding = present + 1e-3 * np.random.default_rng(1).normal(size=present.shape)
    fresh, stale = drawn(rounding, 1), drawn(sampler, 0)
    columns, metrics = with_logprobs([stale, fresh], present, decoupled=decoupled)
    gap = np.abs(along(rounding) - along(present))
    found = divided(metrics)
    assert found["sampler_gap"] == pytest.approx(gap.mean()) and found["sampler_gap_max"] == pytest.approx(gap.max())
    own = [along(present) if decoupled else along(sampler), along(present)]
    np.testing.assert_array_equal(columns["behaviour_logprobs"], np.concatenate(own))
    assert with_logprobs([stale], present, decoupled=decoupled)[1]["sampler_gap"][1] == 0  # no token to compare


def test_a_record_holds_the_batches_to_come_and_what_is_carried():
    def collect(step, pending, share):
        made = [group(step, 2, logprob=-1 / (1 + step)), group(step)]
        return Collected(made, list(pending), [*pending, made[0]], [made[1]])

    def make():
        return ahead_by(collect, Weights(), {"timeout": 2}, max_staleness=2, steps=100)

    first = make()
    first.take(0, {}, 0)
    record = first.record()
    second = make()
    second.restore(record)
    assert second.record() == record
    for step in (1, 2, 3):
        a, b = (ahead.take(step, {}, step) for ahead in (first, second))
        assert a.errors == b.errors
        for name in ("generated", "pending", "trained", "carried"):
            left, right = getattr(a, name), getattr(b, name)
            assert len(left) == len(right) > 0
            for x, y in zip(left, right, strict=True):
                assert x.completions[0].weight_version == y.completions[0].weight_version
                np.testing.assert_array_equal(x.behaviour_logprobs[0], y.behaviour_logprobs[0])
        assert b.trained[-1].completions is b.generated[0].completions
