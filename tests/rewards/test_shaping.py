from __future__ import annotations

import numpy as np
import pytest

from rpg_jax.rewards.verifiers import format_match, length_penalty, overlong_penalty


def test_overlong_penalty_starts_at_the_buffer_and_ends_at_minus_one():
    lengths = [1, 1536, 1537, 1792, 2048]
    np.testing.assert_array_equal(
        overlong_penalty(lengths, limit=2048, buffer=512), np.float32([0, 0, -1 / 512, -0.5, -1])
    )
    assert overlong_penalty([2048], limit=2048, buffer=512) == np.float32(-1)
    with pytest.raises(ValueError, match="limit=100.*got 200"):
        overlong_penalty([1], limit=100, buffer=200)


def test_length_penalty_is_linear_in_tokens():
    np.testing.assert_array_equal(length_penalty([0, 5, 10], limit=10), np.float32([0, -0.5, -1]))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("answer_line", ["Answer: 4", "so\nAnswer: 4\n"], ["Answer:", "4", "Answer: 4\nbye", "the Answer: 4"]),
        ("boxed", ["\\boxed{4}", "x\n$\\boxed{4}$."], ["4", "boxed{4}"]),
        ("number", ["46", "-5", "5-", "2+4=6#46"], ["", "4 6", "#", "4#5#6", "x"]),
        ("think", ["<think>a\nb</think>\nc"], ["c", "<think>a", "<think>a</think> "]),
    ],
)
def test_formats(pattern, right, wrong):
    assert [format_match(text, pattern=pattern) for text in right] == [1.0] * len(right)
    assert [format_match(text, pattern=pattern) for text in wrong] == [0.0] * len(wrong)


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="'boxd'.*boxed"):
        format_match("", pattern="boxd")
