"""Dynamic sampling keeps exactly the informative groups, judged by raw accuracy, and accounts for all of them."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.data import Problem
from rpg_jax.data.groups import Group
from rpg_jax.training.collect import DynamicSampling, collect
from rpg_jax.training.measures import sampling_metrics
from rpg_jax.types import Completion


def group(prompt_id, accuracy, rewards=None):
    completions = [Completion(np.array([1]), np.zeros(1), "stop", 0) for _ in accuracy]
    accuracy = np.asarray(accuracy, np.float32)
    rewards = accuracy if rewards is None else np.asarray(rewards, np.float32)
    return Group(
        Problem(prompt_id, "p", "a", "t"), np.array([2]), completions, ["x"] * len(accuracy), rewards, accuracy
    )


def stream(batch_size, count=10**6):
    ids = (i % count for i in itertools.count())
    while True:
        yield [Problem(next(ids), "p", "a", "t") for _ in range(batch_size)]


def every_third_is_informative(problems, *, step, draw=0):
    return [group(p.prompt_id, [0, 1] if p.prompt_id % 3 == 0 else [1, 1]) for p in problems]


def run(dynamic, sample=every_third_is_informative, *, problems=None, prompts_per_step=4, pending=()):
    problems = stream(4) if problems is None else problems
    take, sizes = (lambda count: next(problems)), dict(prompts_per_step=prompts_per_step, step=0)
    return collect(take, sample, **sizes, dynamic=dynamic, pending=pending)


def taking(count=10**6):
    """The next problems, as `PromptStream.take` has them."""
    ids = (i % count for i in itertools.count())
    return lambda wanted: [Problem(next(ids), "p", "a", "t") for _ in range(wanted)]


def ids(groups):
    return [g.problem.prompt_id for g in groups]


def test_generation_goes_on_until_enough_groups_are_informative():
    step = run(DynamicSampling())
    assert ids(step.trained) == [0, 3, 6, 9]
    assert len(step.generated) == 12 and sum(g.informative for g in step.generated) == 4


def test_without_dynamic_sampling_the_batch_is_taken_as_it_comes():
    step = run(None)
    assert ids(step.trained) == [0, 1, 2, 3] and step.generated == step.trained
    assert step.accounting()["groups_kept"] == step.accounting()["groups_generated"] == 4


def test_groups_are_judged_by_raw_accuracy_not_by_the_shaped_reward():
    assert not group(0, [1, 1], rewards=[1.0, 0.5]).informative
    assert group(0, [0, 1], rewards=[0.5, 0.5]).informative


def test_grades_that_differ_are_informative_though_all_are_right_and_shaping_terms_are_not():
    grades, equal = np.array([0.6, 0.9], np.float32), np.ones(2, np.float32)
    assert dataclasses.replace(group(0, [1, 1]), unshaped=grades).informative
    assert not dataclasses.replace(group(0, [1, 1], rewards=[1.0, 0.5]), unshaped=equal).informative


def test_a_prompt_that_comes_round_again_within_a_step_is_generated_once():
    seen = []

    def sample(problems, *, step):
        seen.extend(p.prompt_id for p in problems)
        return every_third_is_informative(problems, step=step)

    for batch_size in (4, 7):
        seen.clear()
        step = run(DynamicSampling(max_batches=5), sample, problems=stream(batch_size, count=6))
        assert sorted(seen) == [0, 1, 2, 3, 4, 5] and ids(step.trained) == [0, 3]


def test_without_dynamic_sampling_a_prompt_that_comes_round_again_gets_other_random_numbers():
    calls = []

    def sample(problems, *, step, draw):
        calls.append((draw, [p.prompt_id for p in problems]))
        return [group(p.prompt_id, [draw, 1]) for p in problems]

    step = run(None, sample, problems=stream(7, count=3))
    assert calls == [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0])]
    assert ids(step.trained) == [0, 1, 2, 0, 1, 2, 0]
    assert [g.accuracy[0] for g in step.trained] == [0, 0, 0, 1, 1, 1, 2]


def all_informative(problems, *, step):
    return [group(p.prompt_id, [0, 1]) for p in problems]


def test_surplus_is_dropped_or_carried_up_to_the_need_of_one_step():
    dropping = run(DynamicSampling(), all_informative, problems=stream(10))
    assert ids(dropping.dropped) == [4, 5, 6, 7, 8, 9] and dropping.carried == []
    carrying = run(DynamicSampling(surplus="carry"), all_informative, problems=stream(10))
    assert ids(carrying.trained) == [0, 1, 2, 3]
    assert ids(carrying.carried) == [4, 5, 6, 7] and ids(carrying.dropped) == [8, 9]


def test_carried_groups_are_trained_first_and_never_carried_again():
    problems, dynamic = stream(6), DynamicSampling(surplus="carry")
    first = run(dynamic, all_informative, problems=problems)
    second = run(dynamic, all_informative, problems=problems, pending=first.carried)
    assert ids(first.carried) == [4, 5]
    assert ids(second.trained) == [4, 5, 6, 7] and ids(second.carried) == [8, 9, 10, 11]
    third = run(dynamic, all_informative, problems=problems, pending=second.carried)
    assert ids(third.trained) == [8, 9, 10, 11] and third.generated == [], "nothing is generated where nothing lacks"
    assert [s.accounting()["staleness"] for s in (first, second, third)] == [0.0, 0.5, 1.0]


@settings(deadline=None, derandomize=True)
@given(
    need=st.integers(1, 6),
    batch=st.integers(1, 12),
    share=st.floats(0.2, 1.0),
    surplus=st.sampled_from(["drop", "carry"]),
    seed=st.integers(0, 99),
)
def test_every_group_is_trained_carried_dropped_or_uninformative(need, batch, share, surplus, seed):
    rng = np.random.default_rng(seed)

    def sample(problems, *, step):
        return [group(p.prompt_id, [0, 1] if rng.random() < share else [1, 1]) for p in problems]

    problems, dynamic = stream(batch), DynamicSampling(surplus=surplus, max_batches=200)
    pending, total = [], collections.Counter()
    for _ in range(5):
        step = run(dynamic, sample, problems=problems, prompts_per_step=need, pending=pending)
        a = step.accounting()
        assert a["groups_generated"] == a["groups_kept"] + a["groups_uninformative"]
        assert a["groups_uninformative"] == sum(not g.informative for g in step.generated)
        assert a["groups_kept"] + a["groups_carried_in"] == (
            a["groups_trained"] + a["groups_carried_out"] + a["groups_dropped"]
        )
        assert a["groups_trained"] == need and a["groups_carried_in"] == len(pending) <= need
        total.update(a)
        pending = step.carried
    fates = total["groups_trained"] + total["groups_dropped"] + total["groups_uninformative"] + len(pending)
    assert total["groups_generated"] == fates


@pytest.mark.parametrize(
    ("dynamic", "share", "sizes", "outcomes"),
    [
        (DynamicSampling(max_batches=3), 0.5, [2, 2, 2], {(0, 0): 0.1, (0, 1): 0.4, (1, 1): 0.5}),
        (DynamicSampling(0, max_batches=2), 1.0, [1, 8], {(0, 1): 0.4, (1, 1): 0.6}),
    ],
)
def test_the_logged_accuracy_and_reward_are_unbiased_wherever_sampling_stops(dynamic, share, sizes, outcomes):
    """Over every outcome of every batch, with its probability. One group is missing; the plain mean is biased."""
    true, drawn = sum(sum(accuracy) / 2 * p for accuracy, p in outcomes.items()), sum(sizes)
    made = {accuracy: group(1, accuracy, [3 * a - 1 for a in accuracy]) for accuracy in outcomes}
    expected = collections.Counter()
    for sequence in itertools.product(outcomes, repeat=drawn):
        rest, asked = iter(sequence), []

        def sample(problems, *, step, rest=rest, asked=asked):
            asked.append(len(problems))
            return [made[next(rest)] for _ in problems]

        step = collect(
            taking(), sample, prompts_per_step=2, step=0, dynamic=dynamic, pending=[group(0, (0, 1))], share=share
        )
        assert asked == sizes[: len(asked)]
        values, chance = sampling_metrics(step), math.prod(outcomes[accuracy] for accuracy in sequence)
        expected["accuracy"] += chance * values["accuracy"]
        expected["reward"] += chance * values["reward"]
        expected["plain"] += chance * np.mean([g.accuracy.mean() for g in step.generated])
    assert expected["accuracy"] == pytest.approx(true, abs=1e-9)
    assert expected["reward"] == pytest.approx(3 * true - 1, abs=1e-9)
    assert expected["plain"] < true - 0.02, "steps that stop at once have more informative groups, and count as much"


def test_a_shortage_is_a_smaller_batch():
    def never(problems, *, step):
        return [group(p.prompt_id, [0, 1] if p.prompt_id == 0 else [0, 0]) for p in problems]

    step = run(DynamicSampling(max_batches=3), never)
    assert len(step.trained) == 1 and len(step.generated) == 12


def test_no_informative_group_at_all_is_an_error():
    def hopeless(problems, *, step):
        return [group(p.prompt_id, [0, 0]) for p in problems]

    with pytest.raises(ValueError, match=r"^step 1: .* mean accuracy 0\.000"):  # a step counts from 1 for people
        run(DynamicSampling(max_batches=2), hopeless)


@pytest.mark.parametrize(("share", "size"), [(1.0, 64), (0.5, 151), (0.2, 392), (0.01, 640)])
def test_a_batch_has_the_prompts_that_should_fill_the_step(share, size):
    """By hand: (64 + 2 sqrt(64 * 0.5)) / 0.5 = 150.6; (64 + 2 sqrt(64 * 0.8)) / 0.2 = 391.6; at most 10 steps' need."""
    assert DynamicSampling(oversample=0).batch_size(64, missing=64, share=share) == size
    assert DynamicSampling(oversample=3).batch_size(64, missing=1, share=share) == 192


def test_a_batch_after_the_first_is_as_large_as_what_is_missing_asks_for():
    asked = []

    def sample(problems, *, step):
        asked.append(len(problems))
        return every_third_is_informative(problems, step=step)

    dynamic = DynamicSampling(oversample=0)
    step = collect(taking(), sample, prompts_per_step=9, step=0, dynamic=dynamic, share=1.0)
    assert asked[0] == 9
    share = 3.5 / 9.5
    assert asked[1:] == [math.ceil((6 + 2 * math.sqrt(6 * (1 - share))) / share)]
    assert len(step.trained) == 9 and step.share == pytest.approx((len(step.generated) // 3 + 0.5) / (sum(asked) + 0.5))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_batches_of_the_needed_size_generate_little_more_than_the_share_asks_for(share):
    rng, take, pending, seen = np.random.default_rng(0), taking(), [], 1.0
    generated, batches, steps = 0, 0, 60

    def sample(problems, *, step):
        nonlocal batches
        batches += 1
        return [group(p.prompt_id, [0, 1] if rng.random() < share else [1, 1]) for p in problems]

    dynamic = DynamicSampling(oversample=0, surplus="carry")
    for step in range(steps):
        done = collect(take, sample, prompts_per_step=64, step=step, dynamic=dynamic, pending=pending, share=seen)
        pending, seen = done.carried, done.share or seen
        generated += len(done.generated)
        assert len(done.trained) == 64
    assert generated / (64 * steps) < 1.05 / share and batches < 1.2 * steps
