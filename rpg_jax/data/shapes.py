"""Rows of known data sets: the question and the answer in each."""

import json
from collections.abc import Mapping
from typing import Any

from rpg_jax.data.rows import ANSWER_KEYS, QUESTION_KEYS, BadRow, column, text_of


def whole_number_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    """The usual keys; an answer that is a whole number is written without decimals, as verifiers compare it."""
    question = text_of(row, column(row, "question", QUESTION_KEYS))
    answer = text_of(row, column(row, "answer", ANSWER_KEYS))
    return question, answer.strip().removesuffix(".0")


def gsm8k_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    answer = text_of(row, "answer")
    if "####" not in answer:
        raise BadRow("answer without '####'")
    return text_of(row, "question"), answer.rpartition("####")[2].strip().replace(",", "")


def olympiad_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    answers = row.get("final_answer")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise BadRow("'final_answer' must be a list of texts")
    return text_of(row, "question"), ", ".join(answers)


def countdown_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers) or not isinstance(target, int):
        raise BadRow("'nums' must be whole numbers and 'target' one")
    question = f"Using the numbers {numbers}, each exactly once, with + - * / and parentheses, make {target}."
    return question, json.dumps({"numbers": numbers, "target": target})
