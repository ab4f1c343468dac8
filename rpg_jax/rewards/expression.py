"""Arithmetic expressions, parsed without executing anything, and the verifier of the game countdown.

Countdown gives some whole numbers and a target. The answer is an expression of the numbers that makes the target.
"""

import json
import re
from fractions import Fraction

MAX_CHARACTERS = 500
_ANSWER = re.compile(r"<answer>([^<]*)</answer>|^answer:([^\n]*)", re.IGNORECASE | re.MULTILINE)
_SIGN = "~"  # before an atom; no text has it as a token
_BEFORE_SIGN = ("(", "+", "-", "*", "/", _SIGN)
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
        tokens = _tokens(text, _DECIMAL)
        signs = [i for i, t in enumerate(tokens) if t == "-" and (i == 0 or tokens[i - 1] in _BEFORE_SIGN)]
        for i in signs:
            tokens[i] = _SIGN
        return _value(tokens)
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


def _value(tokens: list[str]) -> Fraction:
    # Before the calculation, to keep the nesting below half of `MAX_CHARACTERS`: Python's recursion limit allows that.
    if tokens.count("(") != tokens.count(")"):
        raise _NotAnExpression
    value, end = _sum(tokens, 0)
    if end < len(tokens):
        raise _NotAnExpression
    return value


def _sum(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in "+-":
        operand, end = _product(tokens, at + 1)
        value, at = (value + operand if tokens[at] == "+" else value - operand), end
    return value, at


def _product(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _atom(tokens, at)
    while at < len(tokens) and tokens[at] in "*/":
        operand, end = _atom(tokens, at + 1)
        value, at = (value * operand if tokens[at] == "*" else value / operand), end
    return value, at


def _atom(tokens: list[str], at: int) -> tuple[Fraction, int]:
    sign = 1
    while at < len(tokens) and tokens[at] == _SIGN:
        sign, at = -sign, at + 1
    if at < len(tokens) and tokens[at][0].isdigit():
        return sign * Fraction(tokens[at]), at + 1
    if at < len(tokens) and tokens[at] == "(":
        value, end = _sum(tokens, at + 1)
        if end < len(tokens) and tokens[end] == ")":
            return sign * value, end + 1
    raise _NotAnExpression
