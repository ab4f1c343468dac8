"""Turns a row of a data file or data set into a `Problem`, or raises `BadRow` with the reason."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rpg_jax.data.prompts import Problem, apply_template, strip_template

QUESTION_KEYS = ("question", "problem", "prompt", "raw_problem")
ANSWER_KEYS = ("answer", "final_answer", "ground_truth", "solution")
DEMONSTRATION_KEYS = ("demonstration", "completion")
_MOST_SAMPLES = 10**6  # of a problem: an evaluation lists them all


class BadRow(Exception):
    """A row cannot be used. The message is the reason, without the place of the row, which `sources.load` adds."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
      template: prompt template, by its name in `prompts.TEMPLATES` or as a text with {question}. None keeps the prompts
        of official rows and of `messages`, and puts other questions into the paper's template.
      source: the source. None: "data_source" of an official row; of another row "source", "data_source" or "unnamed".
      shape: reads (question, answer) from a row; None: the row has one of the three forms that `read_row` describes.
    """

    template: str | None = None
    source: str | None = None
    shape: Callable[["Row"], tuple[str, str]] | None = None


@dataclasses.dataclass
class Report:
    """Counts of the rows of one or several sources.

    Attributes:
      rows: rows read, bad rows included.
      repeated: rows that repeated an earlier problem; each row adds its samples to the problem's `samples`.
      bad: "PLACE: REASON" for each row that could not be used; a place is for example "FILE, row 3".
      taken: (meaning, column) -> number of rows in which the column was read so, e.g. ("answer", "solution").
      ignored: column -> number of rows in which the column has a value and was not read. Rows that `read_row` refuses
        are not counted, here and in `taken`.
    """

    rows: int = 0
    repeated: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)
    taken: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    ignored: Counter[str] = dataclasses.field(default_factory=Counter)


class Row(Mapping[str, Any]):
    """A row of a data set as a mapping that notes which of its columns were read: `looked_at` has the names of all that
    were, and `taken` the column of a meaning: "question", "answer", "source", "demonstration"."""

    def __init__(self, row: Mapping[str, Any]):
        self._row, self.looked_at, self.taken = row, set[str](), dict[str, str]()

    def __getitem__(self, key: str) -> Any:
        value = self._row[key]
        self.looked_at.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def first(self, meaning: str, keys: tuple[str, ...]) -> str | None:
        """Returns the first key of `keys` whose value is not None, and notes the key as taken[meaning]; else None."""
        for key in keys:
            if self.get(key) is not None:
                self.taken[meaning] = key
                return key
        return None

    def note(self, report: Report) -> None:
        """Adds `taken` to `report.taken`, and the columns with a value that was not looked at to `report.ignored`."""
        report.taken.update(self.taken.items())
        report.ignored.update(str(k) for k, v in self._row.items() if k not in self.looked_at and v is not None)


def read_row(row: Any, reading: Reading, prompt_id: int, report: Report) -> Problem:
    """Returns the problem in a row, with the number `prompt_id`. `report` counts the row's columns.

    Without `reading.shape` a row has one of three forms. The official schema: {data_source, prompt: [{role, content}],
    ability, reward_model: {ground_truth, style}, extra_info: {index, raw_problem, split, samples}}. `messages` are one
    turn of the user and one of the assistant, a demonstration, after a system turn or none. Other rows have a question
    under one of `QUESTION_KEYS` and an answer under one of `ANSWER_KEYS`; they and `messages` may have `samples`. All
    but `messages` may have a demonstration under one of `DEMONSTRATION_KEYS`. With a demonstration the answer may be
    empty; outside the official schema, and without `reading.shape`, it may be missing.

    Raises BadRow if a key is missing, a type, role or `samples` is wrong, the question, prompt, answer or a text under
    `DEMONSTRATION_KEYS` is empty, or a text has a lone surrogate; ValueError for an unknown template.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object, got {type(row).__name__}")
    noted = Row(row)
    problem = _read(noted, reading, prompt_id)
    noted.note(report)
    return problem


def _read(row: Row, reading: Reading, prompt_id: int) -> Problem:
    if reading.shape is None and "reward_model" in row:
        return _official(row, reading, prompt_id)
    if reading.shape is None and row.get("messages") is not None:
        return _conversation(row, reading, prompt_id)
    demonstrations = _demonstrations(row)
    if reading.shape is None:
        question = first_text(row, "question", QUESTION_KEYS)
        answer = _answer(row, needed=not demonstrations)
    else:
        question, answer = reading.shape(row)
    prompt = apply_template(reading.template or "paper", question)
    source = _source(row, reading)
    return _problem(prompt_id, prompt, answer, source, row.get("samples"), "", question, demonstrations)


def official_row(problem: Problem, index: int) -> dict[str, Any]:
    """Returns the problem as a row of the official schema, which `read_row` describes, with its demonstrations under
    "demonstration" (or None). `index` goes into `extra_info`. The row does not hold `prompt_id` and `messages`."""
    system = [{"role": "system", "content": problem.system}] if problem.system else []
    return {
        "data_source": problem.source,
        "prompt": [*system, {"role": "user", "content": problem.prompt}],
        "ability": "MATH",
        "reward_model": {"ground_truth": problem.answer, "style": "rule"},
        "extra_info": {"index": index, "raw_problem": problem.question, "split": None, "samples": problem.samples},
        "demonstration": list(problem.demonstrations) or None,
    }


def _conversation(row: Row, reading: Reading, prompt_id: int) -> Problem:
    """Reads a row of `messages`, the form of supervised data sets. Only a template in `reading` changes the prompt."""
    messages = _turns(row["messages"], "messages")
    roles = [m["role"] for m in messages]
    if roles not in (["user", "assistant"], ["system", "user", "assistant"]):
        raise BadRow(f"'messages' must be system (or none), user, assistant: one turn is trained, got roles {roles}")
    *system, question, demonstration = (m["content"] for m in messages)
    row.taken |= {"question": "messages", "demonstration": "messages"}
    prompt = apply_template(reading.template or "none", question)
    own = (demonstration,) if demonstration.strip() else ()
    answer = _answer(row, needed=not own)
    source = _source(row, reading)
    return _problem(prompt_id, prompt, answer, source, row.get("samples"), "".join(system), question, own)


def _turns(messages: Any, name: str) -> list[Mapping[str, str]]:
    """Returns `messages`, the turns under the key `name`. Raises BadRow unless each has a role and a text."""
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(f"{name!r} must be a list of {{role, content}}, got {type(messages).__name__}")
    if any(not isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise BadRow(f"a turn of {name!r} lacks its role or content, or has one that is not text")
    return messages


def _demonstrations(row: Row) -> tuple[str, ...]:
    """Returns the demonstrations under the first of `DEMONSTRATION_KEYS` with a value, else (). The value is a text, a
    list of texts, or a list of one turn, the assistant's. Raises BadRow for another value and an empty text."""
    key = row.first("demonstration", DEMONSTRATION_KEYS)
    if key is None:
        return ()
    value = row[key]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        turns = _turns(value, key)
        if [m["role"] for m in turns] != ["assistant"]:
            raise BadRow(f"{key!r} must be one turn of the assistant, got roles {[m['role'] for m in turns]}")
        value = turns[0]["content"]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRow(f"{key!r} must be text, or a list of texts, and not empty")
    return tuple(texts)


def _answer(row: Row, *, needed: bool) -> str:
    return first_text(row, "answer", ANSWER_KEYS) if needed or row.first("answer", ANSWER_KEYS) else ""


def _source(row: Row, reading: Reading) -> Any:
    key = row.first("source", ("source", "data_source"))
    return reading.source or (row[key] if key else "") or "unnamed"


def _official(row: Row, reading: Reading, prompt_id: int) -> Problem:
    if not isinstance(row["reward_model"], Mapping):
        raise BadRow(f"'reward_model' must be {{ground_truth, style}}, got {type(row['reward_model']).__name__}")
    messages = row.get("prompt")
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise BadRow(f"'prompt' must be a list of {{role, content}}, got {type(messages).__name__}")
    roles = [m.get("role") for m in messages]
    if roles not in (["user"], ["system", "user"]):
        raise BadRow(f"'prompt' must be one user turn, with or without a system turn before it, got roles {roles}")
    *system, prompt = (text_of(m, "content") for m in messages)
    row.taken |= {"question": "prompt", "answer": "reward_model", "source": "data_source"}
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    question = text_of(extra, "raw_problem") if extra.get("raw_problem") else strip_template(prompt)
    if reading.template is not None:
        prompt = apply_template(reading.template, question)
    answer = text_of(row["reward_model"], "ground_truth")
    source = reading.source or text_of(row, "data_source")
    own = _demonstrations(row)
    return _problem(prompt_id, prompt, answer, source, extra.get("samples"), "".join(system), question, own)


def _problem(prompt_id: int, prompt, answer, source, samples, system, question, demonstrations) -> Problem:
    samples = 1 if samples is None else samples
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= _MOST_SAMPLES:
        raise BadRow(f"'samples' must be a whole number from 1 to {_MOST_SAMPLES}, got {samples!r:.60}")
    if not isinstance(source, str):
        raise BadRow(f"the source must be text, got {type(source).__name__}")
    if not (question.strip() and prompt.strip()):
        raise BadRow("empty prompt")
    if not answer.strip() and not demonstrations:
        raise BadRow("empty answer: any text will do if the reward reads none")
    texts = {"prompt": prompt, "question": question, "answer": answer, "source": source, "system turn": system}
    for name, text in {**texts, "demonstration": "".join(demonstrations)}.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRow(f"the {name} holds half of a character (a lone surrogate), which no file can keep") from error
    return Problem(prompt_id, prompt, answer.strip(), source, samples, system, question, demonstrations)


def first_text(row: Row, meaning: str, keys: tuple[str, ...]) -> str:
    """Returns the text under the first of `keys` whose value is not None, and notes the key in `row.taken` under
    `meaning`. Raises BadRow if there is no such key, and as `text_of` does, which also turns numbers into text."""
    key = row.first(meaning, keys)
    if key is None:
        raise BadRow(f"none of {list(keys)} in {sorted(map(str, row))[:12]}. Rename the {meaning} column {keys[0]!r}")
    return text_of(row, key)


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Returns the text under `key`. A number becomes text, as answers in JSON often are numbers, and 7.0 becomes "7".
    Raises BadRow if the key is missing, or the value is None, of another type, NaN or infinite."""
    if row.get(key) is None:
        raise BadRow(f"missing key {key!r}; it has {sorted(map(str, row))[:12]}")
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"{key!r} must be text, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{key!r} is {value}, which is no answer")
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value)


def whole_number_shape(row: Row) -> tuple[str, str]:
    """Returns (question, answer) under `QUESTION_KEYS` and `ANSWER_KEYS`. The answer "7.0" becomes "7", as verifiers
    expect. Raises BadRow if the question or the answer is missing, or neither text nor number."""
    question, answer = first_text(row, "question", QUESTION_KEYS), first_text(row, "answer", ANSWER_KEYS)
    return question, answer.strip().removesuffix(".0")


def gsm8k_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (text of "question", text after the last "####" of "answer", no commas). BadRow if a part is missing."""
    answer = text_of(row, "answer")
    if "####" not in answer:
        raise BadRow("answer without '####'")
    return text_of(row, "question"), answer.rpartition("####")[2].strip().replace(",", "")


def olympiad_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (text of "question", texts of the list "final_answer" joined by ", "). Raises BadRow without either."""
    answers = row.get("final_answer")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise BadRow("'final_answer' must be a list of texts")
    return text_of(row, "question"), ", ".join(answers)


def countdown_shape(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (question in words, JSON {"numbers", "target"}) of "nums" and "target". Raises BadRow without them."""
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers) or not isinstance(target, int):
        raise BadRow("'nums' must be whole numbers and 'target' one")
    question = f"Using the numbers {numbers}, each exactly once, with + - * / and parentheses, make {target}."
    return question, json.dumps({"numbers": numbers, "target": target})
