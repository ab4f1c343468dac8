"""Conversations as text: each turn without its stop token, observations between marks."""

import numpy as np

from rpg_jax.data.groups import last_shown, last_turn, shown
from rpg_jax.types import Completion, Turns


def decode(ids):
    return "".join(map(chr, ids))


def made(text, reason="stop"):
    """A completion whose observations are written in upper case; "." stops a turn."""
    observed = np.array([c.isupper() for c in text])
    turns = Turns(observed, np.zeros(1, np.float32)) if observed.any() else None
    return Completion(np.array([*map(ord, text)]), np.zeros(len(text), np.float32), reason, 0, turns=turns)


def test_stop_tokens_are_left_out_and_the_last_turn_is_what_verifiers_read():
    conversation = made("ab.NOc.YESd.")
    text = shown(conversation, decode)
    assert text == "ab\n<observation>\nNO\n</observation>\nc\n<observation>\nYES\n</observation>\nd"
    assert last_turn(conversation, decode) == last_shown(text) == "d"
    assert last_turn(made("a.Xbc", "length"), decode) == "bc"
    assert shown(made("ab."), decode) == last_turn(made("ab."), decode) == last_shown("ab") == "ab"
    assert shown(made("ab", "length"), decode) == "ab"
