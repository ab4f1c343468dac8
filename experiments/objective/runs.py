"""The runs of the experiments on the objective: several processes make them, a file keeps them, tables look them up."""

import dataclasses
import functools
import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import kept
from experiments.objective import design
from experiments.objective.design import EXACT, NO_KL, ROWS, SCAN, ObjectiveSettings, Schedule, Unit
from experiments.objective.paths import PathSettings, frontier, make_task, visits
from experiments.objective.paths import Task as Paths
from experiments.objective.training import Lane, Outcome, judge, train
from rpg_jax.report.progress import Progress
from rpg_jax.reproduction.run_tables import locked
from rpg_jax.reproduction.workers import Task, run_tasks
from rpg_jax.runs import run_folder
from rpg_jax.storage import write_atomically

DATA = Path(__file__).with_name("objective.jsonl.gz")  # the runs that come with the code
MIDDLE = 0.1  # β where an experiment has one
LANES = 24  # runs that a program makes at once
Record = dict[str, Any]  # a unit and `values`, {quantity: [seed][β][rate]}
Line = dict[str, dict[str, Any]]  # {"record": of a unit, "made_with": versions of code, packages and machine}
Rates = dict[tuple[str, int], float]  # {(row, updates a batch): rate}


def run_in_worker(argument: tuple[str, dict[str, Any]]) -> Record:
    """`run_unit` of a unit that went through JSON; those that share a cache of programs compile each once."""
    compiled, unit = argument
    run_folder.use_compilation_cache(compiled)
    parts = {"schedule": Schedule(**unit["schedule"]), "task": PathSettings(**unit["task"])}
    return run_unit(Unit(**unit | parts))


def run_unit(unit: Unit) -> Record:
    """Trains and judges every run of a unit, `LANES` at once. A loss without β is trained once."""
    began, estimator, schedule = time.process_time(), ROWS.get(unit.row), unit.schedule
    tasks = [make_task(unit.task, seed, wrong=unit.wrong) for seed in unit.seeds]
    trained = unit.kl_coefs[:1] if estimator is NO_KL else unit.kl_coefs
    lanes = [
        Lane(task, seed, beta, rate, schedule.token_mean, schedule.reference_batches)
        for task, seed in zip(tasks, unit.seeds, strict=True)
        for beta in trained
        for rate in unit.rates
    ]
    shapes = dataclasses.replace(unit.task, ends=0.5, mass=0.5)  # which the program does not have
    ends = np.concatenate([_train(unit.row, shapes, schedule.updates_a_batch, part) for part in _chunks(lanes)])
    ends = ends[: len(lanes)].reshape(len(tasks), len(trained), len(unit.rates), *ends.shape[1:])
    ends = np.broadcast_to(ends, (len(tasks), len(unit.kl_coefs), *ends.shape[2:]))
    found = _judge(shapes, jax.tree.map(lambda *x: np.stack(x), *tasks), ends, np.asarray(unit.kl_coefs, np.float32))
    values = {name: np.round(np.asarray(x, np.float64), 5).tolist() for name, x in found.items()}
    seconds = round(time.process_time() - began, 1)
    return {"unit": unit.name, **dataclasses.asdict(unit), "values": values, "cpu_seconds": seconds}


def _chunks(lanes: Sequence[Lane]) -> Iterator[Lane]:
    """Stacks of `LANES` runs; the last one repeats its last run."""
    for first in range(0, len(lanes), LANES):
        part = [*lanes[first : first + LANES]]
        part += part[-1:] * (LANES - len(part))
        yield jax.tree.map(lambda *x: np.stack(x), *part)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _train(row: str, s: PathSettings, updates_a_batch: int, lanes: Lane) -> jax.Array:
    return jax.vmap(functools.partial(train, ROWS.get(row), s, updates_a_batch))(lanes)


@functools.partial(jax.jit, static_argnums=0)
def _judge(s: PathSettings, tasks: Paths, ends: jax.Array, kl_coefs: jax.Array) -> Outcome:
    """Of ends [seed, β, rate, ...]."""
    of_rates = jax.vmap(functools.partial(judge, s), (None, 0, None))
    return jax.vmap(jax.vmap(of_rates, (None, 0, 0)), (0, 0, None))(tasks, ends, kl_coefs)


def write(path: Path, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Writes the file `objective.jsonl.gz`: a line of settings as JSON, then one for each finished unit."""
    texts = (json.dumps(line, ensure_ascii=False) + "\n" for line in ({"settings": settings}, *lines))
    write_atomically(path, kept.packed("".join(texts).encode()))


def read(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """The (settings, lines) that `write` wrote. Raises ValueError if `path` is no such file."""
    try:
        head, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        return head["settings"], lines
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is not the data of experiments.objective: {error}") from error


def run_objective(s: ObjectiveSettings, path: Path, *, jobs: int) -> list[Record]:
    """Makes the runs that the file `path` lacks, `jobs` units at once, and adds each unit's runs to it; returns all.

    The file may lack whole experiments of `s`.

    Raises:
      ValueError: the file has runs with other settings, or another command is at work in its folder.
    """
    settings, log = json.loads(json.dumps(dataclasses.asdict(s))), path.with_name("output.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent) as lock, Progress(design.count_units(s), title="objective", unit="unit") as progress:
        before, lines = read(path) if path.exists() else (settings, [])
        known = {name: settings["experiments"].get(name) for name in before["experiments"]}
        if before != {**settings, "experiments": known}:
            raise ValueError(f"the runs in {path} have other settings: choose another --out, or delete that file")
        made_with = kept.made_with()

        def make(wanted: Sequence[Unit]) -> None:
            done, compiled = {line["record"]["unit"] for line in lines}, str(path.with_name("compiled"))
            tasks = [
                Task(unit.name, run_in_worker, (compiled, dataclasses.asdict(unit)), log)
                for unit in wanted
                if unit.name not in done
            ]
            for ended in run_tasks(tasks, jobs=jobs, inherited=lock):
                if ended.code:
                    raise ValueError(f"{ended.task.name} failed: see {log}; the same command continues")
                lines.append({"record": ended.result, "made_with": made_with})
                write(path, settings, lines)
                progress.update(len(lines), {}, title=ended.task.name)

        make(design.scan_units(s))
        for name in s.experiments:
            make(design.units(s, name, best_rates([line["record"] for line in lines])))
    return [line["record"] for line in lines]


class Runs:
    """Looks up the reported runs: a value for each seed."""

    def __init__(self, records: Sequence[Record]):
        self.all = records
        self._units = {(r["experiment"], r["row"], r["schedule"]["updates_a_batch"]): r for r in records}

    def of(
        self,
        experiment: str,
        row: str,
        quantity: str,
        kl_coef: float = MIDDLE,
        updates_a_batch: int = 8,
        rate: float | None = None,
    ) -> dict[int, float]:
        """{seed: value} at a β and a learning rate, by default the unit's only one. The quantity `own_regret` is the
        regret of the divergence that the row is meant for.
        """
        name = regret_of(row) if quantity == "own_regret" else quantity
        record = self._units[experiment, row, 8 if row == EXACT else updates_a_batch]
        at = record["kl_coefs"].index(kl_coef), 0 if rate is None else record["rates"].index(rate)
        return dict(zip(record["seeds"], np.asarray(record["values"][name])[:, *at].tolist(), strict=True))

    def rows(self, experiment: str) -> list[str]:
        made = {row for name, row, _ in self._units if name == experiment}
        return [row for row in (*ROWS, EXACT) if row in made]

    def kl_coefs(self, experiment: str) -> list[float]:
        return next((r["kl_coefs"] for r in self.all if r["experiment"] == experiment), [])

    def tokens(self, experiment: str) -> float:
        """The mean length of the reference's completions."""
        return next(PathSettings(**r["task"]).tokens for r in self.all if r["experiment"] == experiment)

    def staleness(self, experiment: str) -> list[int]:
        return sorted({n for name, _, n in self._units if name == experiment})

    def gaps(self, row: str, updates_a_batch: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """{seed: (distances, rewards that lack)}: KL(π_θ‖π_ref) of each β, from near to far, and how much less reward
        the row has than the best possible at that distance."""
        each = [
            [self.of("staleness", row, quantity, beta, updates_a_batch) for beta in self.kl_coefs("staleness")]
            for quantity in ("kl", "reward")
        ]
        found = {}
        for seed in each[0][0]:
            distances, rewards = (np.asarray([of_beta[seed] for of_beta in quantity]) for quantity in each)
            order = np.argsort(distances)
            found[seed] = distances[order], (self._frontiers[seed](distances) - rewards)[order]
        return found

    def lost(self, row: str, kl: float, updates_a_batch: int) -> dict[int, float]:
        """`gaps` at one distance, interpolated; {seed: reward}. Seeds whose β do not reach around it are left out."""
        found = self.gaps(row, updates_a_batch).items()
        return {seed: float(np.interp(kl, x, gap)) for seed, (x, gap) in found if x[0] <= kl <= x[-1]}

    @functools.cached_property
    def _frontiers(self) -> dict[int, Callable[[np.ndarray], np.ndarray]]:
        """{seed: `paths.frontier`}, in the task of "staleness"."""
        unit = next(r for r in self.all if r["experiment"] == "staleness")
        s = PathSettings(**unit["task"])
        tasks = {seed: make_task(s, seed) for seed in unit["seeds"]}
        return {seed: frontier(np.asarray(visits(s, x, x.reference).paid)) for seed, x in tasks.items()}


def regret_of(row: str) -> str:
    return "regret_forward" if row in ROWS and ROWS[row].meant == "forward" else "regret"


def best_rates(records: Sequence[Record]) -> Rates:
    """The learning rates of the scan: least mean regret, and the smaller one of equals."""
    rates = {}
    for r in records:
        if r["experiment"] == SCAN:
            regrets = np.mean(np.asarray(r["values"][regret_of(r["row"])])[:, 0], axis=0)
            best = int(np.argmin(np.nan_to_num(regrets, nan=np.inf)))
            rates[r["row"], r["schedule"]["updates_a_batch"]] = r["rates"][best]
    return rates
