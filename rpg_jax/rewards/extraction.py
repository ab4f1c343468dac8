"""Finds the answer of a completion, and compares the answer with a reference or with other answers.

The verifiers `exact`, `math_dapo`, `boxed` and `gsm8k` stand here. A verifier says how well a completion answers.

`math_dapo`, the paper's verifier in training and on AIME and AMC, keeps the quirks of the rules in public RL code,
because rewards and published numbers depend on them. Words are removed wherever they occur ("square" from "squared").
Articles are removed as the letters "a " and "an ". Nothing is evaluated, so 1/2 and 0.5 differ. Each rule takes linear
time, so this runs in the trainer's process: a regular expression with an open end, tried everywhere, would take longer.
"""

import collections
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal

from rpg_jax.rewards import expression

MARKS = ("#", "Answer:")
"""Marks before an answer. Generated arithmetic has "#" after the working, and the paper's prompt asks for "Answer:"."""
TAIL_CHARACTERS = 300
_BOXED = "\\boxed{"
_MARKED = re.compile(r"####\s*\$?\s*(-?[\d.,]+)", re.ASCII)
_DECIMAL = re.compile(r"-?(\d+(\.\d*)?|\.\d+)", re.ASCII)
_LONGEST_BARE_ANSWER = 100
INVALID = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# The rules apply in this order: a later rule sees the result of the earlier rules.
_REWRITES = [
    *[("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")],
    *[(r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")],
]
_UNITS = "square ways integers dollars mph inches hours km units"
_MORE_UNITS = (
    "sue points feet minutes digits cents degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_REMOVED = [
    *_UNITS.split(),
    r"\ldots",
    *_MORE_UNITS.split(),
    *[r"\text{" + content for content in ("s}", ".}", "\ns}", "}^2", "}^3", "\n}", "}")],
    *[r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"],
]

_WRAPPERS = ("\\text{", "\\textbf{", "\\overline{")
_END = re.compile("[}\n]")
_BARE_FRACTION = re.compile(r"frac([^{])([^\n])")
_BARE_ROOT = re.compile(r"sqrt([^{])")


def exact(completion: str, answer: str) -> float:
    """Returns 1.0 if the completion, its text after the last "#", or its text after the last "Answer:" is `answer`;
    else 0.0. Blanks and line breaks at both ends of the texts do not count."""
    answer = answer.strip()
    found = [completion, *(completion.rpartition(mark)[2] for mark in MARKS)]
    return float(any(text.strip() == answer for text in found))


def dapo_answer(completion: str) -> str:
    """Returns the text after the last mark "Answer:", up to the end of the line, in the spelling that `normalise`
    makes. Only the last 300 characters of the completion are read. "answer :" in any case is a mark too, and the text
    may begin on a later line. A mark in the text of a mark is no mark: the text of "Answer: 1 Answer: 2" is
    "1 Answer: 2". Returns "[INVALID]" if there is no mark with a text."""
    found = INVALID
    for match in _ANSWER.finditer(completion[-TAIL_CHARACTERS:]):
        found = match[1]
    return normalise(found)


def math_dapo(completion: str, answer: str) -> float:
    """Returns 1.0 if the text that `dapo_answer` finds after the completion's last "Answer:" equals the reference
    `answer`, in the spelling that `normalise` makes; else -1.0. A completion without "Answer:" in its last 300
    characters gets -1.0. Source: arXiv:2503.14476 (DAPO), used in arXiv:2505.17508."""
    return 1.0 if dapo_answer(completion) == normalise(answer) else -1.0


def boxed(completion: str, answer: str) -> float:
    """Returns 1.0 if the contents of the completion's last \\boxed{…} equal the reference `answer`, else 0.0. Both are
    compared in the spelling that `normalise` makes, or as they are if it leaves nothing, as of the answer "square". Of
    a reference with a \\boxed{…} only the contents of the last box count. A completion without a box, or with a last
    box that is not closed, gets 0.0."""
    found, reference = last_boxed(completion), last_boxed(answer)
    given = found or "", answer if reference is None else reference
    one, other = (normalise(text) or text.strip() for text in given)
    return float(found is not None and one == other)


def gsm8k(completion: str, answer: str) -> float:
    """Returns 1.0 if the last number after a "####" in the completion's last 300 characters is the reference number,
    else 0.0. Only blanks and a "$" may stand between "####" and the number. "1,000.0" equals 1000. The reference
    `answer` is a number, or the data set's solution, which ends in "#### number"; ValueError otherwise."""
    reference = _number(answer.rpartition("####")[2])
    if reference is None:
        raise ValueError(f"reference answer without a number: {answer!r}")
    return float(_marked_number(completion) == reference)


def extract_answer(completion: str, verifier: str | None = None) -> str | None:
    """Returns the answer of a completion, as a majority vote counts answers; None if no answer is found.

    `verifier` is "exact", "math_dapo", "boxed", "gsm8k" or "countdown". The answer is the text that this verifier
    compares with a reference, without the differences that this verifier ignores; for "exact" the text after the last
    "#" or "Answer:", or all. With None or another name the answer is the first of these that is there, as `normalise`
    spells it: the text after the last "Answer:" (see `dapo_answer`), the last \\boxed{…}, the text after the last
    "####" (without one, "#"), the whole completion. The last two count only as one line of at most 100 characters.
    """
    return _OF_VERIFIER.get(verifier or "", _any)(completion)


def normalise(answer: str) -> str:
    """Returns the spelling in which `math_dapo` and `boxed` compare the answer. The main rules, in order: keep the text
    after the last "="; drop "a " and "an " even at a word's end, \\$, spaces, unit words even inside a word, and LaTeX
    spacing; replace a line by its first $…$, if any; drop \\text, \\textbf, \\overline and \\boxed, but not what is
    inside; write \\frac12 and \\sqrt2 with braces; drop dollars; drop the commas if all else is digits."""
    answer = answer.rpartition("=")[2]
    for before, after in _REWRITES:
        answer = answer.replace(before, after)
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    answer = "\n".join(map(_first_math, answer.split("\n")))
    for command in _WRAPPERS:
        answer = _unwrapped(answer, command)
    answer = "\n".join(map(_unboxed, answer.split("\n")))
    answer = _BARE_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _BARE_ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def last_boxed(text: str) -> str | None:
    """Returns what the last \\boxed{…} holds, braces balanced; None if there is no box, or the last is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for end in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None


def _first_math(line: str) -> str:
    """Returns the first $…$ of a line, with its dollars; the line if there is none."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _unwrapped(text: str, command: str) -> str:
    """Drops each `command` and the next closing brace on its line, if there is one. The text between them stays."""
    parts, at = [], 0
    while (start := text.find(command, at)) >= 0 and (end := _END.search(text, start + len(command))):
        closed = end[0] == "}"
        parts += [text[at:start], text[start + len(command) : end.start()]] if closed else [text[at : end.end()]]
        at = end.end()
    return "".join([*parts, text[at:]])


def _unboxed(line: str) -> str:
    """Drops the first \\boxed{ of a line, and the last closing brace after it; without either, nothing."""
    start, end = line.find(_BOXED), line.rfind("}")
    if start < 0 or end < start + len(_BOXED):
        return line
    return line[:start] + line[start + len(_BOXED) : end] + line[end + 1 :]


def _marked_number(completion: str) -> Decimal | None:
    """Returns the last number that follows a "####" in the final 300 characters; None without one."""
    found = _MARKED.findall(completion[-TAIL_CHARACTERS:])
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    text = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return Decimal(text) if _DECIMAL.fullmatch(text) else None


def _any(completion: str) -> str | None:
    if dapo_answer(completion) != INVALID:
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
    found = dapo_answer(completion)
    return None if found == INVALID else found or None


def _box(completion: str) -> str | None:
    box = last_boxed(completion)
    return None if box is None else normalise(box) or None


def _decimal(completion: str) -> str | None:
    found = _marked_number(completion)
    return None if found is None else f"{found.normalize(Context(prec=TAIL_CHARACTERS)):f}"


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


Equal = Callable[[Sequence[tuple[str, str]]], Sequence[bool | None]]
"""Pairs of completions' texts -> for each pair whether the answers are equal; None if the comparison failed."""


def merge_equal_answers(answers: Sequence[str | None], texts: Sequence[str], equal: Equal) -> list[str | None]:
    """Gives equal answers to a problem one spelling, so that a vote counts them together. Reads no reference answer.

    A spelling is an answer as a completion writes it. Two spellings are joined if a chain of equal pairs leads from one
    to the other, though the equality of math-verify is not transitive (5 = 5 % = 0.05). Spellings are compared in
    rounds: each with the next most frequent spelling, then with the second next, and so on. A pair is left out if a
    chain joins it already, if two comparisons of a spelling failed, or if a spelling is not among the 32 most frequent.

    Args:
      answers: the spelling in each completion of the problem, or None where no answer was found.
      texts: the texts of these completions.
      equal: takes pairs of texts, those of a round, and returns for each whether the answers are equal, or None if the
        comparison failed. It is called at most 31 times, sometimes with no pair.

    Returns a list like `answers`: the most frequent of the joined spellings (the first of a tie); None for None.
    """
    found = [(answer, text) for answer, text in zip(answers, texts, strict=True) if answer is not None]
    text = dict(reversed(found))
    written = [answer for answer, _ in collections.Counter(answer for answer, _ in found).most_common()]
    group, failures = {answer: answer for answer in written}, collections.Counter[str]()
    for apart in range(1, min(MOST_COMPARED, len(written))):
        pairs = [
            (one, other)
            for one, other in zip(written, written[apart:MOST_COMPARED], strict=False)
            if group[one] != group[other] and max(failures[one], failures[other]) < _MOST_FAILURES
        ]
        verdicts = equal([(text[one], text[other]) for one, other in pairs])
        for (one, other), verdict in zip(pairs, verdicts, strict=True):
            if verdict is None:
                failures.update((one, other))
            elif verdict:
                kept, gone = sorted((group[one], group[other]), key=written.index)
                group = {answer: kept if joined == gone else joined for answer, joined in group.items()}
    return [None if answer is None else group[answer] for answer in answers]
