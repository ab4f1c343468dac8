"""Makes a table from exact sums (`estimators`, `completions`) or from training runs, and writes its page."""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rpg_jax.reproduction import (
    completion_estimators,
    completion_laboratory,
    completion_page,
    completion_runs,
    estimator_page,
    laboratory,
    sampled_page,
    table_page,
)
from rpg_jax.reproduction.cells import run_cells, steps_of
from rpg_jax.reproduction.completion_laboratory import CompletionSettings, SampledSettings
from rpg_jax.reproduction.estimators import CLIPS, KL_TERMS, SAMPLERS
from rpg_jax.reproduction.tables import TABLES
from rpg_jax.storage import write_atomically

SEEDS, QUICK_ROWS, QUICK_SEEDS, QUICK_STEPS = 5, 3, 2, 20
QUICK_COMPLETIONS = CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500)
QUICK_SAMPLES = SampledSettings(length=4, seeds=1, updates=320, updates_a_batch=(1, 32))
LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal


def estimators(out: Path, quick: bool) -> Path:
    """Computes bias, variance and destination of every estimator; writes `estimators.{md,png,json}`."""
    settings = laboratory.Settings(scenes=16, fixed_point_scenes=4) if quick else laboratory.Settings()
    of_completions = QUICK_COMPLETIONS if quick else CompletionSettings()
    rows = 2 * len(KL_TERMS) + len(CLIPS) + len(SAMPLERS) + 1 + len(completion_estimators.ESTIMATORS)
    with _counted("estimators", rows + len(completion_estimators.ENDS)) as on_row:
        results = laboratory.run(settings, on_row=on_row)
        completions = completion_laboratory.run_exact(of_completions, on_row=on_row)
    sections = completion_page.exact_sections(completions, of_completions)
    page = estimator_page.write_page(results, settings, sections, out)
    _write_json(out / "estimators.json", {"settings": settings, "results": results})
    _write_json(out / "estimators_completions.json", {"settings": of_completions, "results": completions})
    return page


def completions(out: Path, quick: bool) -> Path:
    """Runs with sampled gradients on completions that can all be enumerated; writes `completions.{md,json}`."""
    tables = QUICK_SAMPLES if quick else SampledSettings()
    with _counted("completions", len(completion_estimators.SAMPLED)) as on_row:
        results = completion_runs.run_sampled(tables, on_row=on_row)
    page = sampled_page.write_page(results, tables, out)
    _write_json(out / "completions.json", {"settings": tables, "results": results})
    return page


@contextlib.contextmanager
def _counted(name: str, rows: int) -> Iterator[Callable[[str, str], None]]:
    """A progress bar of a laboratory's rows; gives the function that counts one."""
    with _progress() as progress:
        bar = progress.add_task(name, total=rows)
        yield lambda experiment, row: progress.update(bar, advance=1, description=f"{experiment}: {row}")


def _write_json(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False, default=dataclasses.asdict)
    write_atomically(path, text + "\n")


def training_runs(
    name: str,
    out: Path,
    *,
    methods: str | None,
    seeds: int | None,
    jobs: int | None,
    quick: bool,
    extra: Sequence[str],
    command: str,
) -> tuple[Path, dict[str, Path]]:
    """Makes a table of training runs; returns its page, which names `command`, and the logs of the runs that failed.

    `methods` are rows, separated by commas. Each row has `seeds` runs; `jobs` runs go at once; None takes the defaults.
    `quick` takes fewer rows, seeds and steps, in a folder of their own. Every run has the overrides `extra`.

    Raises:
      ValueError: no such row, or a number of jobs that the machine cannot run.
    """
    table = TABLES[name]
    rows = table.named(methods) if methods else None
    if quick:
        others = [row for row in reversed(list(table.rows)) if row != table.baseline]
        rows = rows or [table.baseline, *others[: QUICK_ROWS - 1]]
        extra = [f"--config.train.steps={QUICK_STEPS}", *extra]
    cells = table.cells(range(seeds or (QUICK_SEEDS if quick else SEEDS)), rows)
    jobs = jobs_at_once(jobs, _platform())
    out = out / "quick" if quick else out
    with _progress() as progress:
        bar = progress.add_task(f"0/{len(cells)} runs", total=None)
        printed = time.monotonic()

        def on_progress(steps: int, ended: int, running: list[str]) -> None:
            nonlocal printed
            total = steps_of(cells, out) * len(cells)
            text = f"{ended}/{len(cells)} runs; now {', '.join(running)}"
            progress.update(bar, completed=steps, total=total or None, description=text)
            if not progress.console.is_terminal and time.monotonic() - printed > LINE_SECONDS:
                printed = time.monotonic()
                print(f"{text}; step {steps} of {total or '?'} in all; logs in {out / 'logs'}", file=sys.stderr)

        failed = run_cells(cells, out, jobs=jobs, extra=extra, on_progress=on_progress)
    hardware = f"{jobs} at once on {cores()} CPU cores ({platform.machine()})"
    page = table_page.write_page(name, table, cells, out, command=command, hardware=hardware)
    return page, failed


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _platform() -> str:
    """`cpu`, `gpu` or `tpu`. Another process asks JAX: a process that opens a TPU keeps it from the runs.

    Raises:
      ValueError: JAX does not start.
    """
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    if answer.returncode:
        raise ValueError(f"JAX does not start: {(answer.stderr.splitlines() or ['no message'])[-1]}")
    return answer.stdout.split()[-1]


def jobs_at_once(asked: int | None, platform_name: str) -> int:
    """The number of runs at once. On a GPU they share its memory evenly.

    Raises:
      ValueError: more than one run for a TPU, or fewer than one.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"--jobs={asked}: at least 1")
    jobs = asked or (1 if platform_name == "tpu" else cores())
    if platform_name == "tpu" and jobs > 1:
        raise ValueError(f"--jobs={jobs}: a TPU belongs to one run at a time; give --jobs=1, or JAX_PLATFORMS=cpu")
    if platform_name == "gpu" and jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    return jobs


def _progress() -> Progress:
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TimeRemainingColumn(),
    )
