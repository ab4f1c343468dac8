"""Arithmetic expressions, parsed without executing anything, and the verifier of the game countdown.

Countdown gives some whole numbers and a target. The answer is an expression of the numbers that makes the target.
"""

import json
import operator
import re
from fractions import Fraction

MAX_CHARACTERS = 500
_ANSWER = re.compile(r"<answer>([^<]*)</answer>|^answer:([^\n]*)", re.IGNORECASE | re.MULTILINE)
_OPERATORS = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
_DECIMAL = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?|[-+*/()])\s*", re.ASCII)
_TOKEN = re.compile(r"\s*(\d{1,18}|[-+*/()])\s*", re.ASCII)


def countdown(completion: str, answer: str) -> float:
    """Returns 1.0 if the completion's last <answer>…</answer> or line "Answer: …" makes the game's target, else 0.0.

    `answer` is JSON {"numbers": [whole numbers], "target": whole number}. The text in the completion must use each
    number exactly once, have at most 500 characters, and be an expression of this grammar, computed in exact fractions:
      sum = product (("+" | "-") product)*
      product = atom (("*" | "/") atom)*
      atom = whole number | "(" sum ")"

    Raises ValueError if `answer` is not JSON. JSON of another form gives KeyError, TypeError or 0.0.
    """
    game = json.loads(answer)
    found = _ANSWER.findall(completion)
    if not found:
        return 0.0
    try:
        tokens = _tokens("".join(found[-1]))
        # Before the calculation, to keep fractions as small as the game's own numbers allow.
        if sorted(int(t) for t in tokens if t.isdigit()) != sorted(game["numbers"]):
            return 0.0
        return float(_value(tokens) == game["target"])
    except (_NotAnExpression, ZeroDivisionError):
        return 0.0


def evaluate(text: str) -> Fraction:
    """Returns the exact value of an expression of numbers ("3", "2.5"), + - * /, parentheses, and the sign - ("-3",
    "-(1+2)"). A number has at most 18 digits before the point, and 18 after it. Raises ValueError if the text is
    something else, has more than 500 characters, or divides by zero."""
    try:
        return _value(_tokens(text, _DECIMAL), signed=True)
    except _NotAnExpression:
        raise ValueError(
            f"not an expression of numbers, + - * / and parentheses, of at most {MAX_CHARACTERS} characters"
        ) from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def last_expression(completion: str) -> str | None:
    """Returns the text of the completion's last <answer>…</answer> or "Answer:" line, without blanks. Returns None if
    there is no such text, or if the text is empty, has more than 500 characters, or has anything but whole numbers,
    + - * / and parentheses. Their order is not checked."""
    found = _ANSWER.findall(completion)
    try:
        return "".join(_tokens("".join(found[-1]))) or None if found else None
    except _NotAnExpression:
        return None


class _NotAnExpression(Exception):
    pass


def _tokens(text: str, token: re.Pattern[str] = _TOKEN) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise _NotAnExpression
    tokens, position = [], 0
    while position < len(text):
        match = token.match(text, position)
        if match is None:
            raise _NotAnExpression
        tokens.append(match[1])
        position = match.end()
    return tokens


def _value(tokens: list[str], signed: bool = False) -> Fraction:
    left = ["", *reversed(tokens)]  # "" is no token
    value = _operand(left, 0, signed)
    if left != [""]:
        raise _NotAnExpression
    return value


def _operand(left: list[str], rank: int, signed: bool) -> Fraction:
    """Precedence climbing: takes from the end of `left` an atom, then each operator of a higher rank than `rank` with
    its operand, and returns the value. At most one call for each of the `MAX_CHARACTERS` is under way: Python's
    recursion limit allows that."""
    token = left.pop()
    if token == "-" and signed:
        value = -_operand(left, 2, signed)
    elif token == "(":
        value = _operand(left, 0, signed)
        if left.pop() != ")":
            raise _NotAnExpression
    elif token[:1].isdigit():
        value = Fraction(token)
    else:
        raise _NotAnExpression
    while left[-1] in _OPERATORS and _OPERATORS[left[-1]][0] > rank:
        own, apply = _OPERATORS[left.pop()]
        value = apply(value, _operand(left, own, signed))
    return value
