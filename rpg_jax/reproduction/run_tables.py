"""Makes a table from training runs: runs its scan and its cells, keeps their numbers, writes the page from these."""

import dataclasses
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import jax

from rpg_jax.reproduction import choice, kept_runs, result_files, sweep, table_page
from rpg_jax.reproduction.bars import progress_bars
from rpg_jax.reproduction.cells import run_cells, steps_of
from rpg_jax.reproduction.results import Results
from rpg_jax.reproduction.table import LEARNING_RATE, Cell, Table
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.runs import config_files

SEEDS, QUICK_SEEDS, QUICK_STEPS = 5, 2, 20
QUICK_ROWS = ("GRPO", "DAPO", "RPG-REINFORCE-URKL")
LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal
DATA = config_files.ROOT / "docs" / "tables" / "data"
"""The folder of the numbers that come with the code, NAME.json.gz for each table."""


@dataclasses.dataclass(frozen=True)
class Job:
    """How a table is run.

    Attributes:
      out: folder of the runs of all tables, and of a folder for each table.
      seeds: of the reported runs.
      jobs: runs at once.
      extra: overrides of every run.
      command: what the page names as its origin.
      scan: whether a table's own scan chooses the learning rates; if not, rows have the config's.
      rates: data of a table or of a sweep whose runs choose the learning rates instead.
      kept: data of the same table, whose runs are not repeated and are on the page too.
    """

    out: Path
    seeds: Sequence[int]
    jobs: int
    extra: Sequence[str] = ()
    command: str = ""
    scan: bool = True
    rates: Path | None = None
    kept: Path | None = None


def make_table(name: str, table: Table, job: Job) -> tuple[Path, dict[str, Path]]:
    """Runs a table; returns its page and the logs of the runs that failed.

    Raises:
      ValueError: a run would be refused, a seed is both reported and chosen with, `job.rates` lacks a row, the runs of
        `job.kept` do not go with the others, or no run has a score.
    """
    jax.config.update("jax_platforms", "cpu")  # of this process: the accelerator belongs to the runs
    sweep.check(table, job.extra)
    kept = result_files.load(job.kept) if job.kept else None
    if kept:
        kept_runs.check(kept, name, table, job.extra)
    scan, failed = _scan(name, table, job, kept.scan if kept else None)
    chosen = {row: values for row, values in choice.best_values(scan).items() if row in table.rows} if scan else None
    at_rates = table if chosen is None else table.with_settings(chosen)
    cells = kept_runs.missing(at_rates.cells(job.seeds), kept)
    failed |= _run(cells, job)
    results = Results(name, table, result_files.collect(cells, job.out), *_about(job), scan)
    if kept:
        results = kept_runs.together(kept, results, list(TABLES[name].rows))
    if not any(run.scores() for run in results.runs):
        raise ValueError(f"{job.out / 'runs'} has no evaluated run of this table: look at {job.out / 'logs'}")
    data = job.out / name / f"{name}.json.gz"
    result_files.save(results, data)
    return page_from(data, job.out), failed


def page_from(data: Path, out: Path) -> Path:
    """Writes the page and the figures of a table from its numbers, without a run; returns the page.

    Raises:
      ValueError: there are no such data.
    """
    results = result_files.load(data)
    return table_page.write_page(results, out / results.name)


def quick_rows(table: Table) -> list[str]:
    """The rows of a look: GRPO, DAPO and RPG-REINFORCE-URKL; in a table without them the baseline and the last two."""
    if set(QUICK_ROWS) <= set(table.rows):
        return list(QUICK_ROWS)
    return [table.baseline, *[row for row in reversed(list(table.rows)) if row != table.baseline][:2]]


def scan_from(data: Results, table: Table, extra: Sequence[str]) -> Results:
    """The runs in `data`, of a sweep or of a table's scan, that choose the learning rate of each row of `table`.

    Raises:
      ValueError: the data have no sweep of the learning rate alone, have other overrides, or lack a row.
    """
    found = data if data.table.swept else data.scan
    fields = {field for _, values in found.table.swept.values() for field in values} if found else set()
    if found is None or fields != {LEARNING_RATE}:
        raise ValueError(f"{data.name} is no sweep of {LEARNING_RATE} alone: it has {', '.join(fields) or 'no sweep'}")
    if tuple(found.extra) != tuple(extra):
        raise ValueError(f"the runs of {data.name} have the overrides {list(found.extra)}, not {list(extra)}")
    rates = list(dict.fromkeys(values[LEARNING_RATE] for _, values in found.table.swept.values()))
    scanned = dataclasses.replace(table, rates=rates).scan()
    by_name = {run.name: run.brief(result_files.SCAN_COLUMNS) for run in found.runs}
    cells = scanned.cells(sorted({run.seed for run in found.runs}))
    runs = [dataclasses.replace(by_name[cell.name], row=cell.row) for cell in cells if cell.name in by_name]
    if missing := sorted(set(scanned.rows) - {run.row for run in runs}):
        raise ValueError(f"{data.name} has no run of {', '.join(missing)}")
    return dataclasses.replace(found, table=scanned, runs=runs, scan=None)


def _scan(name: str, table: Table, job: Job, kept: Results | None) -> tuple[Results | None, dict[str, Path]]:
    """The runs that choose the learning rates, and the logs of those that failed; None without such runs."""
    if job.rates is not None:
        given = scan_from(result_files.load(job.rates), table, job.extra)
        _check_seeds({run.seed for run in given.runs}, job.seeds)
        return given, {}
    if not table.rates or not job.scan:
        return None, {}
    _check_seeds(table.scan_seeds, job.seeds)
    scanned = table.scan()
    cells = kept_runs.missing(scanned.cells(table.scan_seeds), kept)
    failed = _run(cells, job)
    runs = result_files.collect(cells, job.out, result_files.SCAN_COLUMNS, evaluated=False)
    scan = Results(f"{name}-scan", scanned, runs, *_about(job))
    return (kept_runs.together(kept, scan, list(TABLES[name].scan().rows)) if kept else scan), failed


def _about(job: Job) -> tuple[str, str, tuple[str, ...]]:
    """Command, hardware and overrides of a table's runs."""
    hardware = f"{job.jobs} at once on {cores()} CPU core{'s' * (cores() > 1)} ({platform.machine()})"
    return job.command, hardware, tuple(job.extra)


def _check_seeds(chosen_with: Collection[int], reported: Collection[int]) -> None:
    if shared := sorted({*chosen_with} & {*reported}):
        raise ValueError(
            f"seeds {', '.join(map(str, shared))} choose the learning rates and would be reported too: give others to "
            "--seeds"
        )


def _run(cells: Sequence[Cell], job: Job) -> dict[str, Path]:
    """Runs the cells that have not ended, with a bar; returns the logs of those that failed."""
    if not cells:
        return {}
    with progress_bars() as progress:
        bar = progress.add_task(f"0/{len(cells)} runs", total=None)
        printed = time.monotonic()

        def on_progress(steps: int, ended: int, running: list[str]) -> None:
            nonlocal printed
            total = steps_of(cells, job.out) * len(cells)
            text = f"{ended}/{len(cells)} runs; now {', '.join(running)}"
            progress.update(bar, completed=steps, total=total or None, description=text)
            if not progress.console.is_terminal and time.monotonic() - printed > LINE_SECONDS:
                printed = time.monotonic()
                print(f"{text}; step {steps} of {total or '?'} in all; logs in {job.out / 'logs'}", file=sys.stderr)

        return run_cells(cells, job.out, jobs=job.jobs, extra=job.extra, on_progress=on_progress)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def platform_name() -> str:
    """`cpu`, `gpu` or `tpu`. Another process asks JAX: a process that opens a TPU keeps it from the runs.

    Raises:
      ValueError: JAX does not start.
    """
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode:
        raise ValueError(f"JAX does not start: {(answer.stderr.splitlines() or ['no message'])[-1]}")
    return answer.stdout.split()[-1]


def jobs_at_once(asked: int | None, backend: str) -> int:
    """The number of runs at once. On a GPU they share its memory evenly.

    Raises:
      ValueError: more than one run for a TPU, or fewer than one.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"--jobs={asked}: at least 1")
    jobs = asked or (1 if backend == "tpu" else cores())
    if backend == "tpu" and jobs > 1:
        raise ValueError(f"--jobs={jobs}: a TPU belongs to one run at a time; give --jobs=1, or JAX_PLATFORMS=cpu")
    if backend == "gpu" and jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    return jobs
