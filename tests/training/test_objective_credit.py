"""What a turn is given credit for, and at which token a critic sees it."""

import dataclasses
import itertools

import numpy as np
import pytest

from rpg_jax import data, losses
from rpg_jax.training.objective import advantages_fn, returns, token_rewards
from rpg_jax.types import Completion, Turns


def conversation(observed, paid):
    """A completion whose observed tokens are 1 in `observed`; without `paid` there is no environment."""
    n, turns = len(observed), Turns(np.array(observed) == 1, np.float32(paid)) if paid else None
    return Completion(np.full(n, 5, np.int32), np.zeros(n, np.float32), "stop", 0, turns=turns)


def group_of(*completions, rewards):
    rewards = np.float32(rewards)
    return data.Group(data.Problem(0, "?", "!", ""), np.array([3]), [*completions], [], rewards, rewards)


TALK = conversation([0, 0, 1, 0, 1, 1, 0, 0], [0.5, -0.25, 1.0])
SHORT = conversation([0, 1, 0], [0.25, 2.0])
ALONE = conversation([0, 0], None)
# The rewards have more than the environment's part, of weight 2: shaping of 0.5, −1 and all of it.
GROUP = group_of(TALK, SHORT, ALONE, rewards=[3.0, 3.5, 1.5])


def test_an_observation_belongs_to_the_turn_before_it():
    assert TALK.turn_numbers.tolist() == [0, 0, 0, 1, 1, 1, 2, 2] and ALONE.turn_numbers.tolist() == [0, 0]


def test_a_turns_return_is_what_the_reward_still_has_after_the_turns_before():
    found = [x.tolist() for x in returns(GROUP, 2.0)]
    assert found == [[3.0, 3.0 - 1.0, 3.0 - 1.0 + 0.5], [3.5, 3.0], [1.5]]


def test_a_critic_sees_rewards_at_the_last_token_that_the_policy_wrote():
    paid = [x.tolist() for x in token_rewards([GROUP], "turn", 2.0)[0]]
    assert paid == [[0, 1.0, 0, -0.5, 0, 0, 0, 2.5], [0.5, 0, 3.0], [0, 1.5]]
    paid = [x.tolist() for x in token_rewards([GROUP], "completion", 2.0)[0]]
    assert paid == [[0, 0, 0, 0, 0, 0, 0, 3.0], [0, 0, 3.5], [0, 1.5]]


def test_a_turn_is_compared_with_the_groups_others_at_the_same_turn():
    """The third turn, which no other completion has, is compared with the last turn of the longest other."""
    first, second, third = np.float32([3.0, 3.5, 1.5]), np.float32([2.0, 3.0]), np.float32([2.5, 3.0])
    expected = [np.asarray(losses.advantages("leave_one_out", x[None]))[0] for x in (first, second, third)]
    found = losses.turn_advantages("leave_one_out", [returns(GROUP, 2.0)])[0]
    assert [len(x) for x in found] == [3, 2, 1]
    np.testing.assert_array_equal(found[0], [expected[0][0], expected[1][0], expected[2][0]])
    np.testing.assert_array_equal(found[1], [expected[0][1], expected[1][1]])
    np.testing.assert_array_equal(found[2], [expected[0][2]])


@pytest.mark.parametrize("name", ["group_mean", "group_standardised", "leave_one_out", "maxrl"])
def test_the_longest_conversation_of_a_group_never_gets_a_raw_return(name):
    """By definition, for all lengths of four conversations: two turns without others, and others that tie."""
    paid = np.float32([2.0, 2.0, 1.0, 0.25])
    for lengths in itertools.product((1, 2, 4), repeat=4):
        group = [np.linspace(7, r, n, dtype=np.float32) for r, n in zip(paid, lengths, strict=True)]
        [found] = losses.turn_advantages(name, [group])
        for i, own in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i]
            for t in range(len(own)):
                s = min(t, max(map(len, others)) - 1)
                row = np.array([[own[t], *(x[s] for x in others if len(x) > s)]])
                assert row.size > 1
                # f32, and a standard deviation that is 0 in f64 where rewards are equal.
                np.testing.assert_allclose(found[i][t], losses.advantages(name, row)[0, 0], atol=2e-5)


@pytest.mark.parametrize("name", ["group_mean", "group_standardised", "leave_one_out"])
def test_conversations_that_were_paid_the_same_have_no_advantage_however_long_they_are(name):
    group = [np.full(n, 2, np.float32) for n in (1, 2, 2, 5)]
    assert not np.concatenate(losses.turn_advantages(name, [group])[0]).any()
    [[alone]] = losses.turn_advantages(name, [[np.float32([3, 2])]])
    np.testing.assert_allclose(alone, [3, 2], rtol=2e-6)  # 1e-6 is added to a deviation of 1


@pytest.mark.parametrize("name", ["group_standardised", "maxrl"])
def test_last_turns_that_are_paid_the_same_have_no_advantage_beside_other_parts_of_the_reward(name):
    talks = [conversation([0, 1, 0], [first, 1.0]) for first in (-0.1, -0.3, -0.4, -0.7)]
    parts = np.float32([[c.turns.rewards.sum(dtype=float), 1] for c in talks])
    group = group_of(*talks, rewards=parts @ np.float32([0.7, 0.1]))
    batch = data.pack([dataclasses.replace(group, parts=parts)], data.RowShape(4, 9, 8))
    made = advantages_fn(name, "ppo", [0.7, 0.1], credit="turn", environment_weight=0.7)
    assert [x[2] for x in made(batch)["advantages"][0]] == [0] * 4


def test_the_baseline_of_a_turn_without_others_changes_no_expected_gradient():
    """Two turns at most: a first action stops or goes on. Every group of three conversations, by enumeration."""
    logits, paths = np.array([0.3, -0.5, 0.2]), [(0,), (1, 2), (1, 0), (1, 1)]  # action 0 stops; 1 goes on
    pays = {(0,): [1.0], (1, 2): [0.5, 3.0], (1, 0): [0.5, -1.0], (1, 1): [0.5, 0.25]}
    first, second = logits[:2], logits
    p1, p2 = np.exp(first) / np.exp(first).sum(), np.exp(second) / np.exp(second).sum()

    def probability(path):
        return p1[path[0]] * (p2[path[1]] if len(path) > 1 else 1)

    def scores(path):  # of the turns, over both turns' logits
        one, two = np.zeros(5), np.zeros(5)
        one[:2] = np.eye(2)[path[0]] - p1
        if len(path) > 1:
            two[2:] = np.eye(3)[path[1]] - p2
        return [one, two][: len(path)]

    def to_go(path):
        return np.cumsum(pays[path][::-1])[::-1]

    exact = sum(probability(x) * sum(r * g for r, g in zip(to_go(x), scores(x), strict=True)) for x in paths)
    found = np.zeros(5)
    groups = list(itertools.product(paths, repeat=3))
    for group, own in zip(
        groups, losses.turn_advantages("leave_one_out", [[to_go(x) for x in g] for g in groups]), strict=True
    ):
        weight = np.prod([probability(x) for x in group]) / 3
        found += weight * sum(
            a * g for x, of in zip(group, own, strict=True) for a, g in zip(of, scores(x), strict=True)
        )
    np.testing.assert_allclose(found, exact, atol=1e-6)  # advantages are f32


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("group_mean", "leave_one_out", "maxrl")]


@pytest.mark.parametrize("advantage", ["group_standardised", *SLOW])
def test_where_the_last_turn_alone_pays_a_turn_has_the_advantage_of_its_completion(advantage):
    pays = [[0.0, 1.1], [0.0, 0.3], [0.0, 1.1], [0.0, -0.7]]
    talks = [conversation([0] * n + [1, 0], x) for n, x in enumerate(pays, start=1)]
    groups = [group_of(*talks, rewards=np.float32([0.9, 0.1, 0.9, i])) for i in range(3)]
    batch = data.pack(groups, data.RowShape(12, 9, 8))
    turns = advantages_fn(advantage, "ppo", credit="turn", environment_weight=0.7)(batch)["advantages"]
    whole = advantages_fn(advantage, "ppo")(batch)["advantages"]
    for a, b in zip(batch.scatter(turns), batch.scatter(whole), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_kls_baseline_is_in_the_advantages_of_turns_too():
    options = dict(divergence="rkl", kl_coef=0.3, level="sequence", credit="turn", environment_weight=2.0)
    batch = data.pack([GROUP], data.RowShape(3, 9, 8))
    one, zero = np.ones((3, 8), np.float32), np.zeros((3, 8), np.float32)
    batch = batch.add(behaviour_logprobs=[zero], ref_logprobs=[one])
    plain = advantages_fn("leave_one_out", "rpg", **options | {"level": "token"})(batch)["advantages"]
    found = advantages_fn("leave_one_out", "rpg", **options)(batch)["advantages"]
    sampled = np.float32([[5, 2, 2]])
    expected = np.asarray(losses.kl_baseline(-sampled, divergence="rkl", kl_coef=0.3, level="sequence"))[0]
    for a, b, baseline in zip(found[0], plain[0], expected, strict=True):
        np.testing.assert_allclose(a - b, baseline, rtol=1e-6)  # f32


@pytest.mark.parametrize("advantage", ["batch_mean", "gdpo", "whitened_returns", "gae"])
def test_an_advantage_over_the_batch_has_no_form_for_turns(advantage):
    with pytest.raises(ValueError, match=f"{advantage}.* has no form for turns; choose one of group_mean, "):
        losses.turn_advantages(advantage, [returns(GROUP, 1.0)])
