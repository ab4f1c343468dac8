"""A request that is killed in the middle of its conversations is continued by a new process, to the bit."""

import types

import numpy as np
import pytest

from examples.guessing import DIGITS, Problems
from rpg_jax.environments import Declaration
from rpg_jax.environments.player import Player
from rpg_jax.environments.stage import Stage
from rpg_jax.rollout import GroupJournal, Request, Rollout
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Completion, Sampling, Turns

PROBLEMS = Problems().problems("train", 6)
STOP = 0


class Killed(Exception):
    pass


class Guesser(Rollout):
    """All conversations take a turn at a time. A guess depends on the prompt's id, the index and the turn alone."""

    def __init__(self, dies_at=-1):
        self.weights = types.SimpleNamespace(version=1, checksum=lambda: 1)
        self.asked, self.dies_at = [], dies_at

    def sample(self, request):
        live = {(p, i): ([], [], []) for p in range(len(PROBLEMS)) if p not in request.done for i in range(2)}
        made = {}
        while live:
            for key in [*live]:
                completion = self.turn(request, key, *live[key])
                if completion is not None:
                    made[key] = completion
                    del live[key]
                    if {(key[0], 0), (key[0], 1)} <= {*made}:
                        request.on_group(key[0], [made[key[0], i] for i in range(2)])
        return [[made[p, i] for i in range(2)] if (p, 0) in made else [] for p in range(len(PROBLEMS))]

    def turn(self, request, key, tokens, observed, paid):
        self.asked.append(key)
        if len(self.asked) == self.dies_at:
            raise Killed
        place, index = key
        low, high = (DIGITS.index(PROBLEMS[place].prompt[at]) for at in (0, 2))
        guess = np.random.default_rng([request.prompt_ids[place], index, len(paid)]).integers(low, high + 1)
        said = np.array([ord(DIGITS[guess]), STOP], np.int32)
        reply = request.environment.respond(place, index, said, "stop").result(30)
        heard = [] if reply.tokens is None else reply.tokens.tolist()
        tokens += [*said.tolist(), *heard]
        observed += [False, False, *(True for _ in heard)]
        paid.append(reply.reward)
        if heard:
            return None
        turns = Turns(np.array(observed), np.array(paid, np.float32), reply.error)
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 1, turns=turns)


@pytest.fixture(scope="module")
def stage():
    with Stage(Declaration("examples.guessing:Game", pooled=False), {"base": 36}) as stage:
        yield stage


def process(stage, folder, own):
    """The conversations of a process of its own, as plain values."""
    observations = types.SimpleNamespace(
        encode=lambda messages: np.array([ord(c) for m in messages for c in m["content"]])
    )
    player = Player(stage, lambda ids: "".join(map(chr, ids)), observations, PROBLEMS, max_turns=4, turn_tokens=3)
    journal = Journal(folder, max_bytes=1 << 20)
    ids = [p.prompt_id for p in PROBLEMS]
    prompts = [np.array([ord(c) for c in p.prompt]) for p in PROBLEMS]
    request = Request(prompts, ids, 2, Sampling(max_tokens=16), 0, 1, environment=player, on_group=lambda *_: None)
    try:
        groups = own.generate(request, GroupJournal(journal, {}))
    finally:
        journal.close()
    return [[(c.tokens.tolist(), c.turns.observed.tolist(), c.turns.rewards.tolist()) for c in g] for g in groups]


def test_conversations_that_a_kill_cut_short_are_played_again_and_the_others_are_found(stage, tmp_path):
    whole = Guesser()
    expected = process(stage, tmp_path / "whole", whole)
    for dies_at in (1, len(whole.asked) - 3, len(whole.asked)):
        folder = tmp_path / str(dies_at)
        with pytest.raises(Killed):
            process(stage, folder, Guesser(dies_at))
        again = Guesser()
        assert process(stage, folder, again) == expected, dies_at
        kept = {key[0] for key in whole.asked} - {key[0] for key in again.asked}
        assert (len(kept) > 0) == (dies_at > 1), dies_at
    assert any(len(rewards) > 1 and rewards[-1] > 0 for group in expected for _, _, rewards in group)
