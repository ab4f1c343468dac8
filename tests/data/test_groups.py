"""Groups are the same bits after their way to a checkpoint or a process; conversations as text have marks."""

import dataclasses

import numpy as np
import pytest

from rpg_jax import data
from rpg_jax.data.groups import (
    Group,
    decode_groups,
    encode_groups,
    groups_from_bytes,
    groups_to_bytes,
    last_shown,
    last_turn,
    shown,
)
from rpg_jax.types import Completion, Turns


def turns_of(rng, length):
    """Of a conversation: observations anywhere but at its ends, and what a float32 can be."""
    observed = rng.integers(0, 2, length) == 1
    observed[[0, -1]] = False
    return Turns(observed, np.float32([0.1, -0.0, 1e-42, np.inf])[: length % 5], "timeout" if length % 2 else None)


def make_groups(seed=0, count=5, carried=False):
    rng = np.random.default_rng(seed)

    def one(p):
        lengths = rng.integers(1, 7, rng.integers(1, 4))
        completions = [
            Completion(
                rng.integers(4, 16, n).astype(np.int32),
                rng.normal(size=n).astype(np.float32),
                "stop" if n % 2 else "length",
                p,
                turns=turns_of(rng, n) if n > 2 else None,
            )
            for n in lengths
        ]
        return Group(
            data.Problem(p, f'prompt {p} "é"', "answer", "source"),
            rng.integers(4, 16, rng.integers(1, 6)).astype(np.int32),
            completions,
            [f"text {i}" for i in range(len(lengths))],
            rng.normal(size=len(lengths)).astype(np.float32),
            rng.integers(0, 2, len(lengths)).astype(np.float32),
            [rng.normal(size=n).astype(np.float32) for n in lengths] if carried else None,
            parts=rng.normal(size=(len(lengths), 2)).astype(np.float32) if carried else None,
            unshaped=rng.normal(size=len(lengths)).astype(np.float32) if carried else None,
        )

    return [one(p) for p in range(count)]


def test_pending_groups_are_the_same_bits_after_a_checkpoint():
    groups = make_groups(carried=True)
    groups[0].behaviour_logprobs[0][0] = np.float32(-1e-38)
    text = encode_groups(groups)
    back = decode_groups(text)
    assert encode_groups(back) == text and len(back) == len(groups)
    for a, b in zip(groups, back, strict=True):
        assert (a.problem, a.texts) == (b.problem, b.texts)
        for x, y in zip(a.completions, b.completions, strict=True):
            assert (x.finish_reason, x.weight_version) == (y.finish_reason, y.weight_version)
            assert (x.turns is None) == (y.turns is None)
            if x.turns is not None:
                assert x.turns.error == y.turns.error and x.turns.rewards.tobytes() == y.turns.rewards.tobytes()
                assert y.turns.observed.dtype == bool and (x.turns.observed == y.turns.observed).all()
        arrays = [[g.prompt, g.rewards, g.accuracy, g.parts, *g.behaviour_logprobs, *(c.tokens for c in g.completions),
                   *(c.logprobs for c in g.completions)] for g in (a, b)]  # fmt: skip
        for x, y in zip(*arrays, strict=True):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
    assert decode_groups(encode_groups([])) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_recorded_experts_stay_with_the_tokens_of_their_completion(dtype):
    rng = np.random.default_rng(1)

    def recorded(group, completion):
        shape = len(group.prompt) + len(completion.tokens), 2, 3
        return dataclasses.replace(completion, experts=rng.integers(0, np.iinfo(dtype).max, shape).astype(dtype))

    groups = [dataclasses.replace(g, completions=[recorded(g, c) for c in g.completions]) for g in make_groups()]
    pairs = list(zip(groups, decode_groups(encode_groups(groups)), strict=True))
    for x, y in [(x, y) for a, b in pairs for x, y in zip(a.completions, b.completions, strict=True)]:
        np.testing.assert_array_equal(x.experts, y.experts)
        assert x.experts.dtype == y.experts.dtype and x.tokens.tobytes() == y.tokens.tobytes()


def test_groups_on_their_way_to_another_process_keep_their_failures_and_have_no_behaviour_yet():
    groups = [dataclasses.replace(g, failures=["timeout", *[None] * (len(g.completions) - 1)]) for g in make_groups()]
    back = groups_from_bytes(groups_to_bytes(groups))
    assert [list(g.failures) for g in back] == [list(g.failures) for g in groups]
    assert all(g.behaviour_logprobs is None and g.parts is None for g in back)
    assert [c.tokens.tolist() for g in back for c in g.completions] == [
        c.tokens.tolist() for g in groups for c in g.completions
    ]
    assert groups_from_bytes(groups_to_bytes([])) == []


def decode(ids):
    return "".join(map(chr, ids))


def conversation_of(text, reason="stop"):
    """A completion whose observations are written in upper case; "." stops a turn."""
    observed = np.array([c.isupper() for c in text])
    turns = Turns(observed, np.zeros(1, np.float32)) if observed.any() else None
    return Completion(np.array([*map(ord, text)]), np.zeros(len(text), np.float32), reason, 0, turns=turns)


def test_stop_tokens_are_left_out_and_the_last_turn_is_what_verifiers_read():
    conversation = conversation_of("ab.NOc.YESd.")
    text = shown(conversation, decode)
    assert text == "ab\n<observation>\nNO\n</observation>\nc\n<observation>\nYES\n</observation>\nd"
    assert last_turn(conversation, decode) == last_shown(text) == "d"
    assert last_turn(conversation_of("a.Xbc", "length"), decode) == "bc"
    text = shown(conversation_of("ab."), decode)
    assert text == last_turn(conversation_of("ab."), decode) == last_shown("ab") == "ab"
    assert shown(conversation_of("ab", "length"), decode) == "ab"
