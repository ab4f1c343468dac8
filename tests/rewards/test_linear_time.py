"""What runs in the trainer's process takes time linear in a completion, and finds what the published rules find.

Time is counted in characters that string methods may look at, so that a busy machine changes nothing.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.rewards import extraction, verifiers

UNITS = [
    "{",
    "}",
    "\n",
    "$",
    "$x",
    "\\boxed{",
    "\\boxed{}",
    "\\text{",
    "\\text{}",
    "\\overline{x",
    "Answer:",
    "Answer: x\n",
]
UNITS += ["#", "-", "1", " ", "=", "frac", "sqrt", "<think>", "</think>", "<think></think>", "\t\n", ",", "a ", "units"]
FUNCTIONS = {
    "boxed": lambda text: extraction.boxed(text, "7"),
    "box": lambda text: extraction.boxed("\\boxed{" + text + "}", "7"),
    "reference": lambda text: extraction.boxed("\\boxed{7}", text),
    "math_dapo": lambda text: extraction.math_dapo(text, "7"),
    "normalise": extraction.normalise,
    "exact": lambda text: extraction.exact(text, "7"),
    **{name: verifiers.FORMATS[name] for name in verifiers.FORMATS},
}


class Counted(str):
    """A text that counts the characters that its methods may look at, and whose parts count too."""

    looked_at = 0

    @classmethod
    def of(cls, value):
        if isinstance(value, str):
            return cls(value)
        return type(value)(map(cls.of, value)) if isinstance(value, list | tuple) else value

    def __add__(self, other):
        return Counted.of(str.__add__(self, other))

    def __radd__(self, other):
        return Counted.of(other.__add__(str(self)))


def counting(name):
    method = getattr(str, name)

    def counted(self, *arguments):
        start = arguments[1] if name == "find" and len(arguments) > 1 else 0
        found = method(self, *arguments)
        end = found if name == "find" and found >= 0 else len(self)
        one = name == "__getitem__" and isinstance(arguments[0], int)
        Counted.looked_at += 1 if one else max(end - start, 1)
        return Counted.of(found)

    return counted


METHODS = ["find", "rfind", "split", "partition", "rpartition", "replace", "strip", "rstrip", "removeprefix"]
METHODS += ["removesuffix", "__getitem__", "__contains__", "isdigit", "isdecimal", "isspace"]
for _name in METHODS:
    setattr(Counted, _name, counting(_name))


class CountedPattern:
    def __init__(self, pattern):
        self._pattern = pattern

    def search(self, text, start):
        found = self._pattern.search(text, start)
        Counted.looked_at += (found.end() if found else len(text)) - start
        return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_twice_the_length_takes_at_most_twice_the_operations(name, monkeypatch):
    monkeypatch.setattr(extraction, "_END", CountedPattern(extraction._END))
    for unit in UNITS:
        counts = []
        for length in (2_000, 4_000):
            Counted.looked_at = 0
            FUNCTIONS[name](Counted(unit * (length // len(unit))))
            counts.append(Counted.looked_at)
        assert counts[1] <= 2.2 * counts[0] + 100, f"{unit!r}: {counts}"


def test_the_other_patterns_of_the_trainer_have_a_bounded_length():
    for pattern in (extraction._BARE_FRACTION, extraction._BARE_ROOT, extraction._END):
        assert re._parser.parse(pattern.pattern).getwidth()[1] <= 8
    long = "Answer: " + "x" * 10_000
    assert extraction.dapo_answer(long) in ("x" * extraction.TAIL_CHARACTERS, extraction.INVALID)


PUBLISHED = {  # the rules as regular expressions, which take quadratic time
    "answer_line": re.compile(r"(?:[^\n]*\n)*Answer:[^\n]*\S[^\n]*\s*"),
    "boxed": re.compile(r".*\\boxed\{.*", re.DOTALL),
    "number": re.compile(r"(?:[^#]*#)?\s*-?\d+-?\s*"),
    "think": re.compile(r"<think>.*?</think>\s*\S.*", re.DOTALL),
}
FIRST_MATH = re.compile(r"[^\n$]*\$([^\n$]*)\$[^\n]*")
WRAPPERS = {c: re.compile(rf"\\{c}\{{([^\n}}]*)\}}") for c in ("text", "textbf", "overline")}
BOXED = re.compile(r"\\boxed\{([^\n]*)\}")
texts = st.lists(st.sampled_from([*UNITS, "x", "٣", "\u2028", "\r", "\x0b", "\\textbf{"]), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(texts)
def test_the_rules_are_the_published_ones(text):
    for name, pattern in PUBLISHED.items():
        assert verifiers.FORMATS[name](text) == (pattern.fullmatch(text) is not None), name
    assert "\n".join(map(extraction._first_math, text.split("\n"))) == FIRST_MATH.sub(r"$\1$", text)
    assert "\n".join(map(extraction._unboxed, text.split("\n"))) == BOXED.sub(r"\1", text)
    for command, pattern in WRAPPERS.items():
        assert extraction._unwrapped(text, f"\\{command}{{") == pattern.sub(r"\1", text)
