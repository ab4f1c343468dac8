"""A rollout with a journal gives the completions of one without, and samples only the groups that are missing."""

import json
import types
from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.parallel import hosts
from rpg_jax.rollout import Request, Split
from rpg_jax.rollout.journaled import JournaledRollout
from rpg_jax.rollout.request import Rollout
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion, Sampling, Turns

PROMPTS = [np.arange(1, n, dtype=np.int32) for n in (3, 5, 2, 4)]
REQUEST = Request(PROMPTS, [10, 11, 12, 13], group_size=2, sampling=Sampling(max_tokens=4), seed=1, step=6)


class Fake(Rollout):
    """Completes prompt p of step s with [p, s, seed, index]; counts what it samples."""

    def __init__(self, version=3, checksum=0xAB, logprob=-1.0, error=None, split=Split.SHARE):
        self.weights = types.SimpleNamespace(version=version, checksum=lambda: checksum)
        self.logprob, self.split, self.sampled = logprob, split, []
        self.turns = Turns(np.array([False, False, True, False]), np.ones(2, np.float32), error)

    def generate(self, request):
        groups = [[] for _ in request.prompts]
        for place in [p for p in range(len(groups)) if p not in request.done][: request.enough]:
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
    rollout = JournaledRollout(own, journal, settings)
    groups = rollout.generate(replace(request, on_group=lambda place, group: told.append((place, group))))
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


def test_with_enough_the_journal_serves_once_it_has_all_that_are_wanted(tmp_path):
    """Otherwise which of the others are first would depend on what was complete before."""
    some = replace(REQUEST, enough=3)
    process(tmp_path, part(3))
    assert process(tmp_path, some)[1:] == ([10, 11, 12], [0, 1, 2])
    groups, sampled, told = process(tmp_path, replace(REQUEST, enough=2))
    assert sampled == [] and told == [0, 1] and groups[2:] == [[], []]
    assert process(tmp_path, replace(REQUEST, enough=0)) == ([[]] * 4, [], [])


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
    groups, sampled, told = process(tmp_path, own=Fake(split=Split.TAKEN))
    found = {0, 3}.union(others)
    assert sampled == [10 + place for place in range(4) if place not in found]
    by_both = {place for place in (0, 3) if place in others}
    mine = {0, 3} - by_both | {place for place in by_both if place % 2 == host}
    assert told == sorted(mine.union(set(range(4)) - found)) == [place for place in range(4) if groups[place]]
