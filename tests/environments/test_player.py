"""A rollout that only asks: conversations, limits, environments that hang, die or lie, and scored groups."""

import dataclasses

import numpy as np
import pytest

from rpg_jax.data.groups import last_shown
from rpg_jax.environments.environment import Declaration
from rpg_jax.environments.player import Observations, Player
from rpg_jax.environments.stage import Stage
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rollout import Split
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.types import Completion, Sampling, Turns
from tests.environments.conftest import say


@pytest.fixture
def player(stage, tokenizer, problems):
    return make(stage, tokenizer, problems)


def make(stage, tokenizer, problems, max_turns=4):
    observations = Observations(tokenizer, thinking=True)
    return Player(stage, tokenizer.decode, observations, problems, max_turns=max_turns, turn_tokens=9)


def ask(player, tokenizer, text, key=(0, 0), stop=True):
    reply = player.respond(*key, say(tokenizer, text, stop), "stop" if stop else "length").result(30)
    return reply.tokens if reply.tokens is None else text_of(tokenizer, reply.tokens), reply.reward, reply.error


def text_of(tokenizer, tokens):
    return tokenizer._model.decode(tokens.tolist(), skip_special_tokens=False)


def left(number):
    return f"\n<|im_start|>user\n{number} left<|im_end|>\n<|im_start|>assistant\n"


def test_conversations_are_kept_apart_and_the_environment_finds_what_it_noted(pooled, tokenizer, problems):
    player = make(pooled, tokenizer, problems)
    assert ask(player, tokenizer, "1") == (left(5), -0.5, None)
    assert ask(player, tokenizer, "2", key=(0, 1)) == (left(4), -0.5, None)
    assert ask(player, tokenizer, "3") == (left(2), -0.5, None)
    assert ask(player, tokenizer, "4", key=(0, 1)) == (None, 1.0, None)
    assert ask(player, tokenizer, "9") == (None, 0.0, None)


def test_the_last_turn_and_one_that_is_cut_off_are_paid_for_and_not_answered(stage, tokenizer, problems):
    player = make(stage, tokenizer, problems, max_turns=2)
    assert ask(player, tokenizer, "1")[0] is not None
    assert ask(player, tokenizer, "1") == (None, -0.5, None)
    assert ask(player, tokenizer, "1", key=(1, 0), stop=False) == (None, -0.5, None)


@pytest.mark.parametrize(
    ("text", "stop", "out"), [("1", True, True), ("6", True, False), ("9", True, False), ("1", False, False)]
)
def test_only_what_the_environment_would_have_continued_is_out_of_turns(stage, tokenizer, problems, text, stop, out):
    """Not where it is done, or where the limit of tokens has cut off the turn."""
    player = make(stage, tokenizer, problems, max_turns=1)
    reply = player.respond(0, 0, say(tokenizer, text, stop), "stop" if stop else "length").result(30)
    assert (reply.tokens, reply.out_of_turns) == (None, out)


KILLED = {
    "code: __import__('time').sleep(1000)": "timeout",
    "code: 10**10**10": "timeout",
    "code: __import__('os')._exit(0)": "crash",
    "code: __import__('ctypes').string_at(0)": "crash",
    "code: 'x' * 10**10": "memory",
    "code: open('/tmp/attacked', 'w')": "forbidden",
}
LIES = {
    "code: 1 // 0": "error",
    "code: next(iter([]))": "error",
    "code: exit()": "error",
    "code: exit(type('Unreadable', (), {'__str__': None})())": "error",
    "code: Turn('x', float('nan'))": "value",
    "code: Turn('x', 1e9)": "value",
    "code: Turn('x', '1')": "value",
    "code: Turn('x' * 2**21)": "value",
    "code: Turn('\\ud800')": "value",
    "code: Turn('')": None,
    "code: Turn([])": "value",
    "code: Turn([{'role': 'king', 'content': 'x'}])": "value",
    "code: Turn([{'role': 'user', 'content': 1}])": "value",
    "code: Turn([{'role': 'user', 'content': 'x', 'state': {1, 2}}])": "value",
    "code: Turn([{'role': 'user', 'content': 'x', 'state': float('inf')}])": "value",
    "code: Turn('x', 0.0, 1)": "value",
    "code: {'observation': 'x'}": "value",
    "code: None": "value",
}


def fail(player, tokenizer, failing):
    futures = [player.respond(0, i, say(tokenizer, text), "stop") for i, text in enumerate(failing)]
    replies = [future.result(60) for future in futures]
    assert [r.error for r in replies] == list(failing.values())
    assert all((r.tokens is None) == (r.error is not None) and r.reward == 0 for r in replies)
    player.check()
    assert ask(player, tokenizer, "6") == (None, 1.0, None)


def test_an_environment_that_lies_ends_its_conversation_with_the_kind(player, tokenizer):
    fail(player, tokenizer, LIES)


@pytest.mark.slow
def test_an_environment_that_hangs_or_dies_does_so_too(pooled, tokenizer, problems):
    fail(make(pooled, tokenizer, problems), tokenizer, KILLED | LIES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        ("{'value': {'observation': [], 'reward': 1.0, 'done': False}}", "value"),
        ("{'value': {'observation': [{'role': 'user'}], 'reward': 1.0, 'done': False}}", "value"),
        ("{'value': {'reward': 1e999, 'done': True}}", "crash"),
        ("{'score': 1.0}", "crash"),
        ("{'id': 9, 'value': {'reward': 1.0, 'done': True}}", "crash"),
    ],
)
def test_what_a_process_writes_in_place_of_a_turn_is_checked_again(modules, tokenizer, problems, lie, kind):
    write = f"code: __import__('os').write(4, (__import__('json').dumps({{'id': 1, **{lie}}}) + chr(10)).encode())"
    with Stage(Declaration("adder:Adder"), {}, workers=1) as stage:
        assert ask(make(stage, tokenizer, problems), tokenizer, write)[2] == kind


def test_a_failure_of_all_first_problems_is_a_fault_with_its_detail(modules, tokenizer, problems):
    many = [dataclasses.replace(problems[0], prompt_id=i) for i in range(16)]
    with Stage(Declaration("adder:Adder", pooled=False), {}) as stage:
        player = make(stage, tokenizer, many)
        for i in range(16):
            player.check()
            assert ask(player, tokenizer, "x", key=(i, 0))[2] == "error"
        with pytest.raises(
            ValueError, match="adder:Adder has failed on every turn of its first 16 problems: error .*int"
        ):
            player.check()


def test_an_environment_of_this_process_may_be_a_coroutine_and_a_deadline_holds(modules, tokenizer, problems):
    with Stage(Declaration("adder:Patient", pooled=False), {}, deadline_s=0.2) as stage:
        player = make(stage, tokenizer, problems)
        assert ask(player, tokenizer, "1") == (left(5), -0.5, None)
        assert ask(player, tokenizer, "7") == (None, 0.0, "timeout")
        assert ask(player, tokenizer, "x", key=(0, 1))[2] == "error"
    with Stage(Declaration("adder:Adder", pooled=False), {}, deadline_s=0.2) as stage:
        player = make(stage, tokenizer, problems)
        assert ask(player, tokenizer, "code: __import__('time').sleep(1)")[2] == "timeout"
        assert ask(player, tokenizer, "5", key=(0, 1)) == (left(1), -0.5, None)


@pytest.mark.parametrize(("fails", "error"), [(1, None), (2, "timeout")])
def test_a_turn_on_which_the_environment_failed_by_chance_is_asked_for_once_more(
    modules, tokenizer, problems, monkeypatch, fails, error
):
    import adder

    asked = []

    def step(self, problem, messages, completion):
        asked.append(completion)
        if completion == "x":
            raise ValueError("this is no number")
        if len(asked) <= fails:
            raise TimeoutError("busy")
        return adder.Turn("", 1.0, True)

    monkeypatch.setattr(adder.Adder, "step", step)
    with Stage(Declaration("adder:Adder", pooled=False), {}) as stage:
        player = make(stage, tokenizer, problems)
        assert ask(player, tokenizer, "5") == (None, 0.0 if error else 1.0, error) and asked == ["5", "5"]
        assert ask(player, tokenizer, "x", key=(0, 1))[2] == "error" and asked == ["5", "5", "x"]


def test_without_a_chat_template_an_observation_is_its_text(stage, tokenizer, problems, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat", None)
    player = make(stage, tokenizer, problems)
    assert ask(player, tokenizer, "5") == ("1 left", -0.5, None)
    assert ask(player, tokenizer, "code: Turn('')", key=(0, 1)) == (None, 0.0, "value")


def test_the_context_only_grows_and_ends_as_the_template_would_have_it(tokenizer):
    """The tokens of a turn and of its observation, one after the other, are those of the whole conversation."""
    asked, answer = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "3"}
    told = [{"role": "user", "content": "no"}]
    for thinking in (True, False):
        prompt = tokenizer.encode(tokenizer.chat([asked], thinking=True))
        read = Observations(tokenizer, thinking=thinking).encode(told)
        whole = tokenizer.encode(tokenizer.chat([asked, answer, *told], thinking=thinking))
        assert np.array_equal([*prompt, *say(tokenizer, "3"), *read], whole)


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
    with Scorer("environment", right_above=0.0) as scorer:
        sizes = {"group_size": 2, "sampling": Sampling(), "seed": 0}
        made = GroupGenerator(
            rollout, lambda p: say(tokenizer, p.prompt), tokenizer.decode,
            lambda *told, **turns: lengths.extend(told[2]) or scorer(*told, **turns), **sizes,
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
