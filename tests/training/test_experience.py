"""Dynamic sampling keeps exactly the informative groups, judged by raw accuracy, and accounts for all of them."""

import itertools

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.rewards import Scores
from rpg_jax.training.experience import DynamicSampling, Group, GroupSampler, collect
from rpg_jax.types import Completion, Sampling


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


def every_third_is_informative(problems, *, step):
    return [group(p.prompt_id, [0, 1] if p.prompt_id % 3 == 0 else [1, 1]) for p in problems]


def test_generation_goes_on_until_enough_groups_are_informative():
    kept, generated = collect(
        stream(4), every_third_is_informative, prompts_per_step=4, step=0, dynamic=DynamicSampling()
    )
    assert [g.problem.prompt_id for g in kept] == [0, 3, 6, 9]
    assert len(generated) == 12 and sum(g.informative for g in generated) == 4


def test_without_dynamic_sampling_the_batch_is_taken_as_it_comes():
    kept, generated = collect(stream(4), every_third_is_informative, prompts_per_step=4, step=0, dynamic=None)
    assert [g.problem.prompt_id for g in kept] == [0, 1, 2, 3] and generated == kept


def test_groups_are_judged_by_raw_accuracy_not_by_the_shaped_reward():
    assert not group(0, [1, 1], rewards=[1.0, 0.5]).informative
    assert group(0, [0, 1], rewards=[0.5, 0.5]).informative


def test_a_prompt_that_comes_round_again_within_a_step_is_generated_once():
    seen = []

    def sample(problems, *, step):
        seen.extend(p.prompt_id for p in problems)
        return every_third_is_informative(problems, step=step)

    kept, _ = collect(stream(4, count=6), sample, prompts_per_step=4, step=0, dynamic=DynamicSampling(max_batches=5))
    assert sorted(seen) == [0, 1, 2, 3, 4, 5] and [g.problem.prompt_id for g in kept] == [0, 3]


def test_a_shortage_is_a_smaller_batch_or_an_error_as_configured():
    def never(problems, *, step):
        return [group(p.prompt_id, [0, 1] if p.prompt_id == 0 else [0, 0]) for p in problems]

    smaller = DynamicSampling(max_batches=3, on_shortage="smaller")
    kept, generated = collect(stream(4), never, prompts_per_step=4, step=0, dynamic=smaller)
    assert len(kept) == 1 and len(generated) == 12
    strict = DynamicSampling(max_batches=3, on_shortage="error")
    with pytest.raises(ValueError, match="kept 1 of 4 groups after 3 batches"):
        collect(stream(4), never, prompts_per_step=4, step=0, dynamic=strict)


def test_no_informative_group_at_all_is_an_error_even_where_smaller_batches_are_welcome():
    def hopeless(problems, *, step):
        return [group(p.prompt_id, [0, 0]) for p in problems]

    with pytest.raises(ValueError, match="mean accuracy 0.000"):
        collect(stream(4), hopeless, prompts_per_step=4, step=0, dynamic=DynamicSampling(max_batches=2))


def encode(problem):
    return np.array([ord(c) for c in problem.prompt])


def decode(ids):
    return "".join(chr(i) for i in ids)


class FakeRollout:
    """Completes "ab" with "ab0.", "ab1.", … where "." is the stop token; the last completion runs out of length."""

    def generate(self, prompts, *, prompt_ids, group_size, sampling, seed, step):
        def one(prompt, index):
            stopped = index < group_size - 1
            tokens = [*prompt, ord(str(index)), *([ord(".")] if stopped else [])]
            return Completion(np.array(tokens), np.zeros(len(tokens)), "stop" if stopped else "length", 0)

        return [[one(prompt, g) for g in range(group_size)] for prompt in prompts]


def test_the_stop_token_is_not_scored_but_counts_as_length():
    calls = {}

    def scorer(problems, texts, reasons, lengths):
        calls.update(problems=[p.prompt_id for p in problems], texts=texts, reasons=reasons, lengths=lengths)
        return Scores(np.arange(len(texts), dtype=np.float32), np.ones(len(texts), np.float32), {}, {})

    sampler = GroupSampler(FakeRollout(), encode, decode, scorer, group_size=2, sampling=Sampling(), seed=0)
    groups = sampler([Problem(7, "a", "", "t"), Problem(9, "bc", "", "t")], step=0)
    assert calls["problems"] == [7, 7, 9, 9]
    assert calls["texts"] == ["a0", "a1", "bc0", "bc1"]
    assert calls["reasons"] == ["stop", "length"] * 2 and calls["lengths"] == [3, 2, 4, 3]
    np.testing.assert_array_equal(groups[1].rewards, [2, 3])
    assert groups[1].texts == ["bc0", "bc1"] and groups[1].problem.prompt_id == 9
