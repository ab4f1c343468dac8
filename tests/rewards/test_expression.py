from __future__ import annotations

import json

import pytest

from rpg_jax.rewards.expression import countdown, evaluate

GAME = json.dumps({"numbers": [3, 5, 7, 2], "target": 20})


@pytest.mark.parametrize(
    ("expression", "correct"),
    [
        ("(3 + 7) * (5 - 3)", 0),  # 3 twice, 2 never
        ("(7 - 2) * 5 - 3 - 2", 0),
        ("7 * 5 - 3 * 5", 0),
        ("5 * 2 + 3 + 7", 1),
        (" ((5)*(2))+(3+7) ", 1),
        ("7 + 3 + 5 * 2 = 20", 0),
        ("7 + 3 + 5 * 2; 1", 0),
        ("-3 + 5 * 2 + 7", 0),
        ("7 + 3 + 5 2 *", 0),
        ("(7 + 3 + 5 * 2", 0),
        ("7 + 3 + 5 * 2)", 0),
        ("", 0),
        ("3 ** 5 ** 7 ** 2", 0),
        ("3 / (5 - 5)", 0),
        ("__import__('os').system('ls')", 0),
        ("٣ + 5 * 2 + 7", 0),
        ("(" * 240 + "3+7+5*2" + ")" * 240, 1),
        ("(" * 9000 + "3+7+5*2" + ")" * 9000, 0),
        ("(" * 480 + "3+7+5*2", 0),
    ],
)
def test_countdown_accepts_its_grammar_only(expression, correct):
    assert countdown(f"<answer>1</answer> <answer>{expression}</answer>", GAME) == correct
    assert countdown(f"so\nAnswer: {expression}\n", GAME) == correct
    assert countdown(expression, GAME) == 0


def test_countdown_calculates_in_fractions():
    assert countdown("<answer>8 / (3 - 8 / 3)</answer>", '{"numbers": [8, 3, 8, 3], "target": 24}') == 1
    assert countdown("<answer>1 / (1 - 1)</answer>", '{"numbers": [1, 1, 1], "target": 0}') == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("-(2+3)*-1.5", 7.5),
        ("2--2", 4),
        ("--2", 2),
        (" ( 1/4 ) ", 0.25),
        ("(" * 249 + "1" + ")" * 249, 1),
    ],
)
def test_an_expression_has_decimals_and_signs(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text", ["", "1 2", "2**3", "(1", "1)", "1+", "x", "1/0", "1/(2-2)", "(" * 500, "1" * 501])
def test_what_is_no_expression_is_one_error(text):
    with pytest.raises(ValueError, match="not an expression|division by zero"):
        evaluate(text)
    assert countdown(f"<answer>-{text or 3}</answer>", '{"numbers": [3], "target": -3}') == 0  # no signs there
