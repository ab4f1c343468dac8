"""Prompts become scored groups, in order, while others are still being sampled."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.data.groups import groups_to_bytes
from rpg_jax.rewards.scorer import Scores
from rpg_jax.rollout import Split
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.types import Completion, Sampling


def encode(problem):
    return np.array([ord(c) for c in problem.prompt])


def decode(ids):
    return "".join(chr(i) for i in ids)


class FakeRollout:
    """Completes "ab" with "ab0.", "ab1.", … where "." is the stop token; the last completion runs out of length. Groups
    are complete from the last to the first."""

    split = Split.SHARE

    def generate(self, request, journal=None):
        def one(prompt, index):
            stopped = index < request.group_size - 1
            tokens = [*prompt, ord(str(index)), *([ord(".")] if stopped else [])]
            return Completion(np.array(tokens), np.zeros(len(tokens)), "stop" if stopped else "length", 0)

        groups = [[one(prompt, g) for g in range(request.group_size)] for prompt in request.prompts]
        for place in reversed(range(len(groups))):
            request.on_group(place, groups[place])
        return groups


def scores(texts, errors=()):
    """The length of each text."""
    length = np.array([len(t) for t in texts], np.float32)
    return Scores(length, -length, np.ones(len(texts), np.float32), {"length": length}, dict(errors))


def generator(rollout, scorer, seed=0, **options):
    return GroupGenerator(rollout, encode, decode, scorer, group_size=2, sampling=Sampling(), seed=seed, **options)


PROBLEMS = [Problem(7, "a", "", "t"), Problem(9, "bc", "", "t")]


def test_the_stop_token_is_not_scored_but_counts_as_length():
    asked = []

    def scorer(problems, texts, lengths, turns):
        asked.extend(zip([p.prompt_id for p in problems], texts, lengths, strict=True))
        return scores(texts)

    generator(FakeRollout(), scorer)(PROBLEMS, step=0)
    expected = [(7, "a0", 3), (7, "a1", 2), (9, "bc0", 4), (9, "bc1", 3)]
    assert sorted(asked) == expected


def test_groups_are_in_the_order_of_their_problems_whichever_is_complete_first():
    groups = generator(FakeRollout(), lambda problems, texts, *_: scores(texts))(PROBLEMS, step=0)
    assert [g.problem.prompt_id for g in groups] == [7, 9] and groups[1].texts == ["bc0", "bc1"]
    assert [g.rewards.tolist() for g in groups] == [[2, 2], [3, 3]]
    assert [g.parts.tolist() for g in groups] == [[[2], [2]], [[3], [3]]]


def test_failed_verdicts_are_counted_until_they_are_taken():
    asked = generator(FakeRollout(), lambda problems, texts, *_: scores(texts, {"timeout": len(texts)}))
    asked(PROBLEMS, step=0)
    asked(PROBLEMS[:1], step=0)
    assert asked.take_errors() == {"timeout": 6} and asked.take_errors() == {}


def test_a_complete_group_is_scored_while_others_are_still_sampled():
    scored = threading.Event()

    class Rollout(FakeRollout):
        def generate(self, request, journal=None):
            def then_wait(place, group):
                request.on_group(place, group)
                assert scored.wait(60)

            return super().generate(replace(request, on_group=then_wait))

    def scorer(problems, texts, lengths, turns):
        scored.set()
        return scores(texts)

    assert len(generator(Rollout(), scorer)(PROBLEMS, step=0)) == 2


def test_every_group_that_is_complete_and_every_verdict_is_a_heartbeat(monkeypatch):
    beats, seen = [], []

    class Rollout(FakeRollout):
        def generate(self, request, journal=None):
            def watched(place, group):
                before = len(beats)
                request.on_group(place, group)
                seen.append(len(beats) > before)

            return super().generate(replace(request, on_group=watched))

    def scorer(problems, texts, lengths, turns):
        return scores(texts)

    monkeypatch.setattr("rpg_jax.training.generate.beat", lambda: beats.append(threading.current_thread().name))
    generator(Rollout(), scorer)(PROBLEMS, step=0)
    assert seen == [True, True] and any(name.startswith("scoring") for name in beats)


def test_what_scoring_raises_is_raised_by_the_call_and_the_next_one_is_right():
    faults = [ValueError("no verifier for this source")]

    def scorer(problems, texts, lengths, turns):
        if faults:
            raise faults.pop()
        return scores(texts)

    generate = generator(FakeRollout(), scorer)
    with pytest.raises(ValueError, match="no verifier"):
        generate(PROBLEMS, step=0)
    assert len(generate(PROBLEMS, step=0)) == 2


def test_another_draw_is_another_seed_for_the_same_step():
    seeds = []

    class Rollout(FakeRollout):
        def generate(self, request, journal=None):
            seeds.append((request.seed, request.step))
            return super().generate(request)

    generate = generator(Rollout(), lambda problems, texts, *_: scores(texts), seed=3)
    for draw in (0, 1, 2):
        generate(PROBLEMS[:1], step=5, draw=draw)
    assert seeds[0] == (3, 5) and len(set(seeds)) == 3 and {step for _, step in seeds} == {5}


def test_the_mean_lengths_of_a_prompt_are_expected_of_it_later_and_not_where_the_first_groups_are_kept():
    """The first groups that are complete would then depend on what was sampled before."""
    asked = []

    class Rollout(FakeRollout):
        def generate(self, request, journal=None):
            asked.append(request.expected)
            return super().generate(request)

    generate = generator(Rollout(), lambda problems, texts, *_: scores(texts))
    generate(PROBLEMS[1:], step=0)
    generate(PROBLEMS, step=1)
    assert asked == [[None], [None, 3.5]]
    asked.clear()
    generate = generator(Rollout(), lambda problems, texts, *_: scores(texts), by_length=False)
    for step in (0, 1):
        generate(PROBLEMS, step=step)
    assert asked == [[None, None]] * 2


def test_each_process_scores_what_it_took_and_all_have_all_groups_in_order(monkeypatch):
    """Two processes; the other one took the prompts at the first and the last of five places."""
    problems = [Problem(n, "abcde"[n], "", "t") for n in range(5)]

    class Rollout(FakeRollout):
        split, sent = Split.TAKEN, []

        def generate(self, request, journal=None):
            def mine(place, group):
                if 0 < place < 4:
                    request.on_group(place, group)

            assert len(request.prompts) == 5
            return super().generate(replace(request, on_group=mine))

        def exchange(self, value):
            self.sent.append(value)
            return [value, others[len(self.sent) - 1]]

    def scorer(problems, texts, *_):
        scored.extend(texts)
        return scores(texts, {"timeout": 1})

    scored = []
    made = generator(FakeRollout(), lambda problems, texts, *_: scores(texts))(problems, step=0)
    others = [json.dumps([{"timeout": 2}, [0, 4]]).encode(), groups_to_bytes([made[0], made[4]])]
    monkeypatch.setattr("jax.process_count", lambda: 2)
    generate = generator(Rollout(), scorer)
    groups = generate(problems, step=0)
    assert [g.problem.prompt_id for g in groups] == [0, 1, 2, 3, 4] and sorted(scored)[0] == "b0" and len(scored) == 6
    assert [g.texts for g in groups] == [g.texts for g in made]
    errors = generate.take_errors()["timeout"]
    assert errors >= 3, "of both"
