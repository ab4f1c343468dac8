"""Carries out the experiments on the objective: several processes, and a file that keeps what has been done."""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import kept
from experiments.objective.design import (
    NO_KL,
    ROWS,
    ObjectiveSettings,
    Record,
    Unit,
    scan_name,
    scan_units,
    units,
)
from experiments.objective.judge import judge
from experiments.objective.paths import PathSettings, make_verifier, start_of, train
from experiments.objective.records import best_rates
from rpg_jax.reproduction.run_tables import alone_in
from rpg_jax.storage import write_atomically


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
    """What the file of an objective table holds.

    Attributes:
      settings: as JSON.
      runs: of all finished units.
      code: the versions of code, packages and machine that made them, without repetitions.
    """

    settings: dict[str, Any]
    runs: list[Record]
    code: list[dict[str, Any]]


def read(text: str) -> Kept:
    """The runs in the lines of such a file; a last line that was torn is left out.

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
    with alone_in(path.parent):
        return _continue(s, settings, path, jobs, on_unit)


def _continue(
    s: ObjectiveSettings, settings: dict[str, Any], path: Path, jobs: int, on_unit: Callable[[str, int], None]
) -> Kept:
    if not path.exists():
        write_atomically(path, json.dumps({"settings": settings}, ensure_ascii=False) + "\n")
    text = path.read_text(encoding="utf-8")
    if read(text).settings != settings:
        raise ValueError(f"the runs in {path} have other settings: choose another --out, or delete that file")
    write_atomically(path, text[: text.rfind("\n") + 1])
    made_with = kept.made_with()
    runs = read(text).runs
    with _workers(jobs) as pool:

        def make(wanted: Sequence[Unit]) -> None:
            done = {record["unit"] for record in runs}
            for unit, found in _finished(pool, s.task, [unit for unit in wanted if unit.name not in done]):
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"runs": found, "made_with": made_with}, ensure_ascii=False) + "\n")
                runs.extend(found)
                on_unit(unit.name, len({record["unit"] for record in runs}))

        for name, experiment in s.experiments.items():
            make(scan_units(s, name))
            make(units(s, name, best_rates(runs, scan_name(experiment.updates))))
    return read(path.read_text(encoding="utf-8"))


def _workers(jobs: int) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    started = context.Value("i", 0)  # how many workers there are so far
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    own = cores if 1 < jobs <= len(cores) else []
    given = started, own, os.getpid()
    return concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_prepare, initargs=given)


def _prepare(started: Any, cores: Sequence[int], parent: int) -> None:
    """Keeps a worker to one of `cores`, if there are any. Ctrl-C ends it at once, and so does its parent's death."""
    if cores:
        with started.get_lock():
            os.sched_setaffinity(0, {cores[started.value % len(cores)]})
            started.value += 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _finished(
    pool: concurrent.futures.Executor, s: PathSettings, wanted: Sequence[Unit]
) -> Iterator[tuple[Unit, list[Record]]]:
    futures = {pool.submit(functools.partial(run_unit, s), unit): unit for unit in wanted}
    try:
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()
