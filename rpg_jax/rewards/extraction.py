"""Finds the answer of a completion, and compares the answer with a reference or with other answers.

Three verifiers stand here beside their extraction: `exact`, `boxed` and `gsm8k`. The verifiers `math_dapo`,
`math_verify` and `countdown` have files of their own.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from rpg_jax.rewards import expression
from rpg_jax.rewards.math_dapo import INVALID, extract, normalise

MARKS = ("#", "Answer:")
"""Marks before an answer. Generated arithmetic has "#" after the working, and the paper's prompt asks for "Answer:"."""
TAIL_CHARACTERS = 300
_BOXED = "\\boxed{"
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d.,]+)", re.ASCII)
_DECIMAL = re.compile(r"-?(\d+(\.\d*)?|\.\d+)", re.ASCII)
_LONGEST_BARE_ANSWER = 100


def exact(completion: str, answer: str) -> float:
    """1 if the completion, or its text after the last "#" or "Answer:", is the answer, stripped of blanks; else 0."""
    answer = answer.strip()
    found = [completion, *(completion.rpartition(mark)[2] for mark in MARKS)]
    return float(any(text.strip() == answer for text in found))


def boxed(completion: str, answer: str) -> float:
    """1 if the last \\boxed{…} and the reference have the same normal form (see `math_dapo.normalise`), else 0."""
    found = last_boxed(completion)
    reference = last_boxed(answer)
    return float(found is not None and normalise(found) == normalise(answer if reference is None else reference))


def gsm8k(completion: str, answer: str) -> float:
    """1 if the number after the last "####" equals the reference, as decimals ("1,000.0" is 1000); else 0.

    Only the last 300 characters of the completion are read. The reference `answer` is the number, or the data set's
    whole solution, which ends in "#### number".

    Raises ValueError if the reference holds no number.
    """
    reference = _number(answer.rpartition("####")[2])
    if reference is None:
        raise ValueError(f"reference answer without a number: {answer!r}")
    return float(_marked_number(completion) == reference)


def extract_answer(completion: str, verifier: str | None = None) -> str | None:
    """The answer of a completion, for majority votes; None if no answer is found.

    The answer is the text that the `verifier` of that name compares, in its normal form. Without a verifier, or with a
    user's own function, the answer is the first of these that exists, in the spelling that `math_dapo` compares: the
    last "Answer:" line, the last \\boxed{…}, the text after the last "####" or "#", the whole text if it is one line of
    at most 100 characters. The equality of "math_verify" has no normal form: see `merge_equal_answers`.
    """
    return _OF_VERIFIER.get(verifier or "", _any)(completion)


def last_boxed(text: str) -> str | None:
    """The contents of the last \\boxed{…}, braces balanced; None if there is none or it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None


def _marked_number(completion: str) -> Decimal | None:
    """The number after the last "####" of the final 300 characters."""
    found = _MARKED.findall(completion[-TAIL_CHARACTERS:])
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    text = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return Decimal(text) if _DECIMAL.fullmatch(text) else None


def _any(completion: str) -> str | None:
    if extract(completion) != INVALID:
        return _answer_line(completion)
    if last_boxed(completion) is not None:
        return _box(completion)
    mark = next((m for m in ("####", "#") if m in completion), None)
    bare = (completion if mark is None else completion.rpartition(mark)[2]).strip()
    return normalise(bare) or None if len(bare) <= _LONGEST_BARE_ANSWER and "\n" not in bare else None


def _after_marks(completion: str) -> str | None:
    for mark in MARKS:
        completion = completion.rpartition(mark)[2]
    return completion.strip() or None


def _answer_line(completion: str) -> str | None:
    found = extract(completion)
    return None if found == INVALID else found or None


def _box(completion: str) -> str | None:
    box = last_boxed(completion)
    return None if box is None else normalise(box) or None


def _decimal(completion: str) -> str | None:
    found = _marked_number(completion)
    return None if found is None else f"{found.normalize():f}"


_OF_VERIFIER: dict[str, Callable[[str], str | None]] = {
    "exact": _after_marks,
    "math_dapo": _answer_line,
    "boxed": _box,
    "gsm8k": _decimal,
    "countdown": expression.last_expression,
}


MOST_COMPARED = 32
"""The verifier compares this many spellings of a problem's answer, the most frequent: at most 496 pairs a problem."""
_MOST_FAILURES = 2  # failed comparisons of an answer: one that hangs each time costs 2 deadlines, not 31


@dataclasses.dataclass(frozen=True)
class Read:
    """The answer that a verifier reads in a completion, as written, and the completion."""

    answer: str
    text: str


Equal = Callable[[Sequence[tuple[str, str]]], Sequence[bool | None]]
"""Whether the answers of each pair of completions are equal; None for a pair whose comparison failed."""


def merge_equal_answers(problems: Sequence[Sequence[Read | None]], equal: Equal) -> list[list[str | None]]:
    """The answers of P problems, of n_p completions each, where equal answers have one spelling.

    The reference answer has no part in a vote. Two completions have one answer if both write the same text, or if a
    chain of equal pairs joins the two texts. So equality is transitive here. The equality of math-verify is not
    (5 = 5 % = 0.05). The most frequent spelling stands for all joined spellings; of several, the first. None stays
    None.

    The comparisons go in rounds: each spelling with the next, then with the second next, and so on. A pair is left out
    if a chain joins it already, if two comparisons of a spelling failed, or if a spelling is not in the `MOST_COMPARED`
    most frequent spellings.
    """
    answers = [_Answers(own) for own in problems]
    for apart in range(1, MOST_COMPARED):
        asked = [(own, *pair) for own in answers for pair in own.pairs(apart)]
        for (own, i, j), verdict in zip(asked, equal([own.texts(i, j) for own, i, j in asked]), strict=True):
            own.note(i, j, verdict)
    return [[own.spelling(read) for read in given] for own, given in zip(answers, problems, strict=True)]


class _Answers:
    """The spellings of the answers to one problem, the most frequent first, and the groups of joined spellings."""

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
