"""Turns a row of a data file or data set into a `Problem`, or says why it cannot."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rpg_jax.data.prompts import Problem
from rpg_jax.data.templates import apply_template, strip_template

QUESTION_KEYS = ("question", "problem", "prompt", "raw_problem")
ANSWER_KEYS = ("answer", "final_answer", "ground_truth", "solution")


class BadRow(Exception):
    """Why a row cannot be used; the message completes "file, row n: …"."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
      template: prompt template (see `TEMPLATES`). None keeps the data's own prompts and puts bare questions into the
        paper's template.
      source: replaces the rows' own `data_source`; None keeps it.
      shape: reads (question, answer) from a row; None means the official schema or the usual key names.
    """

    template: str | None = None
    source: str | None = None
    shape: Callable[[Mapping[str, Any]], tuple[str, str]] | None = None


def read_row(row: Any, reading: Reading, prompt_id: int) -> Problem:
    """The problem in a row.

    Without `reading.shape` a row has the official schema, {data_source, prompt: [{role, content}], ability,
    reward_model: {ground_truth, style}, extra_info: {index, raw_problem, split}}, or it is flat, with one of
    `QUESTION_KEYS` and one of `ANSWER_KEYS`.

    Raises:
      BadRow: a key is missing, a type is wrong, or the prompt or the answer is empty.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object, got {type(row).__name__}")
    if reading.shape is None and "reward_model" in row:
        return _official(row, reading, prompt_id)
    if reading.shape is None:
        question = _text(row, _first_key(row, QUESTION_KEYS))
        answer = _text(row, _first_key(row, ANSWER_KEYS))
    else:
        question, answer = reading.shape(row)
    source = reading.source or row.get("source") or row.get("data_source") or "unnamed"
    prompt = apply_template(reading.template or "paper", question)
    return _problem(prompt_id, prompt, answer, source, row.get("samples"), "", question)


def official_row(problem: Problem, index: int) -> dict[str, Any]:
    """The problem as one row of the official schema, with its number of samples in `extra_info`."""
    system = [{"role": "system", "content": problem.system}] if problem.system else []
    return {
        "data_source": problem.source,
        "prompt": [*system, {"role": "user", "content": problem.prompt}],
        "ability": "MATH",
        "reward_model": {"ground_truth": problem.answer, "style": "rule"},
        "extra_info": {"index": index, "raw_problem": problem.question, "split": None, "samples": problem.samples},
    }


def _official(row: Mapping[str, Any], reading: Reading, prompt_id: int) -> Problem:
    if not isinstance(row["reward_model"], Mapping):
        raise BadRow(f"'reward_model' must be {{ground_truth, style}}, got {type(row['reward_model']).__name__}")
    messages = row.get("prompt")
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(f"'prompt' must be a list of {{role, content}}, got {type(messages).__name__}")
    roles = [m.get("role") for m in messages]
    if roles not in (["user"], ["system", "user"]):
        raise BadRow(f"'prompt' must be one user turn, with or without a system turn before it, got roles {roles}")
    prompt = _text(messages[-1], "content")
    system = _text(messages[0], "content") if len(messages) == 2 else ""
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    question = _text(extra, "raw_problem") if extra.get("raw_problem") else strip_template(prompt)
    if reading.template is not None:
        prompt = apply_template(reading.template, question)
    answer = _text(row["reward_model"], "ground_truth")
    source = reading.source or _text(row, "data_source")
    return _problem(prompt_id, prompt, answer, source, extra.get("samples"), system, question)


def _problem(prompt_id: int, prompt, answer, source, samples, system, question) -> Problem:
    samples = 1 if samples is None else samples
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise BadRow(f"'samples' must be a whole number above 0, got {samples!r}")
    if not isinstance(source, str):
        raise BadRow(f"the source must be text, got {type(source).__name__}")
    if not question.strip():
        raise BadRow("empty prompt")
    if not answer.strip():
        raise BadRow("empty answer")
    for name, text in {"prompt": prompt, "answer": answer, "source": source, "system turn": system}.items():
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise BadRow(f"the {name} holds half of a character (a lone surrogate), which no file can keep")
    return Problem(prompt_id, prompt, answer.strip(), source, samples, system, question)


def _first_key(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if row.get(key) is not None:
            return key
    raise BadRow(f"none of {list(keys)} in it; it has {sorted(map(str, row))[:12]}")


def _text(row: Mapping[str, Any], key: str) -> str:
    """Text, or a number as text (JSON answers often are numbers): 7.0 is 7, as verifiers compare it."""
    if row.get(key) is None:
        raise BadRow(f"missing key {key!r}; it has {sorted(map(str, row))[:12]}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"{key!r} must be text, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{key!r} is {value}, which is no answer")
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def whole_number_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    """The usual keys; an answer that is a whole number is written without decimals, as verifiers compare it."""
    question, answer = (_text(row, _first_key(row, keys)) for keys in (QUESTION_KEYS, ANSWER_KEYS))
    return question, answer.strip().removesuffix(".0")


def gsm8k_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    answer = _text(row, "answer")
    if "####" not in answer:
        raise BadRow("answer without '####'")
    return _text(row, "question"), answer.rpartition("####")[2].strip().replace(",", "")


def olympiad_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    answers = row.get("final_answer")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise BadRow("'final_answer' must be a list of texts")
    return _text(row, "question"), ", ".join(answers)


def countdown_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers) or not isinstance(target, int):
        raise BadRow("'nums' must be whole numbers and 'target' one")
    question = f"Using the numbers {numbers}, each exactly once, with + - * / and parentheses, make {target}."
    return question, json.dumps({"numbers": numbers, "target": target})
