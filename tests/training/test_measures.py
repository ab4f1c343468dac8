"""A run stops where its rollout is not its policy, and where its updates are not finite; the load of experts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax import data
from rpg_jax.training.collect import Collected
from rpg_jax.training.measures import SAMPLER_GAPS, Guard, expert_load, load_metrics, sampling_metrics
from rpg_jax.types import Completion, Turns

FINE, SKIPPED = {"nonfinite_updates": 0.0}, {"nonfinite_updates": 1.0}


@pytest.mark.parametrize("gap", [2e-3, float("nan")])
def test_a_gap_above_the_limit_or_no_number_is_a_fault(gap):
    fault = Guard(1e-3).fault(7, {"sampler_gap": gap}, [FINE])
    assert fault.startswith("step 7: sampler and trainer disagree") and "rollout.max_sampler_gap=0.001" in fault
    assert Guard(1e-3).fault(7, {"sampler_gap": 1e-3}, [FINE]) is None
    assert Guard(1e-3).fault(7, {}, [FINE]) is None  # the trainer had the weights of no token


def test_a_gap_above_what_rounding_makes_is_said_once_and_stops_nothing():
    usual, most = SAMPLER_GAPS["bfloat16"]
    guard = Guard(most, usual)
    gaps = [0.009, 0.05, 0.05, float("nan")]
    told = [[*guard.warnings(step, {"sampler_gap": gap})] for step, gap in enumerate(gaps)]
    assert told[0] == [] and told[2:] == [[], []]
    assert told[1][0].startswith("warning: step 1: sampler and trainer disagree by 5.00e-02 nats")
    assert "rollout.max_sampler_gap=0.08" in told[1][0]
    assert [bool(guard.fault(1, {"sampler_gap": gap}, [FINE])) for gap in gaps] == [False, False, False, True]


def test_a_limit_that_cuts_most_completions_off_is_said_after_the_first_step_with_what_to_set():
    guard = Guard(1.0, limit=16)
    [line] = guard.warnings(1, {"truncated": 0.75})
    assert "75% of the completions were cut off at rollout.max_tokens=16" in line and "rollout.max_tokens=64" in line
    assert not [*guard.warnings(1, {"truncated": 0.5})] and not [*guard.warnings(2, {"truncated": 0.75})]
    assert not [*Guard(1.0).warnings(1, {"truncated": 0.75})]  # supervised training samples nothing
    [line] = guard.warnings(1, {"truncated": 0.75, "turns": 4.7})  # a limit of turns may have ended them, or of tokens
    assert "75% of the conversations" in line and "(finish_reason turns) or a limit of tokens" in line
    assert "environment.max_turns" in line and "rollout.max_tokens" not in line


def test_a_first_step_from_which_nothing_can_be_learned_is_said_with_what_helps():
    [line] = Guard(1.0).warnings(1, {"equal_rewards": 1.0, "reward": 0.0})
    assert "equal rewards (mean 0)" in line and "let the reward grade" in line
    assert not [*Guard(1.0).warnings(1, {"equal_rewards": 0.9, "reward": 0.0})]
    assert not [*Guard(1.0).warnings(2, {"equal_rewards": 1.0, "reward": 0.0})]
    assert not [*Guard(1.0, needs_rewards=False).warnings(1, {"equal_rewards": 1.0, "reward": 0.0})]


def test_each_step_that_skips_an_update_is_told_with_what_helps():
    guard = Guard(1.0)
    for step in (1, 2):
        [line] = guard.warnings(step, {"nonfinite_updates": 0.5})
        assert line.startswith(f"warning: step {step}: an update with a non-finite loss") and guard.remedy in line
    assert not [*guard.warnings(3, {"nonfinite_updates": 0.0})]


def test_a_loss_without_a_gradient_is_told_and_equal_rewards_are_none():
    without = {"grad_norm": 0.0, "grad_norm_max": 0.0, "equal_rewards": 0.5}
    [line] = Guard(1.0).warnings(7, without)
    assert line.startswith("warning: step 7: the gradient was exactly 0") and "loss.name" in line
    for others in ({"equal_rewards": 1.0}, {"grad_norm_max": 1e-9}, {"grad_norm_max": float("nan")}):
        assert not [*Guard(1.0).warnings(7, without | others)]
    assert not [*Guard(1.0).warnings(7, {"grad_norm_max": 0.0})]  # supervised training has no rewards


def test_skipped_updates_count_across_steps_until_one_is_applied():
    guard, values = Guard(1.0, max_nonfinite_updates=3), {"sampler_gap": 0.0}
    assert guard.fault(1, values, [SKIPPED, SKIPPED]) is None
    assert guard.fault(2, values, [FINE, SKIPPED]) is None and guard.nonfinite_in_a_row == 1
    assert guard.fault(3, values, [SKIPPED]) is None
    assert "3 updates in a row" in guard.fault(4, values, [SKIPPED])


def test_a_part_that_only_decides_accuracy_has_no_share_of_the_reward():
    one = Completion(np.zeros(2), np.zeros(2), "stop", 0)
    problem = data.Problem(0, "?", "!", "")
    scores = {"rewards": np.ones(1), "accuracy": np.ones(1), "parts": np.array([[0.5, 1.0]])}
    group = data.Group(problem, np.array([3]), [one], [], **scores)
    found = sampling_metrics(Collected([group], [], [group]), {"graded": 2.0, "exact": 0.0})
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {"reward/graded": 1.0}


def test_a_conversation_counts_its_turns_its_observations_and_the_failures_of_its_environment():
    def completion(observed, error=None):
        n, rewards = len(observed), np.zeros(sum(observed) + 1, np.float32)
        return Completion(np.zeros(n), np.zeros(n), "stop", 0, turns=Turns(np.array(observed) == 1, rewards, error))

    group = data.Group(
        data.Problem(0, "?", "!", ""),
        np.array([3]),
        [completion([0, 1, 0, 0]), completion([0, 1, 0, 1, 0], "timeout"), completion([0], "timeout")],
        [],
        np.zeros(3),
        np.zeros(3),
    )
    found = sampling_metrics(Collected([group], [], [group]))
    assert {name: found[name] for name in ("turns", "observed_length", "completion_length", "completion_tokens")} == {
        "turns": 2, "observed_length": 1, "completion_length": 7 / 3, "completion_tokens": 7,
    }  # fmt: skip
    assert found["environment_failed"] == 2 / 3 and found["environment_errors/timeout"] == 2
    plain = dataclasses.replace(group, completions=[dataclasses.replace(c, turns=None) for c in group.completions])
    without = sampling_metrics(Collected([plain], [], [plain]))
    assert without["completion_tokens"] == 10
    assert not {*without} & {"turns", "observed_length", "environment_failed"}


def test_the_load_counts_each_trained_token_at_each_of_its_experts():
    draw = np.random.default_rng(0)
    experts = np.stack([draw.permutation(5)[:2] for _ in range(2 * 4 * 3)]).reshape(2, 4, 3, 2).astype(np.uint8)
    mask = draw.integers(0, 2, (2, 4)).astype(np.float32)
    expected = np.zeros((3, 5), int)
    for b, c in np.argwhere(mask):
        for layer in range(3):
            for expert in experts[b, c, layer]:
                expected[layer, expert] += 1
    np.testing.assert_array_equal(expert_load(jnp.asarray(experts), jnp.asarray(mask), count=5), expected)


def test_the_violation_is_the_excess_of_the_fullest_expert_and_the_variation_that_of_all():
    found = load_metrics(np.array([[4, 4, 4, 4], [0, 0, 8, 8]]))
    assert {name.removeprefix("expert_load/"): float(value) for name, (value, _) in found.items()} == {
        "max_violation": 0.5,  # of the layers' 0 and 8 / 4 - 1
        "max_violation_worst": 1.0,
        "cv": 0.5,  # of the layers' 0 and 4 / 4
    }
