"""The trainer's list of groups: who has which, what happens when a worker is lost, and which results count."""

from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.rollout import RolloutError
from rpg_jax.rollout.fleet import messages
from rpg_jax.rollout.fleet.hub import Hub, Refused
from rpg_jax.types import Turns

from .conftest import REQUEST, SPEC, group_of


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hub(clock):
    hub = Hub(SPEC, lost_seconds=10, stall_seconds=100, clock=clock)
    for name in ("a", "b"):
        hub.join(name, {"name": name, "run": None, "versions": messages.versions()})
    return hub


def lent(hub, worker, room=4):
    loan = hub.lease(worker, room)
    return [] if loan is None else loan[1]


def key(job, place, weights=0xAB):
    return {"job": job.number, "place": place, "weights": f"{weights:016x}", "version": 3}


def give(hub, worker, job, place):
    return hub.complete(worker, key(job, place), group_of(REQUEST, place))


def test_every_group_is_lent_once_and_the_last_ones_in_small_parts(hub):
    hub.begin(REQUEST, 0xAB, 3)
    loans = []
    while places := lent(hub, "ab"[len(loans) % 2], room=100):
        loans.append(places)
    assert sum(loans, []) == REQUEST.order, "the longest first"
    assert list(map(len, loans)) == [3, 3, 2, 1, 1, 1, 1]


def test_a_lost_worker_loses_its_groups_and_its_late_result_still_counts_once(hub, clock):
    job = hub.begin(REQUEST, 0xAB, 3)
    mine = lent(hub, "a")
    clock.now = 11
    hub.beat("b", 1)
    assert hub.alive == 1 and lent(hub, "b")[: len(mine)] == mine[::-1]
    assert give(hub, "a", job, mine[0]), "it comes first"
    assert not give(hub, "b", job, mine[0]), "and only once"
    assert hub.alive == 2
    counts = hub.counts()
    assert (counts["lost"], counts["reassigned"], counts["duplicates"], counts["differing"]) == (1, 2, 1, 0)


def test_a_worker_that_beats_and_makes_no_progress_loses_its_groups(hub, clock):
    hub.begin(REQUEST, 0xAB, 3)
    mine = lent(hub, "a")
    for clock.now in range(5, 101, 5):
        hub.beat("a", 7)
        hub.beat("b", 0)
    assert hub.alive == 2
    clock.now = 106
    hub.beat("a", 7)
    assert hub.alive == 1 and mine[0] in lent(hub, "b")
    hub.beat("a", 8)
    assert hub.alive == 2


def test_a_duplicate_with_other_tokens_is_said(hub, clock, capfd):
    job = hub.begin(REQUEST, 0xAB, 3)
    lent(hub, "a")
    assert give(hub, "a", job, 0)
    other = [replace(one, tokens=one.tokens + 1) for one in group_of(REQUEST, 0)]
    assert not hub.complete("b", key(job, 0), other)
    assert (
        hub.counts()["differing"] == 1 and "b sampled other tokens for prompt 100 of step 6" in capfd.readouterr().err
    )


def test_wrong_weights_are_refused_by_name(hub):
    job = hub.begin(REQUEST, 0xAB, 3)
    lent(hub, "a")
    with pytest.raises(Refused, match="a sampled with weights 00000000000000ac, and the trainer has 00000000000000ab"):
        hub.complete("a", key(job, 0, weights=0xAC), group_of(REQUEST, 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": np.array([1, 2, 3, 1000], np.int32)}, "tokens from 1 to 1000; the vocabulary has 1000"),
        ({"tokens": np.array([1], np.int32)}, "a completion of 1 tokens"),
        ({"tokens": np.arange(5, dtype=np.int32)}, "a completion of 5 tokens; the limit is 4"),
        ({"logprobs": np.array([0, 0, 0, np.nan], np.float32)}, "log-probabilities that are positive or not finite"),
        ({"logprobs": np.array([0, 0, 0, 0.1], np.float32)}, "log-probabilities that are positive or not finite"),
        ({"finish_reason": "stop"}, "ends with 'stop' and did not"),
        ({"turns": Turns(np.arange(4) == 2, np.ones(2, np.float32))}, "several turns, and a fleet has no environments"),
    ],
    ids=["vocabulary", "lengths", "limit", "nan", "positive", "stop", "turns"],
)
def test_what_is_no_group_of_the_request_is_refused(hub, change, reason):
    job = hub.begin(REQUEST, 0xAB, 3)
    lent(hub, "a")
    good, bad = group_of(REQUEST, 0)
    with pytest.raises(Refused, match=reason):
        hub.complete("a", key(job, 0), [good, replace(bad, **change)])
    with pytest.raises(Refused, match="1 completions, not 2"):
        hub.complete("a", key(job, 0), [good])


def test_results_of_an_earlier_request_are_late(hub):
    job = hub.begin(REQUEST, 0xAB, 3)
    lent(hub, "a")
    hub.end()
    hub.begin(REQUEST, 0xAB, 3)
    assert not give(hub, "a", job, 0)
    assert hub.counts()["late"] == 1 and lent(hub, "b")[0] == REQUEST.order[0]


def test_a_fault_of_one_worker_is_not_the_rollouts(hub):
    job = hub.begin(REQUEST, 0xAB, 3)
    for _ in range(3):
        hub.release("a", job.number, lent(hub, "a"), "bad chip")
    assert hub.take(job, 0.0) == []
    hub.release("b", job.number, lent(hub, "b"), "bad chip too")
    with pytest.raises(RolloutError, match="failed 4 times: b: bad chip too"):
        hub.take(job, 0.0)
