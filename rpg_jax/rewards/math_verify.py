"""Mathematical equality by the library math-verify (for MATH-500, Minerva, OlympiadBench).

It parses model output with SymPy, which can hang, exhaust memory or run code: only the worker pool may call this.
"""

import functools

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# Its own timeouts are off: they need SIGALRM, and score 0 in silence. The pool has a deadline instead.
_parse = functools.partial(parse, parsing_timeout=None)


def math_verify(completion: str, answer: str) -> float:
    """Returns 1.0 if an answer found in the completion (boxed answers first) equals the reference `answer`, else 0.0.
    The reference is LaTeX, with or without \\boxed{…}, or a plain expression. SymPy decides equality: 1/2 equals 0.5.
    Raises ValueError if the reference cannot be parsed."""
    reference = _reference(answer)
    if not reference:
        raise ValueError(f"math-verify cannot parse the reference answer {answer!r}")
    return float(verify(list(reference), _parse(completion), timeout_seconds=None))


def read(completion: str) -> dict[str, str | None]:
    """Returns {"answer": text}: the answer that math-verify finds in the completion, as written; None without one."""
    found = _completion(completion)
    return {"answer": str(found[-1]) if found else None}  # the text comes after the expression that was made of it


def equal(one: str, other: str) -> float:
    """Returns 1.0 if the answers in two completions are equal, whichever of the two is the reference; else 0.0."""
    found = list(_completion(one)), list(_completion(other))
    return float(verify(*found, timeout_seconds=None) and verify(*reversed(found), timeout_seconds=None))


@functools.lru_cache(maxsize=256)  # a pair's completions come again in other pairs
def _completion(text: str) -> tuple:
    return tuple(_parse(text))


@functools.lru_cache(maxsize=1024)  # the completions of a group share their reference
def _reference(answer: str) -> tuple:
    boxed = answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"
    return tuple(_parse(boxed, [LatexExtractionConfig()]) or _parse(answer, [ExprExtractionConfig()]))
