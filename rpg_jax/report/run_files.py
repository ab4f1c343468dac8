"""Reads the folders of runs, and computes scores and costs from the metrics of a run.

A run may still be writing the files. A file of a killed run may end in the middle of a line.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rpg_jax.storage.files import read_bytes, read_if_there

INPUTS = "inputs.json"
START = "weights before the first step"  # key in INPUTS
HELD_OUT = ("task, held out", "task.held_out_sets")  # keys in INPUTS, before the name of a set
PARENT = "begun from"  # key in INPUTS of a branch: the run and the step, as runs/A@100

AROUND = ("run.", "distributed.", "checkpoint.", "log.", "profile.", "servers.")
"""Sections of a config that change no number of a run, but for `START_FROM`."""
START_FROM = "run.start_from"

Record = Mapping[str, Any]  # the metrics of a step
Scores = dict[str, dict[str, float]]  # {set: {quantity of `QUANTITIES`, or `step`: value}} of a run
QUANTITIES = ("last", "best", "pass")
_MOST_BYTES = 2**30  # of metrics.jsonl or samples.jsonl
_LARGEST = 1e30  # the largest absolute value of a metric


class Line(NamedTuple):
    """A line of a JSON-lines file: the JSON object `record`, and the line's bytes `content` without the line break."""

    record: dict[str, Any]
    content: bytes


def read_lines(path: Path) -> tuple[list[Line], bytes]:
    """The lines of a JSON-lines file, and the bytes of a last line that a kill or a full disk cut short, else b"". A
    last line that is a JSON object is whole, even without its line break. A missing file gives ([], b""). Raises
    ValueError if `path` is a folder or has more than 1 GiB, or if another line is no JSON object: then the message has
    the file and the number of the line."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder and not a file of JSON lines: move it away")
    try:
        *complete, last = read_bytes(path, _MOST_BYTES).split(b"\n") if path.exists() else [b""]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    lines = [Line(_record(path, number, content), content) for number, content in enumerate(complete, start=1)]
    try:  # an object without its line break is whole too
        return ([*lines, Line(_record(path, len(lines) + 1, last), last)], b"") if last else (lines, b"")
    except ValueError:
        return lines, last


def _record(path: Path, number: int, content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
        if not isinstance(record, dict):
            raise ValueError(f"expected an object, got {type(record).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number}: {error}; remove this line") from error
    return record


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without a last line that was cut short; [] if there is no file. Raises
    ValueError if `path` is a folder or has more than 1 GiB, or if another line is no JSON object."""
    return [line.record for line in read_lines(path)[0]]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records {"step": step, metric: value} of `run_dir`/metrics.jsonl, sorted by step; [] without this file. A
    resumed run can log a step again: the later record counts. Objects without "step" and a last line that was cut short
    are left out. Raises ValueError, which names the file, if the file is a folder or has more than 1 GiB, or if another
    line is no JSON object, has a step outside 0 … 10¹², or a metric other than a number up to 1e30, nan, bool or null.
    """
    by_step = {}
    for record in read_jsonl(run_dir / "metrics.jsonl"):
        if "step" in record:
            if wrong := next(
                (f"{key[:40]!r} is {value!r:.40}" for key, value in record.items() if not _is_metric(key, value)), ""
            ):
                raise ValueError(f"{run_dir / 'metrics.jsonl'}: {wrong}, which no run writes; remove this line")
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def _is_metric(key: str, value: Any) -> bool:
    if key == "step":
        return type(value) is int and 0 <= value <= 10**12
    return value is None or isinstance(value, bool) or (isinstance(value, int | float) and not abs(value) > _LARGEST)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config in `run_dir`/config.json as nested dicts; {} without it. Raises ValueError if it is no JSON object."""
    return read_if_there(run_dir / "config.json")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts as one dict. A key is `prefix` and a dotted name, such as "model.size". An empty dict
    within `tree` leaves no entry."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def series(records: Iterable[Record], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records in which the metric `key` is a finite number, in order. A bool is no number."""
    numbers = (record for record in records if isinstance(record.get(key), int | float))
    points = [(r["step"], r[key]) for r in numbers if not isinstance(r[key], bool) and math.isfinite(r[key])]
    return [step for step, _ in points], [float(value) for _, value in points]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run, read from its folder or from the numbers that are kept of a table of runs.

    Attributes:
      name: the name of the run's folder.
      seed: the config field `seed`; None if the run has not written its config.
      config: {dotted name: value} of the resolved config; {} if the run has not written its config.
      records: {"step": step, metric: value} of each step, in order. The record of step `begun` has only evaluations.
      folder: the run's folder; None if the run was read from kept numbers.
      row: the row of a table that the run belongs to; "" outside of tables.
      versions: what `versions.json` holds: commit, packages, Python, devices; {} if the run has not written this file.
      start: checksum of the weights before the first step; "" if unknown.
      problems: {held-out set: digest of its problems}; {} if unknown.
      parent: the folder and step of the run from which a branch began, as "/home/me/runs/A@100"; "" for other runs.
    """

    name: str
    seed: int
    config: Mapping[str, Any]
    records: Sequence[Record]
    folder: Path | None = dataclasses.field(default=None, compare=False)
    row: str = ""
    versions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: str = ""
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parent: str = ""

    @classmethod
    def read(cls, folder: Path, row: str = "") -> Run:
        """Reads the folder of a run, for the row `row` of a table. A missing file leaves its attributes empty, a
        damaged file raises ValueError."""
        config = flat(read_config(folder))
        versions, inputs = read_if_there(folder / "versions.json"), read_if_there(folder / INPUTS)
        start, parent = (str(inputs.get(name, "")) for name in (START, PARENT))
        named = (key.partition(": ") + (digest,) for key, digest in inputs.items())
        problems = {name: str(digest) for field, _, name, digest in named if field in HELD_OUT}
        name, seed, records = folder.resolve().name, config.get("seed"), read_metrics(folder)
        return cls(name, seed, config, records, folder, row, versions, start, problems, parent)  # type: ignore[arg-type]

    @functools.cached_property
    def method(self) -> str | None:
        """The config field `method`, or "supervised" for a run on demonstrations; None if the config is not written."""
        return "supervised" if any("epoch" in record for record in self.records) else self.config.get("method")

    @property
    def begun(self) -> int:
        """The step before the first trained step: the step in `parent` for a branch, whose steps count on; else 0."""
        step = self.parent.rpartition("@")[2]
        return int(step) if step.isdecimal() and len(step) < 13 else 0

    @property
    def trained(self) -> list[Record]:
        """The records of the trained steps, those after `begun`. An evaluation before training is left out."""
        return [record for record in self.records if record["step"] > self.begun]

    @property
    def ended(self) -> bool:
        """Whether the last record is of the last step, `train.steps` of the config. False without a record."""
        return bool(self.records) and self.records[-1]["step"] == self.config.get("train.steps")

    @functools.cached_property
    def evaluations(self) -> dict[str, list[dict[str, Any]]]:
        """{held-out set: [{"step": step, score: value} for each evaluation, in the order of steps]}. The scores are
        mean_at_k, pass_at_k, maj_at_k, k, …; in `records` they are the metrics `eval/<set>/<score>`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.records:
            by_set: dict[str, dict[str, Any]] = {}
            for key, value in record.items():
                prefix, _, rest = key.partition("/")
                name, _, score = rest.rpartition("/")
                if prefix == "eval" and name:
                    by_set.setdefault(name, {"step": record["step"]})[score] = value
            for name, scores in by_set.items():
                found.setdefault(name, []).append(scores)
        return found

    def scores(self, until: int | None = None) -> Scores:
        """{held-out set: {"last", "best", "pass", "step": value}} by the evaluations up to step `until` (None: all).
        `last` is Mean@k of the last evaluation, in [0, 1], `pass` is its pass@k, and `step` is its step. `best` is the
        largest Mean@k, as the paper defines Best. A set without an evaluation up to `until` is missing."""
        scores = {}
        for name, records in self.evaluations.items():
            if counted := [record for record in records if until is None or record["step"] <= until]:
                best, last = max(record["mean_at_k"] for record in counted), counted[-1]
                own = {"last": last["mean_at_k"], "best": best, "pass": last["pass_at_k"], "step": last["step"]}
                scores[name] = own
        return scores

    def late(self, metric: str, until: int | None = None) -> float:
        """Mean of a metric over the last third of those trained steps up to `until` (None: all) that have the metric;
        nan if no step has the metric."""
        values = series((r for r in self.trained if until is None or r["step"] <= until), metric)[1]
        third = values[-max(1, len(values) // 3) :]
        return sum(third) / len(third) if third else math.nan

    @functools.cached_property
    def costs(self) -> dict[str, dict[int, float]]:
        """{axis: {step: cost from the start of the run to the end of the step}}, from step 0, which costs nothing. The
        axes are "steps", "updates", "completions" (generated, with those that dynamic sampling drops), and "seconds" in
        steps, without evaluations and checkpoints. In a branch, "steps" and "updates" include those of its parents.
        An axis is missing if a step does not record it, and "seconds" also if every step compiled. A step that compiled
        counts the median seconds of the other steps: an earlier run may have compiled the programs."""
        records = self.trained
        steps = [record["step"] for record in records]
        size = self.config.get("rollout.group_size")
        found: dict[str, Sequence[float]] = {"steps": steps}
        if all("updates" in record for record in records):
            found["updates"] = [record["updates"] for record in records]
        if size and all("groups_generated" in record for record in records):
            found["completions"] = [*itertools.accumulate(size * record["groups_generated"] for record in records)]
        usual = [record["seconds"] for record in records if "seconds" in record and not record.get("time/compiling")]
        if usual and all("seconds" in record for record in records):
            median = statistics.median(usual)
            each = (median if record.get("time/compiling") else record["seconds"] for record in records)
            found["seconds"] = [*itertools.accumulate(each)]
        return {axis: {0: 0.0, **dict(zip(steps, spent, strict=True))} for axis, spent in found.items()}

    def spent(self, axis: str, step: int | None = None) -> float:
        """The cost on an axis of `costs` up to the end of `step`, or of the last recorded step before `step`; None: up
        to the end of the last recorded step. KeyError if `costs` lacks the axis."""
        steps = list(self.costs[axis])
        return self.costs[axis][steps[-1 if step is None else bisect.bisect(steps, step) - 1]]

    def last_step_within(self, axis: str, amount: float) -> int:
        """The last step at whose end the run has spent at most `amount` on an axis of `costs`; 0 if there is none."""
        most = amount * (1 + 1e-9)  # sums of seconds round
        return max(step for step, cost in self.costs[axis].items() if cost <= most)
