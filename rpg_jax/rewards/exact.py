"""Exact match, for tasks whose answers have one spelling."""

from __future__ import annotations

# What a completion may write before its answer: our arithmetic ends its working in "#", the paper asks for the other.
MARKS = ("#", "Answer:")


def exact(completion: str, answer: str) -> float:
    """1 where the completion, or what follows its last mark, is the answer up to surrounding white space; else 0."""
    answer = answer.strip()
    found = [completion, *(completion.rpartition(mark)[2] for mark in MARKS)]
    return float(any(text.strip() == answer for text in found))


def final(completion: str) -> str:
    """What follows the last of the marks that the completion has, or all of it."""
    for mark in MARKS:
        completion = completion.rpartition(mark)[2]
    return completion.strip()
