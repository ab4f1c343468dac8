"""Whole runs whose completions are drawn in parts, by several weights."""

import math

import jax
import numpy as np
import pytest

import rpg_jax
from rpg_jax.losses import carried_ratio

MOST, PART, STEPS = 11, 3, 6
PARTS = math.ceil(MOST / PART)


def is_odd(completion, answer):
    return float(len(completion) % 2)


def trained(folder, on_step=None, **overrides):
    """The result, and the generated groups of each step."""
    config = {
        "run.dir": str(folder), "run.name": "r", "warm_start.enabled": False, "dynamic_sampling.enabled": False,
        "rewards.parts": "length", "rewards.accuracy": "exact", "rewards.overlong_shaping": False,
        "optimizer.warmup": "0 updates", "rollout.max_tokens": MOST, "train.steps": STEPS,
        "train.updates_per_step": 1, "evaluation.every": STEPS, "log.rollouts_every": 0, "checkpoint.every": 1,
        "checkpoint.keep": STEPS, **overrides,
    }  # fmt: skip
    steps = {}

    def note(step):
        steps[step.number] = step.groups
        if on_step is not None:
            on_step(step)

    result = rpg_jax.train("tests/end_to_end/micro.py", overrides=config, on_step=note)
    return result, [steps[number] for number in sorted(steps) if number]


def completions(groups):
    return [c for g in groups for c in g.completions]


FROZEN = {"optimizer.learning_rate": 0.0, "optimizer.weight_decay": 0.0}
BATCHES = {
    "orchestrator, dynamic sampling": {
        "dynamic_sampling.enabled": True,
        "dynamic_sampling.oversample": 3,
        **dict.fromkeys(["rewards.parts", "rewards.accuracy"], "tests.end_to_end.test_partial:is_odd"),
    },
    "lockstep, problems that come twice": {"rollout.driver": "lockstep", "task.generated": 15},
}


@pytest.mark.slow  # two runs each
@pytest.mark.parametrize("fields", BATCHES.values(), ids=BATCHES)
def test_as_long_as_the_weights_stay_the_groups_of_a_step_are_those_of_whole_rollouts(tmp_path, fields):
    fields = FROZEN | {"rollout.partial_tokens": PART} | fields
    in_parts = trained(tmp_path / "parts", **fields)[1]
    whole = trained(tmp_path / "whole", **fields | {"rollout.partial_tokens": None})[1]
    longest = 0
    for these, those in zip(in_parts, whole, strict=True):
        assert [g.problem for g in these] == [g.problem for g in those]
        for one, other in zip(completions(these), completions(those), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
            assert one.finish_reason == other.finish_reason
            longest = max(longest, len(one.tokens))
    assert longest > PART


@pytest.mark.slow
def test_every_token_has_the_version_and_the_log_prob_of_the_weights_that_drew_it(tmp_path):
    fields = {"optimizer.learning_rate": 3e-3, "rollout.partial_tokens": PART}
    result, steps = trained(tmp_path, **fields)
    for step, groups in enumerate(steps):
        for c in completions(groups):
            part = np.arange(len(c.tokens)) // PART
            np.testing.assert_array_equal(c.token_versions, np.maximum(0, step - (PARTS - 1) + part))
            assert c.weight_version == c.token_versions[-1]
    for version in range(1, STEPS):
        policy = rpg_jax.Policy.from_run(str(tmp_path / "r"), step=version)
        chosen = [(g.problem.prompt, c) for g in steps[-1] for c in g.completions if version in c.token_versions]
        found = policy.logprobs([prompt for prompt, _ in chosen], [c.tokens.tolist() for _, c in chosen])
        for (_, c), logprobs in zip(chosen, found, strict=True):
            own = c.token_versions == version
            np.testing.assert_allclose(c.logprobs[own], logprobs[own], rtol=0, atol=2e-4)
    ages = [line["staleness_updates_max"] for line in result.metrics[1:]]
    assert ages == [min(step, PARTS - 1) for step in range(STEPS)]
    assert all(line.get("sampler_gap", 0) < 1e-5 and line["sampler_ess"] > 1 - 1e-6 for line in result.metrics[1:])
    assert max(line["log_ratio_max"] for line in result.metrics[2:]) > 1e-2, "w has the staleness of the tokens"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rate"), [("truncate", 3e-3), ("sequence", 3e-4), ("geometric", 3e-3)])
def test_a_correction_that_carries_the_ratio_takes_the_staleness_from_the_importance_weight(tmp_path, kind, rate):
    fields = {"optimizer.learning_rate": rate, "rollout.partial_tokens": PART, "loss.sampler_correction": kind}
    for line in trained(tmp_path, **fields | {"train.steps": 4})[0].metrics[2:]:
        assert line["grad_norm"] > 0 and line["staleness_updates"] > 0
        if carried_ratio(kind):
            assert line["log_ratio_max"] < 1e-4 and line["sampler_ess"] < 1 - 1e-5
        else:
            assert line["log_ratio_max"] > 1e-2 and line["sampler_ess"] > 1 - 1e-6


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_the_groups_that_had_begun(tmp_path):
    fields = {"optimizer.learning_rate": 1e-2, "rollout.partial_tokens": PART, "train.updates_per_step": 2}
    straight, steps = trained(tmp_path / "straight", **fields)

    def end(step):
        if step.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "resumed", end, **fields)
    resumed, rest = trained(tmp_path / "resumed", **fields)
    for one, other in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(straight.params), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(completions(rest[-1]), completions(steps[-1]), strict=True):
        np.testing.assert_array_equal(one.token_versions, other.token_versions)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout.partial_tokens": MOST}, "rollout.partial_tokens=11 is not below rollout.max_tokens=11"),
        ({"rollout.max_staleness": 1}, "does not go with rollout.max_staleness=1"),
        ({"environment.name": "examples.guess:Guess"}, "does not go with environment.name=examples.guess:Guess"),
        (
            {"dynamic_sampling.enabled": True, "dynamic_sampling.surplus": "carry"},
            r"does not go with dynamic_sampling.surplus=carry \(groups wait for their step already\)",
        ),
        ({"method": "CTPO", "loss.sampler_correction": "truncate"}, "makes up for the staleness of single tokens"),
    ],
)
def test_what_cannot_be_drawn_in_parts_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, **{"rollout.partial_tokens": PART} | fields)
