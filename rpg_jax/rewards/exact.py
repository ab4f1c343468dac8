"""Exact match, for tasks whose answers have one spelling."""

from __future__ import annotations


def exact(completion: str, answer: str, *, mark: str = "#") -> float:
    """1 where the completion, or what follows its last `mark`, is the answer up to surrounding white space; else 0."""
    answer = answer.strip()
    return float(answer in (completion.strip(), completion.rpartition(mark)[2].strip()))
