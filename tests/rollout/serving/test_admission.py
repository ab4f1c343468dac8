"""The text of a completion as its tokens come; all protocols share it."""

from __future__ import annotations

import numpy as np
import pytest

from rpg_jax.rollout.serving.admission import Admission
from rpg_jax.rollout.serving.completions import StopText
from rpg_jax.types import Sampling

TEXT = "naïve 中文 😀!"
STOP = 0


class Bytes:
    """Token i is the byte i; counts what it decodes."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return bytes(ids).decode("utf-8", "replace")


def streamed(ids, width, sampling, codec):
    more = Admission(None, codec, sampling, max_active=1).text(sampling)
    return [more(np.array(ids[i : i + width], np.int32)) for i in range(0, len(ids), width)]


def test_a_new_server_draws_other_completions_than_one_before_it():
    first, second = (next(Admission(None, Bytes(), Sampling(), max_active=1).arrivals) for _ in range(2))
    assert first != second and max(first, second) < 2**31


@pytest.mark.parametrize("width", [1, 3, 100])
@pytest.mark.parametrize("cut", range(len(TEXT.encode()) - 5, len(TEXT.encode()) + 1))
def test_the_pieces_of_a_text_are_the_text_wherever_it_is_cut(cut, width):
    ids = list(TEXT.encode())[:cut]
    whole = bytes(ids).decode("utf-8", "replace")
    by_length = streamed(ids, width, Sampling(max_tokens=len(ids)), Bytes())
    by_stop = streamed([*ids, STOP], width, Sampling(max_tokens=100, stop_token_ids=(STOP,)), Bytes())
    for pieces in (by_length, by_stop):
        assert "".join(pieces) == whole
        assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])


def test_a_token_s_text_costs_the_same_late_in_a_completion():
    codec, n = Bytes(), 2000
    streamed(list(b"a" * n), 1, Sampling(max_tokens=n), codec)
    assert codec.decoded < 5 * n


@pytest.mark.parametrize("stops", [("ab",), ("b", "abc"), ("aab", "ba"), ("\n\n", "x"), ()])
@pytest.mark.parametrize("text", ["aaab", "abab", "xaab", "a\n\nb", "ccc", "aa", "abx"])
def test_a_stop_text_is_found_at_the_same_place_however_the_text_is_cut(text, stops):
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(ends, default=(0, len(text)))[1]]
    for cuts in range(2 ** (len(text) - 1)):
        stop_text, passed, start, ended = StopText(stops), "", 0, False
        for end in [i for i in range(1, len(text)) if cuts >> (i - 1) & 1] + [len(text)]:
            new, ended = stop_text.push(text[start:end])
            passed, start = passed + new, end
            assert expected.startswith(passed), "what was passed on cannot be taken back"
            if ended:
                break
        passed += "" if ended else stop_text.flush()
        assert passed == expected and ended == bool(ends)
