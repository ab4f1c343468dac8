"""With a journal, or a list that hosts share, completions are those of the driver alone, and none is sampled twice."""

import contextlib
import itertools
import json
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.parallel import hosts
from rpg_jax.rollout import Feedable, GroupJournal, Request, Split
from rpg_jax.rollout.request import Reply
from rpg_jax.rollout.rollout import parcels_of, sample_from_shared_list
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion, Sampling, Turns

PROMPTS = [np.arange(1, n, dtype=np.int32) for n in (3, 5, 2, 4)]
REQUEST = Request(PROMPTS, [10, 11, 12, 13], group_size=2, sampling=Sampling(max_tokens=4), seed=1, step=6)


class Fake(Feedable):
    """Completes prompt p of step s with [p, s, seed, index]; counts what it samples."""

    def __init__(self, version=3, checksum=0xAB, logprob=-1.0, error=None, split=Split.SHARE):
        self.weights = types.SimpleNamespace(version=version, checksum=lambda: checksum)
        self.logprob, self.split, self.sampled = logprob, split, []
        self.turns = Turns(np.array([False, False, True, False]), np.ones(2, np.float32), error)

    @contextlib.contextmanager
    def begin(self, request):
        made = self._complete(request)
        yield lambda: made

    has_room = True

    def _complete(self, request):
        groups = [[] for _ in request.prompts]
        for place in [p for p in range(len(groups)) if p not in request.done]:
            groups[place] = [
                Completion(
                    np.array([request.prompt_ids[place], request.step, request.seed, i], np.int32),
                    np.full(4, self.logprob, np.float32),
                    "length",
                    self.weights.version,
                    turns=self.turns,
                )
                for i in range(request.group_size)
            ]
            self.sampled.append(request.prompt_ids[place])
            request.on_group(place, groups[place])
        return groups


def process(folder, request=REQUEST, own=None, **settings):
    """(tokens, prompts sampled, places told) of a process of its own."""
    own, told = own or Fake(), []
    journal = Journal(folder, max_bytes=1 << 20)
    request = replace(request, on_group=lambda place, group: told.append((place, group)))
    groups = own.generate(request, GroupJournal(journal, settings))
    journal.close()
    assert all(groups[place] == group for place, group in told)
    return [[c.tokens.tolist() for c in group] for group in groups], own.sampled, sorted(place for place, _ in told)


def part(*places):
    return replace(REQUEST, prompts=[PROMPTS[i] for i in places], prompt_ids=[10 + i for i in places])


def test_a_second_process_samples_only_what_is_missing(tmp_path):
    process(tmp_path, part(0, 2))
    groups, sampled, told = process(tmp_path)
    assert sampled == [11, 13] and told == [0, 1, 2, 3]
    assert (groups, [], told) == process(tmp_path), "a third process finds everything"
    assert groups == [[[10 + p, 6, 1, i] for i in range(2)] for p in range(4)]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"step": 7},
        {"group_size": 1},
        {"sampling": Sampling(0.9, max_tokens=4)},
        {"sampling": Sampling(max_tokens=4, stop_token_ids=(0,))},
        {"prompts": [prompt + 1 for prompt in PROMPTS]},
        {"prompt_ids": [20, 21, 22, 23]},
    ],
    ids=["seed", "step", "group size", "temperature", "stop tokens", "prompts", "prompt ids"],
)
def test_another_request_is_sampled_afresh(tmp_path, change):
    process(tmp_path)
    assert len(process(tmp_path, replace(REQUEST, **change))[1]) == 4


@pytest.mark.parametrize("change", [{"version": 4}, {"checksum": 0xAC}], ids=lambda change: next(iter(change)))
def test_groups_of_other_weights_are_sampled_afresh(tmp_path, change):
    process(tmp_path)
    assert len(process(tmp_path, own=Fake(**change))[1]) == 4


def test_groups_of_another_driver_are_sampled_afresh(tmp_path):
    process(tmp_path, driver="lockstep")
    assert len(process(tmp_path, driver="orchestrator")[1]) == 4


def test_a_group_that_stops_the_run_is_not_found_by_the_next(tmp_path):
    process(tmp_path, own=Fake(logprob=np.nan))
    assert process(tmp_path)[1] == [10, 11, 12, 13]


@pytest.mark.parametrize(("error", "asked_again"), [("timeout", True), ("crash", True), ("error", False)])
def test_a_failure_of_an_environment_that_may_be_chance_is_not_found_by_the_next(tmp_path, error, asked_again):
    process(tmp_path, own=Fake(error=error))
    assert process(tmp_path)[1] == ([10, 11, 12, 13] if asked_again else [])


def test_hosts_that_sample_together_use_what_all_of_them_have_found_and_keep_every_nth_group(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(hosts, "all_gather_bytes", lambda mine: [mine, b"[0, 1, 2, 3]"])
    assert process(tmp_path, own=Fake(split=Split.TOGETHER))[1] == [10, 11, 12, 13]
    assert process(tmp_path, own=Fake(split=Split.TOGETHER))[1] == [11, 13], "the other host's file has these"
    monkeypatch.setattr(hosts, "all_gather_bytes", lambda mine: [mine, b"[2, 3]"])
    assert process(tmp_path, own=Fake(split=Split.TOGETHER))[1] == [10, 11, 13]


@pytest.mark.parametrize("others", [[], [0, 3], [1], [0, 1, 2, 3]], ids=["none", "the same", "another", "all"])
@pytest.mark.parametrize("host", [0, 1])
def test_of_hosts_that_take_prompts_one_returns_each_group_that_was_found(tmp_path, monkeypatch, others, host):
    """This host's journal has places 0 and 3."""
    process(tmp_path, part(0, 3))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.process_index", lambda: host)
    monkeypatch.setattr(hosts, "all_gather_bytes", lambda mine: [mine, json.dumps(others).encode()][:: 1 - 2 * host])
    numbers = itertools.count()
    monkeypatch.setattr(hosts, "SharedCounter", lambda: types.SimpleNamespace(draw=lambda: next(numbers)))
    groups, sampled, told = process(tmp_path, own=Fake(split=Split.TAKEN))
    found = {0, 3}.union(others)
    assert sorted(sampled) == [10 + place for place in range(4) if place not in found]
    by_both = {place for place in (0, 3) if place in others}
    mine = {0, 3} - by_both | {place for place in by_both if place % 2 == host}
    assert told == sorted(mine.union(set(range(4)) - found)) == [place for place in range(4) if groups[place]]


HOSTS, GROUP = 2, 2


def numbered(prompts, **options):
    """Prompt p has p % 5 + 1 tokens."""
    texts = [np.arange(1, p % 5 + 2, dtype=np.int32) for p in range(prompts)]
    return Request(texts, [100 + p for p in range(prompts)], GROUP, Sampling(max_tokens=4), 1, 6, **options)


class Host(Feedable):
    """Completes prompt p with [p, length of p, index], each request in a thread; `before` runs before every one.

    It has room while it samples fewer than `slots` completions.
    """

    def __init__(self, slots=8, before=lambda ids: None):
        self.weights, self.calls, self.given_up = types.SimpleNamespace(), [], 0
        self._slots, self._before, self._sampling = slots, before, 0

    @contextlib.contextmanager
    def begin(self, request):
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

        for rollout in rollouts:
            rollout.split = Split.TAKEN
        with ThreadPoolExecutor(len(rollouts)) as pool:
            return list(pool.map(one, rollouts, told)), told

    return call


def tokens(group):
    return [c.tokens.tolist() for c in group]


@pytest.mark.parametrize("prompts", [1, 7, 80])
def test_every_prompt_is_sampled_once_and_every_group_is_in_its_place(together, prompts):
    asked = numbered(prompts)
    (first, second), told = together([Host(), Host()], asked)
    alone = [tokens(group) for group in Host().generate(replace(asked, on_group=lambda *_: None))]
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

    slow = Host(slots=2 * GROUP, before=lambda ids: done.wait(60))
    (first, second), _ = together([slow, Host(slots=1, before=fast)], numbered(80))
    assert done.is_set() and len(slow.calls) == 2, "what its slots take"
    assert sum(map(bool, first)) == 2 and sum(map(bool, second)) == 78


def test_no_host_takes_more_than_its_part_at_once_though_it_has_slots_for_all(together):
    may_end = threading.Event()
    own = Host(slots=1000, before=lambda ids: may_end.wait(60))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(together, [own], numbered(8))
        while len(own.calls) < 4:
            time.sleep(0.001)
        time.sleep(0.1)  # many looks
        assert len(own.calls) == 4
        may_end.set()
        running.result()
    assert len(own.calls) == 8, "the other host never came"


def test_the_longest_expected_completions_are_taken_first(together):
    asked = numbered(6, expected=[5, None, 9, 1, 30, None])
    own = Host(slots=1)
    together([own], asked)
    assert own.calls == [[100 + place] for place in (4, 1, 5, 2, 0, 3)], "unknown is the mean, 11.25; then long prompts"


def test_groups_that_are_done_are_not_sampled_and_leave_the_parcels_as_they_are(together):
    parcels = parcels_of(numbered(300))
    assert all(len(parcel) == 2 for parcel in parcels)
    done = frozenset([*parcels[0], parcels[1][0]])
    one, other = Host(), Host()
    asked = numbered(300, done=done)
    assert parcels_of(asked) == parcels
    together([one, other], asked)
    calls = sorted(one.calls + other.calls)
    expected = [[100 + place for place in parcel if place not in done] for parcel in parcels[1:]]
    assert calls == sorted(expected)


def test_parcels_are_small_parts_of_a_hosts_work_and_have_prompts_of_like_length(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 16)
    for prompts, size in [(1536, 1), (5000, 4), (10, 1)]:
        parcels = parcels_of(numbered(prompts))
        assert {len(parcel) for parcel in parcels[:-1]} <= {size} and sorted(sum(parcels, [])) == list(range(prompts))
        lengths = [place % 5 for parcel in parcels for place in parcel]
        assert lengths == sorted(lengths, reverse=True)


def test_an_environment_hears_the_places_of_the_whole_request(together):
    class Environment:
        turn_tokens = 3

        def respond(self, place, index, turn, reason):
            reply = Future()
            reply.set_result(Reply(None, reward=place))
            return reply

    asked = numbered(80, environment=Environment())
    (first, second), _ = together([Host(), Host()], asked)
    rewards = [(a or b)[0][2] for a, b in zip(first, second, strict=True)]
    assert rewards == list(range(80))


def test_a_fault_gives_up_all_requests_of_its_host(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: HOSTS)

    class Ends(Host):
        @property
        def has_room(self):
            if len(self.calls) == 3:
                raise RuntimeError("the threads have ended")
            return True

    own = Ends()
    own.split = Split.TAKEN
    monkeypatch.setattr(hosts, "SharedCounter", lambda: types.SimpleNamespace(draw=lambda: len(own.calls)))
    with pytest.raises(RuntimeError, match="the threads have ended"):
        own.generate(numbered(80, on_group=lambda *_: None))
    assert len(own.calls) == own.given_up == 3


def test_over_the_real_engine_the_completions_are_those_of_the_oracle(build, work, expected, is_same):
    own = build("orchestrator", 2)
    assert is_same(sample_from_shared_list(own, work), expected)
    with own.begin(work) as completions:
        assert not own.has_room, "more completions than slots"
        assert is_same(completions(), expected) and own.has_room
    own.close()
