"""Hosts that take prompts from one list sample each of them once, and who is slow takes few."""

import contextlib
import itertools
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.parallel import hosts
from rpg_jax.rollout import Feedable, Request, SharedRollout
from rpg_jax.rollout.request import Reply
from rpg_jax.rollout.shared import parcels_of
from rpg_jax.types import Completion, Sampling

HOSTS, GROUP = 2, 2


def request(prompts, **options):
    """Prompt p has p % 5 + 1 tokens."""
    texts = [np.arange(1, p % 5 + 2, dtype=np.int32) for p in range(prompts)]
    return Request(texts, [100 + p for p in range(prompts)], GROUP, Sampling(max_tokens=4), 1, 6, **options)


class Fake(Feedable):
    """Completes prompt p with [p, length of p, index], each request in a thread; `before` runs before every one.

    It has room while it samples fewer than `slots` completions.
    """

    def __init__(self, slots=8, before=lambda ids: None):
        self.weights, self.calls, self.given_up = types.SimpleNamespace(), [], 0
        self._slots, self._before, self._sampling = slots, before, 0

    def generate(self, request):
        with self.begun(request) as completions:
            return completions()

    @contextlib.contextmanager
    def begun(self, request):
        sampled = [i for i in range(len(request.prompts)) if i not in request.done]
        self.calls.append([request.prompt_ids[i] for i in sampled])
        self._sampling += GROUP * len(sampled)
        with ThreadPoolExecutor(1) as thread:
            try:
                yield thread.submit(self._sample, request, sampled).result
            except BaseException:
                self.given_up += 1
                raise

    @property
    def has_room(self):
        return self._sampling < self._slots

    def _sample(self, request, sampled):
        self._before([request.prompt_ids[i] for i in sampled])
        groups = [[] for _ in request.prompts]
        for i in sampled:
            tokens = [request.prompt_ids[i], len(request.prompts[i])]
            if request.environment is not None:
                tokens.append(request.environment.respond(i, 0, np.zeros(1), "stop").result().reward)
            groups[i] = [
                Completion(np.array([*tokens, index]), np.zeros(len(tokens) + 1, np.float32), "length", 0)
                for index in range(request.group_size)
            ]
            request.on_group(i, groups[i])
        self._sampling -= GROUP * len(sampled)
        return groups


@pytest.fixture
def together(monkeypatch):
    """Calls `generate` of one host each at the same time; gives what each returns, and (place, tokens) it was told."""
    monkeypatch.setattr("jax.process_count", lambda: HOSTS)

    def call(rollouts, asked):
        numbers = itertools.count()
        monkeypatch.setattr(hosts, "SharedCounter", lambda: types.SimpleNamespace(draw=lambda: next(numbers)))
        told = [[] for _ in rollouts]

        def one(rollout, heard):
            def hear(place, group):
                heard.append((place, tokens(group)))

            return [tokens(group) for group in rollout.generate(replace(asked, on_group=hear))]

        with ThreadPoolExecutor(len(rollouts)) as pool:
            return list(pool.map(one, rollouts, told)), told

    return call


def tokens(group):
    return [c.tokens.tolist() for c in group]


@pytest.mark.parametrize("prompts", [1, 7, 80])
def test_every_prompt_is_sampled_once_and_every_group_is_in_its_place(together, prompts):
    asked = request(prompts)
    (first, second), told = together([SharedRollout(Fake()), SharedRollout(Fake())], asked)
    alone = [tokens(group) for group in Fake().generate(replace(asked, on_group=lambda *_: None))]
    assert all((a == []) != (b == []) for a, b in zip(first, second, strict=True)), "one host has each group"
    assert [a or b for a, b in zip(first, second, strict=True)] == alone
    for found, heard in zip((first, second), told, strict=True):
        assert sorted(heard) == [(place, group) for place, group in enumerate(found) if group]


def test_a_host_that_is_slow_leaves_the_rest_to_the_others(together):
    left, done = [0], threading.Event()

    def fast(ids):
        left[0] += len(ids)
        if left[0] == 80 - GROUP:  # all but what the slow one has taken
            done.set()

    slow = Fake(slots=2 * GROUP, before=lambda ids: done.wait(60))
    (first, second), _ = together([SharedRollout(slow), SharedRollout(Fake(slots=1, before=fast))], request(80))
    assert done.is_set() and len(slow.calls) == 2, "what its slots take"
    assert sum(map(bool, first)) == 2 and sum(map(bool, second)) == 78


def test_no_host_takes_more_than_its_part_at_once_though_it_has_slots_for_all(together):
    may_end = threading.Event()
    own = Fake(slots=1000, before=lambda ids: may_end.wait(60))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(together, [SharedRollout(own)], request(8))
        while len(own.calls) < 4:
            time.sleep(0.001)
        time.sleep(0.1)  # many looks
        assert len(own.calls) == 4
        may_end.set()
        running.result()
    assert len(own.calls) == 8, "the other host never came"


def test_the_longest_expected_completions_are_taken_first(together):
    asked = request(6, expected=[5, None, 9, 1, 30, None])
    own = Fake(slots=1)
    together([SharedRollout(own)], asked)
    assert own.calls == [[100 + place] for place in (4, 1, 5, 2, 0, 3)], "unknown is the mean, 11.25; then long prompts"


def test_groups_that_are_done_are_not_sampled_and_leave_the_parcels_as_they_are(together):
    parcels = parcels_of(request(300))
    assert all(len(parcel) == 2 for parcel in parcels)
    done = frozenset([*parcels[0], parcels[1][0]])
    one, other = Fake(), Fake()
    asked = request(300, done=done)
    assert parcels_of(asked) == parcels
    together([SharedRollout(one), SharedRollout(other)], asked)
    calls = sorted(one.calls + other.calls)
    expected = [[100 + place for place in parcel if place not in done] for parcel in parcels[1:]]
    assert calls == sorted(expected)


def test_parcels_are_small_parts_of_a_hosts_work_and_have_prompts_of_like_length(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 16)
    for prompts, size in [(1536, 1), (5000, 4), (10, 1)]:
        parcels = parcels_of(request(prompts))
        assert {len(parcel) for parcel in parcels[:-1]} <= {size} and sorted(sum(parcels, [])) == list(range(prompts))
        lengths = [place % 5 for parcel in parcels for place in parcel]
        assert lengths == sorted(lengths, reverse=True)


def test_with_enough_each_host_asks_for_its_own(together):
    """Which groups are first is then each host's own matter."""
    one, other = Fake(), Fake()
    together([SharedRollout(one), SharedRollout(other)], request(6, enough=2))
    assert one.calls == other.calls == [[100 + p for p in range(6)]]


def test_an_environment_hears_the_places_of_the_whole_request(together):
    class Environment:
        turn_tokens = 3

        def respond(self, place, index, turn, reason):
            reply = Future()
            reply.set_result(Reply(None, reward=place))
            return reply

    asked = request(80, environment=Environment())
    (first, second), _ = together([SharedRollout(Fake()), SharedRollout(Fake())], asked)
    rewards = [(a or b)[0][2] for a, b in zip(first, second, strict=True)]
    assert rewards == list(range(80))


def test_a_fault_gives_up_all_requests_of_its_host(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: HOSTS)

    class Ends(Fake):
        @property
        def has_room(self):
            if len(self.calls) == 3:
                raise RuntimeError("the threads have ended")
            return True

    own = Ends()
    monkeypatch.setattr(hosts, "SharedCounter", lambda: types.SimpleNamespace(draw=lambda: len(own.calls)))
    with pytest.raises(RuntimeError, match="the threads have ended"):
        SharedRollout(own).generate(request(80, on_group=lambda *_: None))
    assert len(own.calls) == own.given_up == 3


def test_over_the_real_engine_the_completions_are_those_of_the_oracle(build, work, expected, is_same):
    own = build("orchestrator", 2)
    assert is_same(SharedRollout(own).generate(work), expected)
    with own.begun(work) as completions:
        assert not own.has_room, "more completions than slots"
        assert is_same(completions(), expected) and own.has_room
    own.close()
