"""Rewards for the form of a completion: its format, and its length in tokens (never in characters)."""

from collections.abc import Callable

import numpy as np


def _answer_line(text: str) -> bool:
    last = text.rstrip().rpartition("\n")[2]
    return last.startswith("Answer:") and len(last) > len("Answer:")


def _number(text: str) -> bool:
    before, mark, after = text.partition("#")
    return (after if mark else before).strip().removeprefix("-").removesuffix("-").isdecimal()


def _think(text: str) -> bool:
    before, _, after = text.partition("</think>")
    return before.startswith("<think>") and not (after == "" or after.isspace())


# Whether a whole completion has the form; each takes time linear in its length.
FORMATS: dict[str, Callable[[str], bool]] = {
    "answer_line": _answer_line,
    "boxed": lambda text: "\\boxed{" in text,
    "number": _number,
    "think": _think,
}


def format_match(completion: str, *, pattern: str = "answer_line") -> float:
    """1 if the completion has the form named `pattern`, else 0.

    "answer_line": the last line is "Answer: …". "boxed": it contains \\boxed{…}. "number": a whole number, alone or
    after one "#", with its sign before or after it. "think": reasoning between think tags, then text.

    Raises:
      ValueError: the pattern is unknown.
    """
    if pattern not in FORMATS:
        raise ValueError(f"unknown format {pattern!r}; known: {', '.join(FORMATS)}")
    return float(FORMATS[pattern](completion))


def length_penalty(lengths: np.ndarray, *, limit: int) -> np.ndarray:
    """-n / limit for a completion of n tokens: f32[N] in [-1, 0] for completions within the limit."""
    if limit < 1:
        raise ValueError(f"length limit must be >= 1 token, got {limit}")
    return -np.asarray(lengths, np.float32) / np.float32(limit)


def overlong_penalty(lengths: np.ndarray, *, limit: int, buffer: int) -> np.ndarray:
    """Soft overlong punishment of DAPO, min(-(n - (L_max - B)) / B, 0), f32[N].

    It is 0 up to `limit - buffer` tokens, then falls linearly to -1 at `limit` tokens.

    Args:
      lengths: i32[N], completion tokens, stop token included.
      limit: L_max, tokens.
      buffer: B, tokens.

    Raises:
      ValueError: the buffer is empty or longer than the limit.

    Source: arXiv:2503.14476 eq. 13; B = 512 at L_max = 2048 in arXiv:2505.17508.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"overlong buffer must be in [1, limit={limit}] tokens, got {buffer}")
    excess = np.asarray(lengths, np.float32) - np.float32(limit - buffer)
    return np.minimum(-excess / np.float32(buffer), np.float32(0))
