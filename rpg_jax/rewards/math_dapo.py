"""Compares the last "Answer:" line with the reference answer, as the paper does in training and on AIME and AMC.

The rules of `math_dapo` in public RL code apply, with their quirks, because rewards and published numbers depend on
them. Words are removed wherever they occur ("square" from "squared"). Articles are removed as the letters "a " and
"an ". Nothing is evaluated, so 1/2 and 0.5 differ. Each rule takes linear time, so this runs in the trainer's process:
a regular expression with an open end, tried at every place, would take quadratic time.
"""

import re

TAIL_CHARACTERS = 300
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
_BOXED = "\\boxed{"
_END = re.compile("[}\n]")
_BARE_FRACTION = re.compile(r"frac([^{])([^\n])")
_BARE_ROOT = re.compile(r"sqrt([^{])")


def normalise(answer: str) -> str:
    """The canonical spelling of a final answer.

    In this order, it takes the text after the last "="; drops articles, escaped dollars, all blanks, unit words and
    LaTeX spacing; takes the first $…$ of a line for the line; unwraps \\text, \\textbf, \\overline and \\boxed; gives
    \\frac12 and \\sqrt2 their braces; drops dollars; and drops the thousands separators of a whole number.
    """
    answer = answer.rpartition("=")[2]
    for before, after in _REWRITES:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    answer = "\n".join(map(_first_math, answer.split("\n")))
    for command in _WRAPPERS:
        answer = _unwrapped(answer, command)
    answer = "\n".join(map(_unboxed, answer.split("\n")))
    answer = _BARE_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = _BARE_ROOT.sub(r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def _first_math(line: str) -> str:
    """The first $…$ of a line; the line if there is none."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _unwrapped(text: str, command: str) -> str:
    """Drops each `command` with the next brace that closes on its line; what lies between stays."""
    parts, at = [], 0
    while (start := text.find(command, at)) >= 0 and (end := _END.search(text, start + len(command))):
        closed = end[0] == "}"
        parts += [text[at:start], text[start + len(command) : end.start()]] if closed else [text[at : end.end()]]
        at = end.end()
    return "".join([*parts, text[at:]])


def _unboxed(line: str) -> str:
    """Drops the first \\boxed{ of a line, and the last brace that closes after it."""
    start, end = line.find(_BOXED), line.rfind("}")
    if start < 0 or end < start + len(_BOXED):
        return line
    return line[:start] + line[start + len(_BOXED) : end] + line[end + 1 :]


def extract(completion: str) -> str:
    """The text after the last "Answer:" in the final 300 characters, normalised; "[INVALID]" if there is none."""
    found = INVALID
    for match in _ANSWER.finditer(completion[-TAIL_CHARACTERS:]):
        found = match[1]
    return normalise(found)


def math_dapo(completion: str, answer: str) -> float:
    """+1 if the completion's answer and the reference have the same normal form, else -1.

    Source: arXiv:2503.14476 (DAPO), used in arXiv:2505.17508.
    """
    return 1.0 if extract(completion) == normalise(answer) else -1.0
