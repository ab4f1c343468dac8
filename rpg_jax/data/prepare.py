"""Makes a training file from loaded problems, without problems of an evaluation."""

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rpg_jax import storage
from rpg_jax.data.prompts import Problem
from rpg_jax.data.rows import official_row

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
    """Returns (problems to keep, problems to remove).

    A removed problem shares `ngram` words in a row with an evaluation question. Questions are compared without prompt
    templates, as lower-case words and numbers. A question shorter than `ngram` words must be equal as a whole.

    Raises:
      ValueError: `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram must be >= 1 word, got {ngram}")
    known = {gram for problem in evaluation for gram in _grams(problem.question, ngram)}
    kept: list[Problem] = []
    removed: list[Problem] = []
    for problem in problems:
        (kept if known.isdisjoint(_grams(problem.question, ngram)) else removed).append(problem)
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
