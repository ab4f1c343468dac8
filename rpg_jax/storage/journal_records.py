"""A record of the journal: a group of completions with the key under which it was sampled, and a digest of both.

    magic    8 bytes
    lengths  2 × u32, little-endian: of text and of arrays, in bytes
    digest   32 bytes, SHA-256 of lengths, text and arrays
    text     JSON: key; lengths, finish_reasons and turns of the completions
    arrays   i32[n] tokens, then f32[n] log-probabilities; n tokens in all

Records follow each other in a file. A record that is cut short or changed is skipped, and reading goes on at the next
magic.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rpg_jax.types import Completion, Turns

_MAGIC = b"\x89rpgJL2\n"
_HEAD = struct.Struct("<8s8s32s")  # magic, lengths, digest
_LENGTHS = struct.Struct("<II")

Key = Mapping[str, Any]  # JSON-able; `version` is that of the weights


class Record(NamedTuple):
    """A group as it was journaled; all its tokens are of the weights `key["version"]`."""

    key: dict[str, Any]
    completions: list[Completion]


def to_bytes(key: Key, completions: Sequence[Completion]) -> bytes:
    """The record of a group, 8 bytes a token and about half a kilobyte more."""
    tokens = np.concatenate([c.tokens for c in completions]).astype("<i4")
    logprobs = np.concatenate([c.logprobs for c in completions]).astype("<f4")
    text = {
        "key": dict(key),
        "lengths": [len(c.tokens) for c in completions],
        "finish_reasons": [c.finish_reason for c in completions],
        "turns": [c.turns and c.turns.record() for c in completions],
    }
    body, arrays = json.dumps(text).encode(), tokens.tobytes() + logprobs.tobytes()
    lengths = _LENGTHS.pack(len(body), len(arrays))
    return _HEAD.pack(_MAGIC, lengths, hashlib.sha256(lengths + body + arrays).digest()) + body + arrays


def from_bytes(data: bytes) -> tuple[list[Record], int]:
    """The whole records in `data`, and the number of places where there is something else."""
    records: list[Record] = []
    at, damaged, view = 0, 0, memoryview(data)
    while at < len(data):
        end = _end(view, at)
        if end is None:
            damaged += 1
            following = data.find(_MAGIC, at + 1)
            at = len(data) if following < 0 else following
        else:
            records.append(_record(view[at:end]))
            at = end
    return records, damaged


def _end(view: memoryview, at: int) -> int | None:
    """The end of the record that begins at `at`; None if there is no whole record."""
    if len(view) - at < _HEAD.size:
        return None
    magic, lengths, digest = _HEAD.unpack_from(view, at)
    end = at + _HEAD.size + sum(_LENGTHS.unpack(lengths))
    if magic != _MAGIC or end > len(view):
        return None
    found = hashlib.sha256(lengths)
    found.update(view[at + _HEAD.size : end])
    return end if found.digest() == digest else None


def _record(whole: memoryview) -> Record:
    _, lengths, _ = _HEAD.unpack_from(whole)
    middle = _HEAD.size + _LENGTHS.unpack(lengths)[0]
    text = json.loads(bytes(whole[_HEAD.size : middle]))
    tokens, logprobs = np.split(np.frombuffer(whole[middle:], "<i4"), 2)
    ends = np.cumsum(text["lengths"])[:-1]
    # Copies, so that the bytes of the file are freed and the arrays can be written to, as a rollout's can.
    parts = zip(
        np.split(tokens.astype(np.int32), ends),
        np.split(logprobs.view("<f4").astype(np.float32), ends),
        text["finish_reasons"],
        text["turns"],
        strict=True,
    )
    version = text["key"]["version"]
    return Record(
        text["key"],
        [
            Completion(tokens, logprobs, reason, version, turns=turns and Turns.of(**turns, length=len(tokens)))
            for tokens, logprobs, reason, turns in parts
        ],
    )
