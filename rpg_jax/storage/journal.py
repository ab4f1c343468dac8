"""The journal: complete groups of completions in a run's folder, so that a resumed run samples only the missing groups.

A group depends only on its key: the weights, the seed, the step, the prompt and the sampling parameters. A thread
appends groups to journal/STEP/ as they are completed. On disk each process appends to one file a step, within
milliseconds. In a bucket each process writes an object every `_FLUSH_SECONDS`, or earlier once `_FLUSH_BYTES` wait.

A journal only saves work, so no fault of it stops a run. A damaged record, a file that cannot be read, a key
with another value: stderr says the fault, and the group is sampled again. A failed write ends the journal of its step.

A record is a group of completions with the key under which it was sampled:

    magic    8 bytes
    lengths  2 × u32, little-endian: of text and of arrays, in bytes
    digest   32 bytes, SHA-256 of lengths, text and arrays
    text     JSON: key; lengths, finish_reasons and turns of the completions; dtype and shapes of their experts, if any
    arrays   i32[n] tokens, then f32[n] log-probabilities; n tokens in all; then the experts

Records follow each other in a file. A record cut short or changed is skipped; reading goes on at the next magic.
"""

import collections
import contextlib
import hashlib
import json
import math
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from rpg_jax.parallel import hosts
from rpg_jax.storage.files import absolute, in_bucket
from rpg_jax.types import Completion, Turns

_FLUSH_SECONDS = 10.0  # between two objects in a bucket
_FLUSH_BYTES = 1 << 26
_WAITING = 4096  # groups; more of them wait only if a write hangs
_CLOSE_SECONDS = 30.0
_MAGIC = b"\x89rpgJL2\n"
_HEAD = struct.Struct("<8s8s32s")  # magic, lengths, digest
_LENGTHS = struct.Struct("<II")

Key = Mapping[str, Any]  # JSON-able; `version` is that of the weights


class Record(NamedTuple):
    """A group from the journal, and its key. The weights of version `key["version"]` sampled all of its tokens."""

    key: dict[str, Any]
    completions: list[Completion]


class Journal:
    """The journal of one process of a run. `add` and `prune` never wait for the disk: a thread writes and deletes.

    The process's files hold at most `max_bytes`; further groups are dropped until `prune` makes room. No method raises
    an error of disk or bucket: stderr says it, and the groups are sampled again. `directory`: also in a bucket."""

    def __init__(self, directory: Path | epath.Path, *, max_bytes: int):
        self._directory = absolute(directory)
        self._left = set(_steps(self._directory))
        self._loaded: tuple[int, dict[int, list[Record]]] = (-1, {})
        self._writer = _Writer(self._directory, max_bytes)
        self._counts: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()

    def find(self, keys: Sequence[Key]) -> dict[int, list[Completion]]:
        """Returns the groups that an earlier process completed, as {index in `keys`: completions}, for the keys that
        have a group. Each key has integers `step` (from 0), `prompt_id` and `version`; all keys have the same `step`.
        Calls for a step, with no other step between, find a group once. stderr says why groups of these prompts with
        other keys are not used."""
        step = keys[0]["step"] if keys else -1
        if step != self._loaded[0]:
            self._loaded = step, self._load(step) if step in self._left else {}
        if not self._loaded[1]:
            return {}
        found: dict[int, list[Completion]] = {}
        refused: collections.Counter[str] = collections.Counter()
        for place, key in enumerate(keys):
            wanted, records = json.loads(json.dumps(dict(key))), self._loaded[1].get(key["prompt_id"], [])
            for record in records:
                if record.key == wanted:
                    found[place] = record.completions
                    records.remove(record)
                    break
            else:
                refused.update(_difference(record.key, wanted) for record in records[-1:])
        for difference, count in refused.items():
            _say(f"{count} groups of step {step + 1} are not used and sampled again: {difference}")
        return found

    def add(self, key: Key, completions: Sequence[Completion]) -> None:
        """Gives a complete group to the thread, which drops it if the journal is full or cannot be written."""
        self._writer.add(key, completions)

    def prune(self, before: int) -> None:
        """Drops the groups of steps 0, …, `before` - 1. Every process calls it, and has room for groups then.
        A thread does it later; the thread of the first process deletes the files of all processes."""
        self._left = {step for step in self._left if step >= before}
        self._writer.prune(before)

    def count(self, step: int, *, found: int, sampled: int) -> None:
        """Counts completions for `take_counts`: `found` in the journal, and `sampled`. Prints both if any is found."""
        if found:
            _say(f"step {step + 1}: {found} completions were complete before the restart, {sampled} are sampled")
        with self._counting:
            self._counts.update(journal_found=found, journal_sampled=sampled)

    def take_counts(self) -> dict[str, float]:
        """{"host/journal_found": completions, "host/journal_sampled": completions} of `count` since the last call."""
        with self._counting:
            taken, self._counts = self._counts, collections.Counter()
        return {f"host/{name}": taken[name] for name in ("journal_found", "journal_sampled")}

    def close(self) -> None:
        """Writes the groups that wait and ends the thread; gives up after a minute at the latest."""
        self._writer.close()

    def _load(self, step: int) -> dict[int, list[Record]]:
        """The records of a step by prompt_id, from the files of all earlier processes: their number may differ now."""
        by_prompt: dict[int, list[Record]] = {}
        for path in _entries(self._directory / str(step)):
            try:
                content = path.read_bytes()
            except Exception as error:  # the clients of buckets raise errors of many kinds
                _say(f"{path} cannot be read, and its groups are sampled again: {error}")
                continue
            self._writer.own(step, path.name, len(content))
            records, damaged = from_bytes(content)
            if damaged:
                _say(f"{path} is damaged in {damaged} places; the groups that were there are sampled again")
            for record in records:
                by_prompt.setdefault(record.key["prompt_id"], []).append(record)
        return by_prompt


class _Writer:
    """Does the journal's work on its folder in a thread of its own. A group that cannot be written is dropped."""

    def __init__(self, directory: epath.Path, max_bytes: int):
        self._directory, self._max_bytes, self._remote = directory, max_bytes, in_bucket(directory)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._sizes: collections.Counter[int] = collections.Counter()  # bytes by step
        self._unwritten: dict[int, list[bytes]] = {}
        self._flush_at, self._failed, self._full = math.inf, -1, False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, key: Key, completions: Sequence[Completion]) -> None:
        if not self._submit(lambda: self._encode(key, completions)):
            self._fail(key["step"], f"{_WAITING} groups wait to be written")

    def own(self, step: int, name: str, size: int) -> None:
        """Counts a file that an earlier process of this number wrote."""
        if name.startswith((f"{jax.process_index()}.", f"{jax.process_index()}-")):
            self._submit(lambda: self._sizes.update({step: size}))

    def prune(self, before: int) -> None:
        self._submit(lambda: self._prune(before))

    def close(self) -> None:
        with contextlib.suppress(queue.Full):  # a write hangs
            self._jobs.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)

    def _submit(self, job: Callable[[], None]) -> bool:
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(job)
            return True
        return False

    def _run(self) -> None:
        while True:
            wait = min(max(self._flush_at - time.monotonic(), 0.0), _FLUSH_SECONDS)
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=wait)
                if job is None:
                    return self._flush()
                try:
                    job()
                except Exception as error:
                    _say(f"{type(error).__name__}: {error}; the journal goes on without it")
            waiting = sum(len(record) for records in self._unwritten.values() for record in records)
            if time.monotonic() >= self._flush_at or waiting >= _FLUSH_BYTES:
                self._flush()

    def _encode(self, key: Key, completions: Sequence[Completion]) -> None:
        step = key["step"]
        if step == self._failed or self._full:
            return
        record = to_bytes(key, completions)
        self._full = self._sizes.total() + len(record) > self._max_bytes
        if self._full:
            limit = f"checkpoint.journal_gib={self._max_bytes / 2**30:g}"
            return _say(f"{limit} is used up: no group is journaled until the next checkpoint is complete")
        self._sizes[step] += len(record)
        self._unwritten.setdefault(step, []).append(record)
        self._flush_at = min(self._flush_at, time.monotonic() + (_FLUSH_SECONDS if self._remote else 0.0))

    def _flush(self) -> None:
        self._flush_at, unwritten, self._unwritten = math.inf, self._unwritten, {}
        for step, records in unwritten.items():
            try:
                self._write(self._directory / str(step), b"".join(records))
            except Exception as error:  # the clients of buckets raise errors of many kinds
                self._fail(step, str(error))

    def _write(self, folder: epath.Path, content: bytes) -> None:
        host = jax.process_index()
        if self._remote:  # objects cannot grow: each has a new name, by the time
            (folder / f"{host}-{time.time_ns()}.groups").write_bytes(content)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with Path(folder / f"{host}.groups").open("ab") as file:
            file.write(content)

    def _fail(self, step: int, reason: str) -> None:
        if step != self._failed:
            self._failed = step
            _say(f"the groups of step {step + 1} that are complete from now on are not journaled: {reason}")

    def _prune(self, before: int) -> None:
        self._sizes = collections.Counter({step: size for step, size in self._sizes.items() if step >= before})
        self._unwritten = {step: records for step, records in self._unwritten.items() if step >= before}
        self._full = False
        if not hosts.is_first():
            return
        for step, path in _steps(self._directory).items():
            try:
                if step < before:
                    path.rmtree()
            except Exception as error:  # the next call may succeed
                _say(f"{path} cannot be deleted: {error}")


def _steps(directory: epath.Path) -> dict[int, epath.Path]:
    """Returns the steps that have groups in the journal, with the folders of the steps."""
    return {int(path.name): path for path in _entries(directory) if path.name.isdecimal()}


def _entries(directory: epath.Path) -> list[epath.Path]:
    try:
        return sorted(directory.iterdir()) if directory.exists() else []
    except Exception as error:  # the clients of buckets raise errors of many kinds
        _say(f"{directory} cannot be read, and its groups are sampled again: {error}")
        return []


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    return ", ".join(f"{name} was {there.get(name)!r}, now {here.get(name)!r}" for name in names)


def _say(message: str) -> None:
    print(f"journal: {message}", file=sys.stderr, flush=True)


def to_bytes(key: Key, completions: Sequence[Completion]) -> bytes:
    """Returns the record of a group as bytes: 8 bytes a token, about half a kilobyte, and the experts."""
    tokens = np.concatenate([c.tokens for c in completions]).astype("<i4")
    logprobs = np.concatenate([c.logprobs for c in completions]).astype("<f4")
    text = {
        "key": dict(key),
        "lengths": [len(c.tokens) for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "turns": [c.turns and c.turns.record() for c in completions],
    }
    experts = [c.experts for c in completions if c.experts is not None]
    if experts:
        text |= {"experts": [experts[0].dtype.str, [one.shape for one in experts]]}
    arrays = b"".join([tokens.tobytes(), logprobs.tobytes(), *(one.tobytes() for one in experts)])
    body = json.dumps(text).encode()
    lengths = _LENGTHS.pack(len(body), len(arrays))
    return _HEAD.pack(_MAGIC, lengths, hashlib.sha256(lengths + body + arrays).digest()) + body + arrays


def from_bytes(data: bytes) -> tuple[list[Record], int]:
    """Returns the whole records in `data`, in their order, and the number of places where `data` has other bytes."""
    records: list[Record] = []
    at, damaged, view = 0, 0, memoryview(data)
    while at < len(data):
        found = _record(view, at)
        if found is None:
            damaged += 1
            following = data.find(_MAGIC, at + 1)
            at = len(data) if following < 0 else following
        else:
            record, at = found
            records.append(record)
    return records, damaged


def _record(view: memoryview, at: int) -> tuple[Record, int] | None:
    """Returns the record that begins at `at`, and its end; None if there is no whole record."""
    if len(view) - at < _HEAD.size:
        return None
    magic, lengths, digest = _HEAD.unpack_from(view, at)
    start, sizes = at + _HEAD.size, _LENGTHS.unpack(lengths)
    middle, end = start + sizes[0], start + sum(sizes)
    if magic != _MAGIC or end > len(view) or hashlib.sha256(lengths + view[start:end]).digest() != digest:
        return None
    text = json.loads(bytes(view[start:middle]))
    count, ends = sum(text["lengths"]), np.cumsum(text["lengths"])[:-1]
    tokens, logprobs = np.frombuffer(view[middle:], "<i4", 2 * count).reshape(2, -1)
    rest = view[middle + 8 * count : end]
    # Copies, so that the bytes of the file are freed and the arrays can be written to, as a rollout's can.
    parts = zip(
        np.split(tokens.astype(np.int32), ends),
        np.split(logprobs.view("<f4").astype(np.float32), ends),
        text["finish_reasons"],
        text["turns"],
        _experts(rest, *text["experts"]) if "experts" in text else [None] * len(text["turns"]),
        strict=True,
    )
    version = text["key"]["version"]
    made = [
        Completion(tokens, logprobs, reason, version, turns and Turns.of(**turns, length=len(tokens)), experts)
        for tokens, logprobs, reason, turns, experts in parts
    ]
    return Record(text["key"], made), end


def _experts(data: memoryview, dtype: str, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the experts of each completion, one array after another in `data`, by their `dtype` and `shapes`."""
    parts = np.split(np.frombuffer(data, dtype), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [part.reshape(shape).copy() for part, shape in zip(parts, shapes, strict=True)]
