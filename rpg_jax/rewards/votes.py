"""Which answers to a problem are one answer, where a verifier decides equality and no spelling does.

The reference answer has no part in it: a vote of completions is one that they could hold without it.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

MOST_COMPARED = 32
"""The different spellings of a problem that are compared, the most frequent ones: at most 496 pairs a problem."""
_MOST_FAILURES = 2  # of an answer: one that hangs every comparison costs two deadlines, not 31


@dataclasses.dataclass(frozen=True)
class Read:
    """The answer that a verifier reads in a completion, as written, and the completion."""

    answer: str
    text: str


Equal = Callable[[Sequence[tuple[str, str]]], Sequence[bool | None]]
"""Whether the answers of each pair of completions are equal; None where that could not be decided."""


def united(problems: Sequence[Sequence[Read | None]], equal: Equal) -> list[list[str | None]]:
    """The answers of P problems, of n_p completions each, where equal answers have one spelling.

    Two completions have one answer if they write it alike, or if a chain of equal pairs joins the two. So equality is
    transitive here, as that of math-verify is not (5 = 5 % = 0.05). The most frequent spelling stands for the joined
    ones, the first of several. None, no answer, stays None.

    The pairs are compared in rounds, each spelling with its next, then with its second next, and so on. Not compared
    are pairs that are joined already, spellings of which two comparisons failed, and those after the `MOST_COMPARED`
    most frequent.
    """
    answers = [_Answers(own) for own in problems]
    for apart in range(1, MOST_COMPARED):
        asked = [(own, *pair) for own in answers for pair in own.pairs(apart)]
        for (own, i, j), verdict in zip(asked, equal([own.texts(i, j) for own, i, j in asked]), strict=True):
            own.note(i, j, verdict)
    return [[own.spelling(read) for read in given] for own, given in zip(answers, problems, strict=True)]


class _Answers:
    """The spellings of one problem, the most frequent first, and which of them are joined."""

    def __init__(self, given: Sequence[Read | None]):
        self._votes = collections.Counter(read.answer for read in given if read is not None)
        self._text = {read.answer: read.text for read in reversed(given) if read is not None}
        self._written = [answer for answer, _ in self._votes.most_common()]
        self._group = {answer: answer for answer in self._written}  # named after its most frequent spelling
        self._failures: collections.Counter[str] = collections.Counter()

    def pairs(self, apart: int) -> list[tuple[str, str]]:
        compared = self._written[:MOST_COMPARED]
        return [
            pair
            for pair in zip(compared, compared[apart:], strict=False)
            if self._group[pair[0]] != self._group[pair[1]]
            and max(self._failures[answer] for answer in pair) < _MOST_FAILURES
        ]

    def texts(self, one: str, other: str) -> tuple[str, str]:
        return self._text[one], self._text[other]

    def note(self, one: str, other: str, verdict: bool | None) -> None:
        if verdict is None:
            self._failures.update((one, other))
        elif verdict:
            kept, gone = sorted((self._group[one], self._group[other]), key=self._written.index)
            self._group = {answer: kept if group == gone else group for answer, group in self._group.items()}

    def spelling(self, read: Read | None) -> str | None:
        return None if read is None else self._group[read.answer]
