"""Trackers: where the metrics of a run go besides its own files, one class for each value of `log.tracker`."""

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ml_collections import ConfigDict

from rpg_jax.report.run_files import flat
from rpg_jax.storage import json_files


class Tracker(Protocol):
    """Receives the metrics of each step, finite numbers by name."""

    def append(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Place(NamedTuple):
    """Of what a tracker keeps the metrics.

    Attributes:
      folder: of the run; trackers without a server write there.
      name, project: of the run, which a later process continues under its name.
      config: the resolved config.
      mode: of Weights & Biases: online, offline or disabled.
      after: an earlier process wrote the steps up to this one.
    """

    folder: Path
    name: str
    project: str
    config: Mapping[str, Any]
    mode: str = "online"
    after: int = 0


class TensorBoard:
    """Event files in `tensorboard/`; hides what an earlier process wrote after step `after`."""

    def __init__(self, place: Place):
        folder = place.folder / "tensorboard"
        self._writer = needed("tensorboard").SummaryWriter(str(folder), purge_step=place.after + 1)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases."""

    def __init__(self, place: Place):
        named = {"id": place.name, "name": place.name, "project": place.project, "config": dict(place.config)}
        self._run = needed("wandb").init(dir=str(place.folder), mode=place.mode, resume="allow", **named)
        self._run.define_metric("*", step_metric="step")  # a resumed run repeats steps; wandb's own cannot go back

    def append(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, or else in `mlflow.db` of the run's folder.

    Its names take no sign but . - _ / : and blanks: another becomes "_".
    """

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

    def append(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = {re.sub(r"[^\w.\-/: ]", "_", name): value for name, value in values.items()}
        metrics = [self._entities.Metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """A run of Trackio, in its own local folder (TRACKIO_DIR); `trackio show` is its page."""

    def __init__(self, place: Place):
        named = {"project": place.project, "name": place.name, "config": dict(place.config)}
        self._run = needed("trackio").init(resume="allow", **named)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Kind(NamedTuple):
    """A tracker, the module that it needs, and the package that has the module."""

    make: Callable[[Place], Tracker]
    module: str
    package: str


TRACKERS = {
    "tensorboard": Kind(TensorBoard, "tensorboardX", "tensorboardX"),
    "wandb": Kind(WandB, "wandb", "wandb"),
    "mlflow": Kind(MLflow, "mlflow", "mlflow"),
    "trackio": Kind(Trackio, "trackio", "trackio"),
}


def chosen(text: str) -> list[str]:
    """The trackers that `log.tracker` names, separated by commas. Raises ValueError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ValueError(f"log.tracker={text!r}: no tracker {unknown[0]!r}; there are {', '.join(TRACKERS)}")
    return names


def needed(name: str) -> Any:
    """The module of a tracker. Raises ValueError, which has the fix, if it is not installed."""
    kind = TRACKERS[name]
    try:
        return importlib.import_module(kind.module)
    except ImportError as error:
        raise ValueError(
            f"log.tracker={name} needs the package {kind.package}: pip install {kind.package}, or leave it out"
        ) from error


def trackers_of(config: ConfigDict, folder: Path, *, after: int) -> list[Tracker]:
    """The trackers that the config asks for, from step `after` on. Raises ValueError as `chosen` and `needed` do."""
    fields = json_files.finite(json.loads(config.to_json_best_effort()))
    place = Place(folder, config.run.name, config.log.project, fields, config.log.wandb_mode, after)
    return [TRACKERS[name].make(place) for name in chosen(config.log.tracker)]
