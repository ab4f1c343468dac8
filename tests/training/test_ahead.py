"""Sampling ahead of training: the bound on staleness, what stale tokens are weighted by, and resuming."""

import dataclasses
import threading

import numpy as np
import pytest

from rpg_jax import data
from rpg_jax.data.groups import Group
from rpg_jax.rollout import RolloutError
from rpg_jax.training.ahead import AheadCollector, staleness, without_present
from rpg_jax.training.collect import Collected
from rpg_jax.types import Completion, Turns

PROBLEM = data.Problem(0, "p", "a", "t")


def group(*versions, logprob=-2.0):
    """One group of one completion whose tokens are of these versions."""
    versions = np.array(versions, np.int32)
    logprobs = np.full(len(versions), logprob, np.float32)
    mixed = versions if (versions != versions[0]).any() else None
    completion = Completion(np.arange(len(versions)), logprobs, "stop", int(versions[0]), mixed)
    return Group(PROBLEM, np.array([1]), [completion], ["x"], np.zeros(1, np.float32), np.zeros(1, np.float32))


class Stream:
    """A position that never moves."""

    def state(self):
        return {}

    def restore(self, state):
        assert state == {}


class Weights:
    """A rollout that only remembers its weights."""

    def __init__(self):
        self.version = None

    def stage_weights(self, params):
        return params

    def sync_weights(self, params, version):
        self.version, self.params = version, params

    def verify_weights(self, params):
        assert params is self.params


def ahead_of(weights, collected, **options):
    def collect(step, carried, share):
        collected.append((step, weights.version))
        made = [group(weights.version)]
        return Collected(made, list(carried), made)

    options = {"max_staleness": 1, "steps": 100, **options}
    return AheadCollector(collect, lambda: {"timeout": 1}, weights, Stream(), **options)


@pytest.mark.parametrize("bound", [1, 3])
def test_a_batch_comes_from_the_weights_of_as_many_steps_before_as_the_bound_says(bound):
    weights, collected = Weights(), []
    ahead = ahead_of(weights, collected, max_staleness=bound, steps=8)
    for step in range(8):
        sampled = ahead.take(step, {"w": np.float32(step)}, 10 * step)
        assert sampled.collected.trained[0].completions[0].weight_version == 10 * max(0, step - bound)
        assert sampled.errors == {"timeout": 1}
    assert collected == [(step, 10 * max(0, step - bound)) for step in range(8)]  # none beyond the last step


def test_sampling_overlaps_training_and_waits_at_the_bound():
    weights, begun, go = Weights(), [], threading.Event()

    def collect(step, carried, share):
        begun.append(step)
        assert step == 0 or go.wait(20)
        return Collected([group(weights.version)], [], [group(weights.version)])

    ahead = AheadCollector(collect, dict, weights, Stream(), max_staleness=2, steps=100)
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

    def collect(step, carried, share):
        made = [group(weights.version, weights.version - 5 * (step == 2))]
        return Collected(made, [], made)

    ahead = AheadCollector(collect, dict, weights, Stream(), max_staleness=1, steps=100)
    ahead.take(0, {}, 10)
    ahead.take(1, {}, 11)
    with pytest.raises(RolloutError, match=r"step 2 would train on tokens of weights version 6, .* before version 11"):
        ahead.take(2, {}, 12)


def test_a_fault_in_sampling_is_raised_at_the_step_that_needs_the_batch():
    weights = Weights()

    def collect(step, carried, share):
        if step == 1:
            raise OSError("device fell off the bus")
        return Collected([group(0)], [], [group(0)])

    ahead = AheadCollector(collect, dict, weights, Stream(), max_staleness=1, steps=100)
    ahead.take(0, {}, 0)
    with pytest.raises(OSError, match="fell off the bus"):
        ahead.take(1, {}, 1)


def test_stale_completions_keep_the_rollouts_logprobs_and_fresh_ones_are_left_to_the_trainer():
    stale, mixed, fresh = without_present([group(3, 3), group(3, 4), group(4, 4)], version=4)
    np.testing.assert_array_equal(stale.behaviour_logprobs[0], [-2, -2])
    np.testing.assert_array_equal(mixed.behaviour_logprobs[0], [-2, -2])
    np.testing.assert_array_equal(fresh.behaviour_logprobs[0], [np.nan, np.nan])


def test_the_age_of_a_token_that_an_environment_wrote_does_not_count():
    turns = Turns(np.array([False, True, False]), np.zeros(2, np.float32))
    heard = group(4, 0, 4)
    heard = dataclasses.replace(heard, completions=[dataclasses.replace(heard.completions[0], turns=turns)])
    assert np.isnan(without_present([heard], version=4)[0].behaviour_logprobs[0]).all()
    assert staleness([heard], version=4) == {"staleness_updates": 0, "staleness_updates_max": 0}


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_decoupled_loss_gets_the_behaviour_policy_from_the_trainer_and_keeps_the_rollouts_logprobs(decoupled):
    ahead = ahead_of(Weights(), [], decoupled=decoupled)
    ahead.take(0, {}, 10)
    (stale,) = ahead.take(1, {}, 11).trained
    assert stale.completions[0].weight_version == 10 and (stale.behaviour_logprobs is None) == decoupled
    np.testing.assert_array_equal(stale.completions[0].logprobs, [-2])


def test_a_record_holds_the_batches_to_come_and_what_is_carried():
    def collect(step, carried, share):
        made = [group(step, step + 1, logprob=-1 / (1 + step)), group(step)]
        return Collected(made, list(carried), [*carried, made[0]], [made[1]])

    def make():
        return AheadCollector(collect, lambda: {"timeout": 2}, Weights(), Stream(), max_staleness=2, steps=100)

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
            left, right = getattr(a.collected, name), getattr(b.collected, name)
            assert len(left) == len(right) > 0
            for x, y in zip(left, right, strict=True):
                np.testing.assert_array_equal(x.completions[0].versions, y.completions[0].versions)
                np.testing.assert_array_equal(x.behaviour_logprobs[0], y.behaviour_logprobs[0])
        assert b.collected.trained[-1] is b.collected.generated[0]


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"swap": "sometimes"}])
def test_a_bound_of_nothing_and_unknown_swaps_are_refused(options):
    with pytest.raises(ValueError, match="max_staleness >= 1 and swap in"):
        ahead_of(Weights(), [], **options)
