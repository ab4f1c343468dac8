"""Packs rollout files, `rollouts/STEP.npz` of a run, for the report's page; `runs.rollout_files` has their format.

Numbers are rounded to 12 bits and laid out byte plane by byte plane, so that they compress to about two bytes each.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The numbers of a token; all but the advantage are in nats. `gap` is log π_old − log π_s, `ratio` log π_θ − log π_old,
# `reference` log π_θ − log π_ref.
NUMBERS = ("behaviour", "gap", "ratio", "reference", "kl", "entropy", "advantage")
STEP = re.compile("[0-9]{1,15}")  # the name of a rollout file; other files in the folder are a person's own
MOST_BYTES = 2**28  # of a file in memory: 6 million tokens


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The rollouts of one step, from one file: P groups (a prompt's completions), N completions, n tokens.

    Attributes:
      text: the file's JSON part: step, texts of prompts and tokens, verdicts.
      sizes: i32[P], completions of each group.
      lengths: i32[N], tokens of each completion.
      rewards: f32[N].
      pieces: i32[n], the text of each token as its index in text["pieces"].
      versions: i32[n], the version of the weights that sampled each token.
      numbers: {name in `NUMBERS`: f32[n]}, in nats but for the advantage; nan at tokens that an environment wrote.
      clip: u8[n], what the loss's clip does to each token, as its index in text["clip_states"].
    """

    text: dict[str, Any]
    sizes: np.ndarray
    lengths: np.ndarray
    rewards: np.ndarray
    pieces: np.ndarray
    versions: np.ndarray
    numbers: dict[str, np.ndarray]
    clip: np.ndarray

    @classmethod
    def read(cls, file: Path) -> Rollouts:
        """Reads a file. Raises ValueError, which names the file, if the file is missing, is not a whole rollout file,
        or unpacks to more than 256 MiB."""
        try:
            with zipfile.ZipFile(file) as packed:  # a small file may unpack to any size
                if sum(member.file_size for member in packed.infolist()) > MOST_BYTES:
                    raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
            with np.load(file, allow_pickle=False) as arrays:
                a = dict(arrays)
            text = json.loads(a["text"].tobytes())
            column = dict(zip(text["columns"], a["tokens"].T, strict=True))
            numbers = {
                "behaviour": column["behaviour_logprobs"],
                "gap": column["behaviour_logprobs"] - column["sampler_logprobs"],
                "ratio": column["logprobs"] - column["behaviour_logprobs"],
                "reference": column["logprobs"] - column["ref_logprobs"],
                "kl": column["kl"],
                "entropy": column["entropy"],
                "advantage": column["advantages"],
            }
            clip, versions = column["clip"].astype(np.uint8), a["weight_versions"]
            read = cls(text, a["group_sizes"], a["lengths"], a["rewards"], a["pieces"], versions, numbers, clip)
            read.packed  # noqa: B018 - a file that cannot be packed is not whole
            return read
        except Exception as error:  # its bytes may be anybody's: zlib, zipfile, NumPy and JSON each raise their own
            raise ValueError(f"{file} is not a whole rollout file ({error}); remove it") from error

    @functools.cached_property
    def packed(self) -> str:
        """The file as the page embeds it: base64 of gzipped bytes, all little-endian. In order: u32, the number of
        bytes of the header; a JSON header, padded to a multiple of 4 bytes; for each of `NUMBERS` its 4 byte planes
        (n bytes each); i32[n] pieces; u8[n] clip states."""
        t, first = self.text, np.cumsum(self.lengths) - self.lengths  # the index of each completion's first token
        header = {
            **{name: t[name] for name in ("step", "weights", "pieces", "clip_states", "groups")},
            "specials": t.get("specials", []),
            "sizes": self.sizes.tolist(),
            "lengths": self.lengths.tolist(),
            "rewards": [float(f"{r:.4g}") for r in np.nan_to_num(self.rewards)],  # JSON has no word for infinity
            "parts": t.get("parts", []),
            "paid": [[float(f"{r:.4g}") for r in np.nan_to_num(own)] for own in t.get("paid", [])],
            "verdicts": [c["verdict"] for c in t["completions"]],
            "finish": [c["finish_reason"] for c in t["completions"]],
            "turns": [self._turns(c["turns"]) for c in t["completions"]],
            "versions": [
                [int(v.min()), int(v.max())] if len(v) else [0, 0] for v in np.split(self.versions, first[1:])
            ],
        }
        head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        head += b" " * (-len(head) % 4)
        planes = [_planes(self.numbers[name]) for name in NUMBERS]
        size, pieces = np.array([len(head)], "<u4").tobytes(), self.pieces.astype("<i4").tobytes()
        content = b"".join((size, head, *planes, pieces, self.clip.tobytes()))
        return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()

    @staticmethod
    def _turns(turns: dict[str, Any] | None) -> dict[str, Any] | None:
        """What the page shows of a conversation: `spans`, `rewards` and `error`; None for a completion of one turn."""
        if turns is None:
            return None
        rewards = [float(f"{r:.4g}") for r in np.nan_to_num(turns["rewards"])]
        return {"spans": turns["spans"], "rewards": rewards, "error": turns["error"]}


def files(run_dir: Path, *, steps: int) -> list[Path]:
    """At most `steps` rollout files of a run's folder, by step: the first, the last, and others evenly between them."""
    named = [file for file in (run_dir / "rollouts").glob("*.npz") if STEP.fullmatch(file.stem)]
    found = sorted(named, key=lambda file: int(file.stem))
    return [found[i] for i in evenly(len(found), steps)]


def read_all(found: Sequence[Path]) -> Iterator[Rollouts]:
    """Yields the rollouts of each file that can be read, in order. A line on stderr names each other file."""
    for file in found:
        try:
            yield Rollouts.read(file)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 … count − 1, sorted: the first, the last, and others evenly between them; of one
    number, the first."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(most, count)).tolist()})


def scales(numbers: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """{name in `NUMBERS`: value at which the colours of this number end}. `numbers` has `Rollouts.numbers` of several
    files. The value is the least of 1, 2 or 5 times a power of ten that reaches the 0.95 quantile of the absolute
    values, to 0.1 %; 1 if the quantile is 0 or no value is finite."""
    found = {}
    for name in NUMBERS:
        values = np.abs(np.concatenate([n[name] for n in numbers])) if numbers else np.zeros(0)
        values = values[np.isfinite(values)]
        top = float(np.quantile(values, 0.95)) if len(values) else 0.0
        magnitude = 10.0 ** np.floor(np.log10(top)) if top > 0 else 1.0
        found[name] = float(f"{magnitude * next(m for m in (1, 2, 5, 10) if m * magnitude >= top * 0.999):.1g}")
    return found


def _planes(values: np.ndarray) -> bytes:
    """Lays out f32[n] as 4 rows of n bytes, the lowest byte of all numbers first; rounds the 12 lowest bits to 0."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = np.where(np.isfinite(values), (bits + np.uint32(0x800)) & np.uint32(0xFFFFF000), bits).astype("<u4")
    return rounded.view(np.uint8).reshape(-1, 4).T.tobytes()
