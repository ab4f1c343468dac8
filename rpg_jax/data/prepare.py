"""Makes a training file from loaded problems, without evaluation problems and without long prompts."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rpg_jax import storage
from rpg_jax.data.prompts import Problem
from rpg_jax.data.rows import official_row
from rpg_jax.data.templates import encode_prompt
from rpg_jax.data.tokenizer import Tokenizer

_MESSAGE = pyarrow.struct([("content", pyarrow.string()), ("role", pyarrow.string())])
_EXTRA = [("index", pyarrow.int64()), ("raw_problem", pyarrow.string()), ("split", pyarrow.string())]
SCHEMA = pyarrow.schema(
    [
        ("data_source", pyarrow.string()),
        ("prompt", pyarrow.list_(_MESSAGE)),
        ("ability", pyarrow.string()),
        ("reward_model", pyarrow.struct([("ground_truth", pyarrow.string()), ("style", pyarrow.string())])),
        ("extra_info", pyarrow.struct([*_EXTRA, ("samples", pyarrow.int64())])),
        ("demonstration", pyarrow.list_(pyarrow.string())),
    ]
)


def decontaminate(
    problems: Iterable[Problem], evaluation: Iterable[Problem], *, ngram: int = 13
) -> tuple[list[Problem], list[Problem]]:
    """Returns kept and removed problems. A removed one shares `ngram` words in a row with an evaluation question.

    Questions are compared without their prompt templates, as lower-case words and numbers. A question shorter than
    `ngram` words must be equal as a whole.

    Raises:
      ValueError: `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram must be >= 1 word, got {ngram}")
    known = {gram for problem in evaluation for gram in _grams(problem.question, ngram)}
    return _parted(problems, lambda problem: known.isdisjoint(_grams(problem.question, ngram)))


def filter_length(
    problems: Iterable[Problem], tokenizer: Tokenizer, max_tokens: int, *, thinking: bool
) -> tuple[list[Problem], list[Problem]]:
    """Returns kept and removed problems. A removed one has a prompt above `max_tokens`, as `encode_prompt` makes it."""
    return _parted(problems, lambda p: len(encode_prompt(p, tokenizer, thinking=thinking)) <= max_tokens)


def _parted(problems: Iterable[Problem], keep: Callable[[Problem], bool]) -> tuple[list[Problem], list[Problem]]:
    kept: list[Problem] = []
    removed: list[Problem] = []
    for problem in problems:
        (kept if keep(problem) else removed).append(problem)
    return kept, removed


def write_parquet(problems: Sequence[Problem], path: str | os.PathLike[str]) -> None:
    """Writes one row per problem in the official schema, with the number of completions to sample in `extra_info`.

    The file appears complete or not at all.

    Raises:
      ValueError: there is nothing to write.
    """
    if not problems:
        raise ValueError(f"nothing to write to {path}: every problem was removed")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [official_row(dataclasses.replace(p, prompt_id=i), i) for i, p in enumerate(problems)]
    table = pyarrow.Table.from_pylist(rows, SCHEMA)
    storage.write_atomically(path, lambda file: pyarrow.parquet.write_table(table, file))


def _grams(question: str, n: int) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", question.lower())
    if len(words) < n:
        yield tuple(words)
    for i in range(len(words) - n + 1):
        yield tuple(words[i : i + n])
