"""Loads problems from parquet and JSONL files, the Hugging Face hub and generators, and writes parquet files."""

import codecs
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from rpg_jax import storage
from rpg_jax.data.prompts import Problem
from rpg_jax.data.rows import (
    BadRow,
    Reading,
    Report,
    countdown_shape,
    gsm8k_shape,
    official_row,
    olympiad_shape,
    read_row,
    whole_number_shape,
)
from rpg_jax.losses.declaration import unknown
from rpg_jax.storage.files import distinct

_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub, "owner/name" with a config and a split, and how its rows are read."""

    repository: str
    config: str
    split: str
    reading: Reading = Reading()


_GSM8K = Reading("gsm8k", "gsm8k", gsm8k_shape)
HUB = {
    "dapo-math-17k": HubDataset("BytedTsinghua-SIA/DAPO-Math-17k", "default", "train"),
    "dapo-math-17k-eng": HubDataset("math-dataset/DAPO-17k-Eng", "default", "train"),
    "aime-2024": HubDataset("BytedTsinghua-SIA/AIME-2024", "default", "train"),
    "aime25": HubDataset("math-ai/aime25", "default", "test", Reading(source="aime2025")),
    "amc-23": HubDataset("math-ai/amc23", "default", "test", Reading(None, "amc_23", whole_number_shape)),
    "math-500": HubDataset("HuggingFaceH4/MATH-500", "default", "test", Reading(source="math500")),
    "minerva": HubDataset("math-ai/minervamath", "default", "test", Reading(source="minerva")),
    "olympiadbench": HubDataset(
        "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train", Reading(None, "olympiadbench", olympiad_shape)
    ),
    "gsm8k": HubDataset("openai/gsm8k", "main", "train", _GSM8K),
    "gsm8k-test": HubDataset("openai/gsm8k", "main", "test", _GSM8K),
    "countdown": HubDataset(
        "Jiayi-Pan/Countdown-Tasks-3to4", "default", "train", Reading("countdown", "countdown", countdown_shape)
    ),
}


def load(
    sources: str | Iterable[str],
    *,
    bad_rows: Literal["fatal", "skip"] = "fatal",
    template: str | None = None,
    source: str | None = None,
    count: int = 1000,
    seed: int = 0,
) -> tuple[list[Problem], Report]:
    """Returns (the distinct problems of one or several sources, numbered in the order read; a report on the rows).

    A source is the path of a .parquet, .jsonl or .json file, or of a folder of .parquet or .jsonl files; a name in
    `HUB`; any hub data set as "hf:owner/name/config/split"; "reasoning_gym:task". A row with the prompt and the system
    turn of an earlier row adds its samples and demonstrations to the earlier problem; with another answer it is bad.

    Args:
      bad_rows: "fatal" raises if a row is bad; "skip" leaves bad rows out, and the report names them.
      template: name of a prompt template in `prompts.TEMPLATES`, or a text with {question}; None: the source's own.
      source: replaces `Problem.source`, which decides the verifier under the reward "by_source"; None keeps it.
      count, seed: the number of problems and the seed of a procedural generator.

    Raises:
      ValueError: a source or template is unknown, a file is empty or damaged, a download fails, reasoning_gym is not
        installed, or no row is usable; with "fatal", also if a row is bad.
    """
    report = Report()
    merged: dict[tuple[str, str], Problem] = {}
    for name in [sources] if isinstance(sources, str) else sources:
        reading, rows = open_source(name, count=count, seed=seed)
        reading = Reading(template or reading.template, source or reading.source, reading.shape)
        for where, row in rows:
            report.rows += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                _merge(merged, read_row(row, reading, len(merged), report), report)
            except BadRow as reason:
                report.bad.append(f"{where}: {reason}")
    first = "\n  ".join(["", *report.bad[:_SHOWN], *["…"] * (len(report.bad) > _SHOWN)])
    if not merged:
        raise ValueError(f"no usable problem in {sources}: {report.rows} rows read, {len(report.bad)} bad{first}")
    if report.bad and bad_rows != "skip":
        skip = "--config.task.bad_rows=skip leaves them out, in rpg_jax.data --bad_rows=skip"
        raise ValueError(f"{len(report.bad)} of {report.rows} rows are bad ({skip}):{first}")
    return list(merged.values()), report


def _merge(merged: dict[tuple[str, str], Problem], problem: Problem, report: Report) -> None:
    key = (problem.system, problem.prompt)
    known = merged.setdefault(key, problem)
    if known is problem:
        return
    if known.answer and problem.answer and known.answer != problem.answer:
        raise BadRow(f"the same prompt had the answer {known.answer!r} before, now {problem.answer!r}")
    report.repeated += 1
    shown = (*known.demonstrations, *problem.demonstrations)  # equal ones too: a teacher's samples have a frequency
    answer, samples = known.answer or problem.answer, known.samples + problem.samples
    merged[key] = dataclasses.replace(known, answer=answer, samples=samples, demonstrations=shown)


Rows = Iterator[tuple[str, Any]]


def open_source(name: str, *, count: int, seed: int) -> tuple[Reading, Rows]:
    """Returns (how to read the rows, the rows as (place, row)). A row that does not parse is a `BadRow`, not raised.
    `name` is a path, a name in `HUB`, "hf:owner/name/config/split" or "reasoning_gym:task"; `count` and `seed` are for
    the last. Raises ValueError for another name. The iteration over the rows reads them, and raises other errors."""
    path = Path(name)
    if path.exists():
        return Reading(), _files(path)
    if name.startswith("reasoning_gym:"):
        task = name.partition(":")[2]
        reading = Reading(source=f"reasoning_gym/{task}")
        if task == "countdown":  # the game of the hub's data set: its prompt, and an answer that its verifier reads
            reading = HUB["countdown"].reading
        return reading, _reasoning_gym(task, count, seed)
    if name in HUB:
        return HUB[name].reading, _hub(HUB[name])
    if name.startswith("hf:"):
        parts = name.removeprefix("hf:").split("/")
        if len(parts) != 4:
            raise ValueError(f"{name!r} is not of the form hf:owner/name/config/split, e.g. hf:openai/gsm8k/main/train")
        return Reading(), _hub(HubDataset("/".join(parts[:2]), parts[2], parts[3]))
    raise unknown("file, folder or data set", name, [*HUB, "hf:owner/name/config/split", "reasoning_gym:task"])


def file_rows(path: Path) -> list[Any]:
    """Returns the unchanged rows of a .parquet, .jsonl or .json file, or of a folder's .parquet and .jsonl files, by
    name. Raises ValueError for other, empty and damaged files, broken rows and folders without such files;
    FileNotFoundError for a missing file with such a suffix."""
    found = list(_files(path))
    if bad := [f"{where}: {row}" for where, row in found if isinstance(row, BadRow)]:
        raise ValueError(bad[0])
    return [row for _, row in found]


def _files(path: Path) -> Rows:
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _jsonl}
    files = sorted(f for f in path.iterdir() if f.suffix in (".parquet", ".jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no .parquet or .jsonl file in the folder {path}")
    for file in files:
        if file.suffix not in readers:
            raise ValueError(f"{file}: cannot read {file.suffix or 'a file without suffix'}; take {', '.join(readers)}")
        if file.stat().st_size == 0:
            raise ValueError(f"{file} is empty (0 bytes)")
        yield from readers[file.suffix](file)


def _parquet(file: Path) -> Rows:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(1024):
                for row in batch.to_pylist():
                    yield f"{file}, row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # no UTF-8; the year 1e5
        raise ValueError(f"{file} is not a readable parquet file (after {number} rows): {error}") from error
    if number == 0:
        raise ValueError(f"{file} has no rows")


def _jsonl(file: Path) -> Rows:
    """Yields the JSON of each line, counted from 1, or the entries of a file that is one JSON array."""
    with file.open("rb") as lines:
        head = lines.read(100)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # `json` guesses the encoding of each line by itself
            raise ValueError(f"{file} is in UTF-16: save it as UTF-8")
        lines.seek(0)
        if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            try:
                rows = json.loads(lines.read(), object_pairs_hook=distinct)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file} is not a readable JSON array: {error}") from error
            yield from ((f"{file}, entry {number}", row) for number, row in enumerate(rows))
            return
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=distinct)
            except (ValueError, RecursionError) as error:
                row = BadRow(f"not JSON: {error}")
            yield f"{file}, line {number}", row


def _hub(data: HubDataset) -> Rows:
    """Yields the rows of a public data set, from the parquet files that the hub keeps on branch refs/convert/parquet.
    Raises ValueError if the download fails, or the data set has no such config and split."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)  # it warns of retries
    what = f"{data.repository} ({data.config}, {data.split})"
    branch: dict[str, Any] = {"repo_id": data.repository, "repo_type": "dataset", "revision": "refs/convert/parquet"}
    try:
        listed = huggingface_hub.HfApi().list_repo_files(**branch)
        folders = (f"{data.config}/{data.split}/", f"{data.config}/partial-{data.split}/")
        names = sorted(n for n in listed if n.startswith(folders) and n.endswith(".parquet"))
        files = [huggingface_hub.hf_hub_download(filename=n, **branch) for n in names]
    except Exception as error:  # the hub client and its transport raise errors of many kinds
        raise ValueError(
            f"cannot download {what} from the Hugging Face hub: {type(error).__name__}: {error}. "
            "Without a network, copy the data set's parquet files here and give their path"
        ) from error
    if not files:
        splits = sorted({n.rpartition("/")[0] for n in listed if n.endswith(".parquet")})
        raise ValueError(f"{what} has no such config and split; it has {splits}")
    for file in files:
        yield from _parquet(Path(file))


def _reasoning_gym(task: str, count: int, seed: int) -> Rows:
    """Yields questions and answers of a generator. Its scorers are not used: some execute what the model wrote."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError("reasoning_gym:… needs `pip install reasoning-gym`, which is not installed") from error
    if task not in DATASETS:
        raise unknown("task of reasoning-gym", task, sorted(DATASETS))
    for number, entry in enumerate(reasoning_gym.create_dataset(task, size=count, seed=seed)):
        row = {"question": entry["question"], "answer": entry["answer"]}
        if task == "countdown":
            row = {"nums": list(entry["metadata"]["numbers"]), "target": entry["metadata"]["target"]}
        no_answer = entry["answer"] is None
        yield f"{task}, example {number}", BadRow("no single right answer, only a scorer") if no_answer else row


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

SHARED_WORDS = 13
"""Words in a row that a training question and an evaluation question may not share."""


def decontaminate(problems: Iterable[Problem], evaluation: Iterable[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Returns (problems to keep, problems to remove), both in order. A problem to remove shares 13 words in a row with
    a problem of `evaluation`, or both have the same words, fewer than 13. Questions are compared without prompt
    templates, as lower-case words and numbers."""
    known = {gram for problem in evaluation for gram in _grams(problem.question)}
    kept: list[Problem] = []
    removed: list[Problem] = []
    for problem in problems:
        (kept if known.isdisjoint(_grams(problem.question)) else removed).append(problem)
    return kept, removed


def write_parquet(problems: Sequence[Problem], path: str | os.PathLike[str]) -> None:
    """Writes a parquet file with one row per problem, as `official_row` makes it. Makes the folder, and replaces an old
    file. The new file appears complete or not at all. Raises ValueError without problems, or if `path` is a folder."""
    if not problems:
        raise ValueError(f"nothing to write to {path}: every problem was removed")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist([official_row(one, index) for index, one in enumerate(problems)], SCHEMA)
    storage.write_atomically(path, lambda file: pyarrow.parquet.write_table(table, file))


def _grams(question: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", question.lower())
    for i in range(max(1, len(words) - SHARED_WORDS + 1)):
        yield tuple(words[i : i + SHARED_WORDS])
