"""From problems to scored conversations, with a rollout that says what a script says."""

import numpy as np

from rpg_jax import rewards
from rpg_jax.data.groups import last_shown
from rpg_jax.environments.player import Observations, Player
from rpg_jax.rollout import Split
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.types import Completion, Sampling, Turns
from tests.environments.conftest import say


class Scripted:
    """A rollout that only asks. Completion i of every prompt says the turns of `script[i]`."""

    split = Split.SHARE

    def __init__(self, script, tokenizer):
        self.script, self.tokenizer = script, tokenizer

    def generate(self, request, journal=None):
        groups = [[self.play(request, place, i) for i in range(2)] for place in range(len(request.prompts))]
        for place, group in enumerate(groups):
            request.on_group(place, group)
        return groups

    def play(self, request, place, index):
        tokens, observed, paid = [], [], []
        for text in self.script[index]:
            turn = say(self.tokenizer, text)
            reply = request.environment.respond(place, index, turn, "stop").result(30)
            read = [] if reply.tokens is None else reply.tokens.tolist()
            tokens, observed = [*tokens, *turn.tolist(), *read], observed + [False] * len(turn) + [True] * len(read)
            paid.append(reply.reward)
            if reply.tokens is None:
                break
        turns = Turns(np.array(observed), np.array(paid, np.float32), reply.error)
        return Completion(np.array(tokens), np.zeros(len(tokens), np.float32), "stop", 0, turns=turns)


def test_groups_have_the_rewards_of_their_turns_and_texts_with_marks(stage, tokenizer, problems):
    def play(asked):
        return Player(
            stage, tokenizer.decode, Observations(tokenizer, thinking=True), asked, max_turns=3, turn_tokens=9
        )

    rollout, played, lengths = Scripted([["1", "5"], ["code: 1 // 0"]], tokenizer), [], []
    with rewards.Scorer("environment", right_above=0.0) as scorer:
        sizes = {"group_size": 2, "sampling": Sampling(), "seed": 0}
        made = GroupGenerator(
            rollout, lambda p: say(tokenizer, p.prompt), tokenizer.decode,
            lambda *told, **turns: lengths.extend(told[3]) or scorer(*told, **turns), **sizes,
            play=lambda asked: played.append(asked) or play(asked),
        )  # fmt: skip
        groups = made(problems, step=0)
        assert made.take_errors() == {}, "the turns have them"
    assert played == [problems]
    spoken = [sum(len(say(tokenizer, text)) for text in turns) for turns in rollout.script]
    assert lengths == spoken * len(problems), "of the policy alone"
    for group in groups:
        assert group.rewards.tolist() == [0.5, 0.0] and group.accuracy.tolist() == [1, 0]
        assert group.failures == [None, "error"]
        text = "1\n<observation>\nuser\n5 left\nassistant\n</observation>\n5"
        assert group.texts == [text, "code: 1 // 0"] and last_shown(text) == "5"
