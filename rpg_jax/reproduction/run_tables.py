"""Makes a table from training runs: runs its scan and its cells, keeps their numbers, writes the page from these.

Rows are compared from one warm start, and another machine's warm start may decide more than any row. Kept runs that
started from other weights than the new runs are refused.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rpg_jax.reproduction import choice, result_files, table_page
from rpg_jax.reproduction.cells import run_cells, steps_of
from rpg_jax.reproduction.results import Results, Run
from rpg_jax.reproduction.table import LEARNING_RATE, Cell, Table
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.runs import config_files, resolve

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
    check_table(table, job.extra)
    kept = result_files.load(job.kept) if job.kept else None
    if kept:
        check_kept(kept, name, table, job.extra)
    scan, failed = _scan(name, table, job, kept.scan if kept else None)
    chosen = {row: values for row, values in choice.best_values(scan).items() if row in table.rows} if scan else None
    at_rates = table if chosen is None else table.with_settings(chosen)
    cells = missing(at_rates.cells(job.seeds), kept)
    failed |= _run(cells, job)
    results = Results(name, table, result_files.collect(cells, job.out), *_about(job), scan)
    if kept:
        results = together(kept, results, list(TABLES[name].rows))
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


def check_table(table: Table, extra: Sequence[str]) -> None:
    """Refuses a table, before anything runs, of which a run would be refused when it starts.

    Raises:
      ValueError: an unknown field, a value that a field does not take, or fields that do not go together. It names the
        row.
    """
    known = config_files.fields()
    for row, overrides in table.rows.items():
        try:
            loaded = config_files.load(table.config, [*overrides, *extra])
            for field, value in loaded.overrides.items():
                if field in known:
                    known[field].check(field, value)
            resolve.check_training(loaded.config)
            resolve.resolve(loaded.config)
        except ValueError as error:
            raise ValueError(f"{row}: {error}" if row else str(error)) from error


def check_kept(kept: Results, name: str, table: Table, extra: Sequence[str]) -> None:
    """Refuses kept numbers that cannot stand on one page with runs of `table`.

    Raises:
      ValueError: they are of another table, have other overrides, or a row of both has other settings.
    """
    if (kept.name, kept.table.config) != (name, table.config):
        raise ValueError(f"the kept numbers are of {kept.name} ({kept.table.config}), not of {name} ({table.config})")
    if tuple(kept.extra) != tuple(extra):
        raise ValueError(f"the kept runs of {name} have the overrides {list(kept.extra)}, not {list(extra)}")
    for row in table.rows.keys() & kept.table.rows.keys():
        if tuple(table.rows[row]) != tuple(kept.table.rows[row]):
            raise ValueError(
                f"the kept runs of {row} have {list(kept.table.rows[row])}, today's have {list(table.rows[row])}: "
                "make the table without kept runs, or leave this row out of --methods"
            )


def missing(cells: Sequence[Cell], kept: Results | None) -> list[Cell]:
    """The cells that the kept numbers lack, or whose run had not ended."""
    ended = {(run.row, run.seed, run.name) for run in kept.runs if run.ended} if kept else set()
    return [cell for cell in cells if (cell.row, cell.seed, cell.name) not in ended]


def together(kept: Results, new: Results, order: Collection[str]) -> Results:
    """The runs of both. Of a run that both have, the new one counts.

    Args:
      order: of the rows; those that it lacks come last.

    Raises:
      ValueError: they started from different weights.
    """
    _check_starts(kept, new)
    rows = {**kept.table.rows, **new.table.rows}
    names = [row for row in order if row in rows] + [row for row in rows if row not in order]
    runs: dict[tuple[int, int], Run] = {}
    for run in [*kept.runs, *new.runs]:
        runs[run.seed, names.index(run.row)] = run
    table = dataclasses.replace(
        new.table,
        rows={row: rows[row] for row in names},
        baselines={**kept.table.baselines, **new.table.baselines},
        swept={row: values for row, values in {**kept.table.swept, **new.table.swept}.items() if row in rows},
    )
    return dataclasses.replace(
        new,
        table=table,
        runs=[runs[place] for place in sorted(runs)],
        hardware="; ".join(dict.fromkeys([*kept.hardware.split("; "), *new.hardware.split("; ")])),
    )


def _check_starts(kept: Results, new: Results) -> None:
    """Raises ValueError if runs of one model that was read or warm-started began with different weights."""
    began: dict[str, dict[str, Run]] = {}
    for run in [*kept.all_runs(), *new.all_runs()]:
        if run.start and (run.config.get("warm_start.enabled") or run.config.get("model.path")):
            model = json.dumps({key: v for key, v in run.config.items() if key.startswith("model.")}, sort_keys=True)
            began.setdefault(model, {}).setdefault(run.start, run)
    for starts in began.values():
        if len(starts) > 1:
            told = " and ".join(f"{run.name} ({start})" for start, run in starts.items())
            raise ValueError(
                f"{told} did not start from the same weights, so their rows cannot be compared: copy the warm start of "
                "the kept runs into the folder warm_starts of these, or make the table without kept runs"
            )


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
    if absent := sorted(set(scanned.rows) - {run.row for run in runs}):
        raise ValueError(f"{data.name} has no run of {', '.join(absent)}")
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
    cells = missing(scanned.cells(table.scan_seeds), kept)
    failed = _run(cells, job)
    runs = result_files.collect(cells, job.out, result_files.SCAN_COLUMNS, evaluated=False)
    scan = Results(f"{name}-scan", scanned, runs, *_about(job))
    return (together(kept, scan, list(TABLES[name].scan().rows)) if kept else scan), failed


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


def progress_bars() -> Progress:
    """A description, a bar, the count, the time spent and the time left."""
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TimeRemainingColumn(),
    )


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
