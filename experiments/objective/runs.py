"""The runs of the experiments on the objective: several processes make them, a file keeps them, tables look them up."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kept
from experiments.objective.design import (
    NO_KL,
    ROWS,
    SCAN,
    ObjectiveSettings,
    Record,
    Schedule,
    Unit,
    scan_name,
    scan_units,
    units,
)
from experiments.objective.judge import judge
from experiments.objective.paths import PathSettings, make_verifier, start_of, train
from rpg_jax.reproduction.run_tables import locked
from rpg_jax.reproduction.workers import Task, run_tasks
from rpg_jax.storage import write_atomically

MIDDLE = 0.1  # β where an experiment has one
Seeds = dict[int, Record]  # {seed: run}


def run_in_worker(argument: Mapping[str, Any]) -> list[Record]:
    """`run_unit` of settings and a unit that went through JSON."""
    unit = argument["unit"]
    return run_unit(PathSettings(**argument["settings"]), Unit(**unit | {"schedule": Schedule(**unit["schedule"])}))


def run_unit(s: PathSettings, unit: Unit) -> list[Record]:
    """Trains and judges every run of a unit. A loss without β is trained once, and judged with every β."""
    began, estimator = time.process_time(), ROWS[unit.row]
    s = dataclasses.replace(s, length=unit.length, updates=unit.updates or s.updates)
    run, found = jax.jit(train, static_argnums=(0, 1, 2, 3)), jax.jit(judge, static_argnums=(0, 1))
    records = []
    for seed in unit.seeds:
        graphdef, start = start_of(s, seed)
        verifier = make_verifier(s, graphdef, start, seed, wrong=unit.wrong)
        for rate in unit.rates:
            end = None
            for kl_coef in map(jnp.float32, unit.kl_coefs):
                if end is None or estimator is not NO_KL:
                    key = jax.random.key(seed)
                    end = run(estimator, s, unit.schedule, graphdef, start, verifier, kl_coef, jnp.float32(rate), key)
                values = found(s, graphdef, start, end, verifier, kl_coef, jax.random.key(1_000 + seed))
                numbers = {name: round(float(value), 5) for name, value in values.items()}
                which = {"rate": rate, "seed": seed, "kl_coef": round(float(kl_coef), 6)}
                records.append({"unit": unit.name, "experiment": unit.experiment, "row": unit.row, **which, **numbers})
    seconds = round((time.process_time() - began) / len(records), 2)
    shape = {"length": unit.length, **dataclasses.asdict(unit.schedule)}
    return [record | shape | {"cpu_seconds": seconds} for record in records]


@dataclasses.dataclass(frozen=True)
class Kept:
    """The content of the file `objective.jsonl`.

    Attributes:
      settings: as JSON.
      runs: of all finished units.
      code: the versions of code, packages and machine that made them, without repetitions.
    """

    settings: dict[str, Any]
    runs: list[Record]
    code: list[dict[str, Any]]


def read(text: str) -> Kept:
    """Reads the lines of `objective.jsonl`; a torn last line is left out.

    Raises:
      ValueError, KeyError: other text.
    """
    whole = text[: text.rfind("\n") + 1]
    head, *lines = map(json.loads, whole.splitlines())
    code: list[dict[str, Any]] = []
    for line in lines:
        code += [line["made_with"]] if line["made_with"] not in code else []
    return Kept(head["settings"], [record for line in lines for record in line["runs"]], code)


def run_objective(
    s: ObjectiveSettings, path: Path, *, jobs: int, on_unit: Callable[[str, int], None] = lambda name, done: None
) -> Kept:
    """Makes the runs that the file `path` lacks, `jobs` units at once, and appends each unit's runs to it.

    Raises:
      ValueError: the file has runs with other settings, or another command is at work in its folder.
    """
    settings = json.loads(json.dumps(dataclasses.asdict(s)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent) as lock:
        return _continue(s, settings, path, jobs, lock, on_unit)


def _continue(
    s: ObjectiveSettings,
    settings: dict[str, Any],
    path: Path,
    jobs: int,
    lock: int,
    on_unit: Callable[[str, int], None],
) -> Kept:
    if not path.exists():
        write_atomically(path, json.dumps({"settings": settings}, ensure_ascii=False) + "\n")
    text = path.read_text(encoding="utf-8")
    if read(text).settings != settings:
        raise ValueError(f"the runs in {path} have other settings: choose another --out, or delete that file")
    write_atomically(path, text[: text.rfind("\n") + 1])
    made_with, runs, log = kept.made_with(), read(text).runs, path.with_name("output.log")

    def make(wanted: Sequence[Unit]) -> None:
        done = {record["unit"] for record in runs}
        tasks = [
            Task(unit.name, f"{__name__}:{run_in_worker.__name__}", argument, log)
            for unit in wanted
            if unit.name not in done
            for argument in [{"settings": dataclasses.asdict(s.task), "unit": dataclasses.asdict(unit)}]
        ]
        for ended in run_tasks(tasks, jobs=jobs, inherited=lock):
            if ended.code:
                raise ValueError(f"{ended.task.name} failed: see {log}; the same command continues")
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"runs": ended.result, "made_with": made_with}, ensure_ascii=False) + "\n")
            runs.extend(ended.result)
            on_unit(ended.task.name, len({record["unit"] for record in runs}))

    for name, experiment in s.experiments.items():
        make(scan_units(s, name))
        make(units(s, name, best_rates(runs, scan_name(experiment.updates))))
    return read(path.read_text(encoding="utf-8"))


class Runs:
    """Looks up runs; a row without β stands in every column of β."""

    def __init__(self, records: Sequence[Record]):
        self._records = records

    def has(self, experiment: str) -> bool:
        return any(r["experiment"] == experiment for r in self._records)

    def get(self, experiment: str, row: str, kl_coef: float = MIDDLE, **wanted: object) -> Seeds:
        wanted |= {"experiment": experiment, "row": row}
        chosen = (r for r in self._records if all(r[name] == value for name, value in wanted.items()))
        return {r["seed"]: r for r in chosen if math.isclose(r["kl_coef"], kl_coef)}

    def rows(self, experiment: str) -> list[str]:
        return self._values(experiment, "row")

    def kl_coefs(self, experiment: str) -> list[float]:
        return sorted(self._values(experiment, "kl_coef"))

    def lengths(self, experiment: str) -> list[int]:
        return sorted(self._values(experiment, "length"))

    def _values(self, experiment: str, name: str) -> list:
        """The values of the runs of an experiment under a name; rows in the order of `ROWS`."""
        found = {r[name] for r in self._records if r["experiment"] == experiment}
        return [row for row in ROWS if row in found] if name == "row" else list(found)

    @property
    def all(self) -> Sequence[Record]:
        return self._records


def best_rates(records: Sequence[Record], scan: str = SCAN) -> dict[str, float]:
    """The learning rate of every row of a scan: least mean regret; the smaller one of equals."""
    scanned: dict[str, dict[float, list[float]]] = {}
    for record in records:
        if record["experiment"] == scan:
            scanned.setdefault(record["row"], {}).setdefault(record["rate"], []).append(own_regret(record))
    return {row: min(sorted(by), key=lambda rate: float(np.mean(by[rate]))) for row, by in scanned.items()}


def own_regret(record: Record) -> float:
    """J* − J with the divergence that the row is meant for; samples know KL(π_θ‖π_ref) alone."""
    forward = ROWS[record["row"]].meant == "forward" and "regret_forward" in record
    return record["regret_forward" if forward else "regret"]
