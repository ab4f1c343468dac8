"""The logs of a run, rewound exactly on resume: one JSON object a line. Metrics go to trackers as well.

`log.tracker` names the trackers; each has a class here.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ml_collections import ConfigDict

from rpg_jax.data import Group
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import flat, read_jsonl, read_lines
from rpg_jax.runs import rollout_files
from rpg_jax.storage import naming, write_atomically
from rpg_jax.storage.files import finite
from rpg_jax.training.loop import Step
from rpg_jax.types import Completion

MOST_SAMPLES = 2**29  # bytes of samples.jsonl: readers take twice as many, and a bucket gets the file again and again


class JsonLines:
    """The file at `path` of JSON objects, one a line, that each have a `step`. Lines are only added, or rewound."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line, `plain(record)`. A later kill of the process does not lose the line; non-finite is null."""
        line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rewind(self, step: int) -> None:
        """Atomically drops the lines of steps after `step`. Also drops a last line that was cut short, and says so.

        Does nothing if there is no file. Raises ValueError, which names the file, if a line before the last is no
        object, if a line has no integer `step`, or if `path` is a folder or has more than 1 GiB."""
        if not self.path.exists():
            return
        lines, torn = read_lines(self.path)
        for number, line in enumerate(lines, start=1):
            if not isinstance(line.record.get("step"), int):
                raise ValueError(f"{self.path}:{number}: it has no step; remove this line")
        if torn:
            print(f"{self.path}: the last line was cut short after {len(torn)} bytes; it is left out", file=sys.stderr)
        kept = [line.content for line in lines if line.record["step"] <= step]
        write_atomically(self.path, b"".join(content + b"\n" for content in kept))


class RunLog:
    """metrics.jsonl and samples.jsonl of a run folder, kept in step with each other and with the weights.

    The first process writes the files. Metrics go to `trackers` as well, at first an empty list. The completions of the
    first `samples` prompts of each step are written. `run_dir`, a local folder, must exist."""

    def __init__(self, run_dir: Path, *, samples: int):
        self.trackers: list[Tracker] = []
        self._failing: set[Tracker] = set()
        self._run_dir, self._full = run_dir, False
        self._metrics, self._samples = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "samples.jsonl")
        self._samples_per_step = samples

    def append_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the completions of the first groups of step `step`, with their scores; on the first process. A file of
        `MOST_SAMPLES` bytes gets no more, which stderr says once. Call it before `append`, so that a step with metrics
        has its completions."""
        file = self._samples.path
        if hosts.is_first() and file.exists() and file.stat().st_size >= MOST_SAMPLES:
            if not self._full:
                print(f"{file} is full: it gets no more completions. rollouts/ has them still", file=sys.stderr)
            self._full = True
            return
        for group in groups[: self._samples_per_step] if hosts.is_first() else ():
            failed = group.failed or [None] * len(group.texts)
            for text, completion, reward, accuracy, failure in zip(
                group.texts, group.completions, group.rewards, group.accuracy, failed, strict=True
            ):
                record = {"step": step, "prompt": group.problem.prompt, "completion": text}
                record |= {"answer": group.problem.answer, "reward": reward, "accuracy": accuracy}
                record |= {"failed": failure} if failure else {}
                self._samples.append(record | completion_entries(completion))

    def append(self, step: Step) -> None:
        """Writes the metrics of a step, and gives the finite ones to the trackers; on the first process."""
        if not hosts.is_first():
            return
        self._metrics.append({"step": step.number, **step.metrics})
        known = {k: float(v) for k, v in plain(step.metrics).items() if isinstance(v, int | float)}
        numbers = dataclasses.replace(step, metrics=known)
        for tracker in self.trackers:
            self._try(tracker, f"step {step.number}", lambda own: own.append(numbers))

    def has(self, step: int) -> bool:
        """Whether metrics.jsonl has the step. All processes call together, and get the answer of the first."""
        found = hosts.is_first() and any(record["step"] == step for record in read_jsonl(self._metrics.path))
        return bool(hosts.pmax(found))

    def close(self) -> None:
        """Closes the trackers. The error of a tracker goes to stderr, unless its last call failed too."""
        for tracker in self.trackers:
            self._try(tracker, "the end", lambda own: own.close())

    def rewind(self, step: int) -> None:
        """On process 0 drops lines and rollout files of steps after `step`. Raises ValueError as `JsonLines.rewind`."""
        for log in (self._metrics, self._samples) if hosts.is_first() else ():
            log.rewind(step)
        if hosts.is_first():
            rollout_files.rewind(self._run_dir, step)

    def drop_samples(self, step: int) -> None:
        """Drops the lines of samples.jsonl of step `step` and later steps; on process 0."""
        if hosts.is_first():
            self._samples.rewind(step - 1)

    def _try(self, tracker: Tracker, what: str, do: Callable[[Tracker], None]) -> None:
        """Calls `do(tracker)`. An error does not end the run: stderr names `what`, unless the last call failed too."""
        try:
            do(tracker)
            self._failing.discard(tracker)
        except Exception as error:
            if tracker not in self._failing:
                said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
                kept = f"{type(tracker).__name__} did not take {what}: {said}; metrics.jsonl has every step"
                print(f"log.tracker: {kept}", file=sys.stderr)
            self._failing.add(tracker)


def completion_entries(completion: Completion) -> dict[str, Any]:
    """The entries of a completion in files of completions, beside the completion's text and scores.

    `tokens` is the number of tokens that the policy has sampled, and `finish_reason` that of the completion. A
    conversation with an environment has `turns`, a dict: `spans`, the [first, end] of each observation, in tokens of
    the completion; `rewards` of the turns; and `error`, the kind of failure, or None."""
    turns = {} if completion.turns is None else {"turns": completion.turns.record()}
    return {"tokens": int(completion.sampled.sum()), "finish_reason": completion.finish_reason, **turns}


def plain(value: Any) -> Any:
    """A copy of `value` for JSON: an array of one number becomes the number, a tuple a list, a non-finite number None.
    Another object stays, and `json` refuses it. Raises ValueError for an array of no or several numbers."""
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Tracker(Protocol):
    """Receives the record of each step, whose metrics are then {name: finite number}."""

    def append(self, step: Step) -> None:
        """Keeps the metrics of step `step.number`. If it raises, the run goes on, and `RunLog` reports the error."""

    def close(self) -> None:
        """Ends the tracker after the last step of this process."""


class Place(NamedTuple):
    """The run whose metrics a tracker keeps.

    Attributes:
      folder: the local folder of the run. Trackers without a server may write there.
      name, project: the run's name and project. A later process continues the run under this name.
      config: the resolved config, as nested dicts, in which an infinite number is a text.
      after: the step of the checkpoint from which this process goes on; 0 without one. Later steps are written again.
    """

    folder: Path
    name: str
    project: str
    config: Mapping[str, Any]
    after: int = 0


class TensorBoard:
    """Event files in `tensorboard/`; hides what an earlier process wrote after step `place.after`."""

    def __init__(self, place: Place):
        folder = place.folder / "tensorboard"
        self._writer = needed("tensorboard").SummaryWriter(str(folder), purge_step=place.after + 1)

    def append(self, step: Step) -> None:
        """Writes `step.metrics`, {name: finite number}, to the event file, at once."""
        for name, value in step.metrics.items():
            self._writer.add_scalar(name, value, step.number)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, which a later process of the same name continues."""

    def __init__(self, place: Place):
        named = {"id": place.name, "name": place.name, "project": place.project, "config": dict(place.config)}
        self._run = needed("wandb").init(dir=str(place.folder), resume="allow", **named)
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps; wandb's own cannot go back

    def append(self, step: Step) -> None:
        """Sends `step.metrics`, {name: finite number}, as the metrics of step `step.number`."""
        self._run.log({"step": step.number, **step.metrics})

    def close(self) -> None:
        """Marks the run as finished, once all is sent."""
        self._run.finish()


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, or else in `mlflow.db` of the run's folder.

    In the name of a metric every sign but letters, digits, . - _ / : and blanks becomes "_"."""

    def __init__(self, place: Place):
        needed("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        tracking = importlib.import_module("mlflow.tracking")
        known = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = tracking.MlflowClient(known or f"sqlite:///{place.folder.resolve() / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(place.project)
        experiment = found.experiment_id if found else self._client.create_experiment(place.project)
        own = f"attributes.run_name = '{place.name}'"
        runs = self._client.search_runs([experiment], own, max_results=1)
        self._run = (runs[0] if runs else self._client.create_run(experiment, run_name=place.name)).info.run_id
        self._client.update_run(self._run, status="RUNNING")
        if not runs:
            params = [self._entities.Param(k, str(v)[:500]) for k, v in flat(place.config).items()]
            for first in range(0, len(params), 100):
                self._client.log_batch(self._run, params=params[first : first + 100])

    def append(self, step: Step) -> None:
        """Stores `step.metrics`, {name: finite number}, as the metrics of step `step.number`, with the present time."""
        now = int(1000 * time.time())
        named = {re.sub(r"[^\w.\-/: ]", "_", name): value for name, value in step.metrics.items()}
        metrics = [self._entities.Metric(name, value, now, step.number) for name, value in named.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run)


class Trackio:
    """A run of Trackio, in a folder of Trackio (TRACKIO_DIR); `trackio show` is its page."""

    def __init__(self, place: Place):
        named = {"project": place.project, "name": place.name, "config": dict(place.config)}
        self._run = needed("trackio").init(resume="allow", **named)

    def append(self, step: Step) -> None:
        """Stores `step.metrics`, {name: finite number}, as the metrics of step `step.number`."""
        self._run.log(dict(step.metrics), step=step.number)

    def close(self) -> None:
        """Marks the run as finished."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Place], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
PACKAGES = {name: name for name in TRACKERS} | {"tensorboard": "tensorboardX"}
"""The package of each tracker, which has a module of the same name."""


def chosen(text: str) -> list[str]:
    """The names in `text`, which is `log.tracker`, in its order: "a, b" gives ["a", "b"]. Raises ValueError for a name
    that is not in `TRACKERS`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ValueError(f"log.tracker={text!r}: no tracker {unknown[0]!r}; there are {', '.join(TRACKERS)}")
    return names


def chosen_steps(text: str | None) -> range:
    """The steps in "12", or in "12-14" with both ends; none for None. Raises ValueError for another text."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"profile.steps is one step or a range of steps, as 12 or 12-14, not {text!r}")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def needed(name: str) -> Any:
    """The module that the tracker `name` needs. Raises ValueError, with the fix, if its package is not installed."""
    package = PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"log.tracker={name} needs the package {package}: pip install {package}, or leave it out"
        ) from error


def trackers_of(config: ConfigDict, folder: Path, *, after: int) -> list[Tracker]:
    """Opens the trackers of the config for the run in the local `folder`; `after` is as in `Place`. A tracker that
    cannot be reached is left out, with a line on stderr. Raises ValueError if a tracker is unknown or not installed."""
    fields = finite(json.loads(config.to_json_best_effort()))
    place = Place(folder, config.run.name, config.log.project, fields, after)
    made: list[Tracker] = []
    for name in chosen(config.log.tracker):
        try:
            made.append(TRACKERS[name](place))
        except ValueError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            print(f"log.tracker: {name} is left out: {said}; metrics.jsonl has every step", file=sys.stderr)
    return made
