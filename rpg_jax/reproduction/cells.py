"""Runs the cells of a table: each a training process of its own, as many at once as there are cores, resumable."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rpg_jax.report.runs import read_config, read_metrics, write_atomically
from rpg_jax.reproduction.tables import Cell

POLL_SECONDS = 0.5


def command(cell: Cell, out: Path, extra: Sequence[str]) -> list[str]:
    """The training command of a cell; the same again resumes it."""
    return [
        *(sys.executable, "-m", "rpg_jax.train", f"--config={cell.config}", f"--config.seed={cell.seed}"),
        *(f"--config.run.dir={out / 'runs'}", f"--config.run.name={cell.name}"),
        *(f"--config.warm_start.dir={out / 'warm_starts'}", f"--config.run.compilation_cache={out / 'compiled'}"),
        *cell.overrides,
        *extra,
    ]


def progress_of(cell: Cell, out: Path) -> tuple[int, bool]:
    """(steps done, whether the run has ended)."""
    folder = out / "runs" / cell.name
    records = read_metrics(folder)
    steps = int(records[-1]["step"]) if records else 0
    return steps, bool(records) and steps == read_config(folder)["train"]["steps"] and (folder / "summary.md").exists()


def steps_of(cells: Sequence[Cell], out: Path) -> int:
    """Steps that a run of this table takes, 0 before the first has started."""
    configs = (read_config(out / "runs" / cell.name) for cell in cells)
    return next((int(config["train"]["steps"]) for config in configs if config), 0)


def claim(out: Path, extra: Sequence[str]) -> None:
    """Notes in `out` which overrides all of its runs have.

    Raises:
      ValueError: its runs have others, so those that have ended are not of the table asked for.
    """
    note = out / "overrides.json"
    if note.exists() and (found := json.loads(note.read_text(encoding="utf-8"))) != list(extra):
        before, now = (shlex.join(overrides) or "no overrides" for overrides in (found, extra))
        raise ValueError(f"the runs in {out} have {before}, not {now}: choose another --out, or delete that folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(note, json.dumps(list(extra)) + "\n")


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Keeps a second command from starting the same runs.

    Raises:
      ValueError: there is one at work in `out`.
    """
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another table is being run in {out}: wait for it, or choose another --out") from None
        yield


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    extra: Sequence[str] = (),
    on_progress: Callable[[int, int, list[str]], None] = lambda steps, ended, running: None,
) -> dict[str, Path]:
    """Runs what has not ended; returns "row, seed" -> log of the cells that failed.

    The first cell runs alone where none has: it makes the warm start and the compiled programs that all share, and if
    it fails nothing else is started. Each process keeps to one core where the platform can say so, so that `jobs` runs
    do not get into each other's way. Ctrl-C stops the runs after their steps in progress; the same call continues.

    Raises:
      ValueError: `out` has runs of other `extra` overrides, or another command is running some in it.
    """
    claim(out, extra)
    with _alone_in(out):
        return _run_cells(cells, out, jobs, extra, on_progress)


def _run_cells(
    cells: Sequence[Cell],
    out: Path,
    jobs: int,
    extra: Sequence[str],
    on_progress: Callable[[int, int, list[str]], None],
) -> dict[str, Path]:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    progress = {cell.name: progress_of(cell, out) for cell in cells}
    waiting = collections.deque(cell for cell in cells if not progress[cell.name][1])
    alone = not any((out / "warm_starts").glob("*"))
    running: dict[int, tuple[Cell, subprocess.Popen]] = {}  # by place, 0 ... jobs - 1
    failed: dict[str, Path] = {}
    try:
        while waiting or running:
            for place in range(1 if alone else jobs):
                if waiting and place not in running:
                    cell = waiting.popleft()
                    running[place] = cell, _start(command(cell, out, extra), _log(cell, out), place, jobs)
            time.sleep(POLL_SECONDS)
            for place, (cell, process) in list(running.items()):
                ended = process.poll() is not None
                progress[cell.name] = progress_of(cell, out)
                if ended:
                    del running[place]
                    if process.returncode != 0:
                        failed[str(cell)] = _log(cell, out)
                        if alone:
                            waiting.clear()
                    alone = False
            steps, ends = zip(*progress.values(), strict=True)
            on_progress(sum(steps), sum(ends), [str(c) for c, _ in running.values()])
    finally:
        for _, process in running.values():
            process.send_signal(signal.SIGTERM)
        for _, process in running.values():
            process.wait()
    return failed


def _log(cell: Cell, out: Path) -> Path:
    return out / "logs" / f"{cell.name}.log"


def _start(arguments: list[str], log: Path, place: int, jobs: int) -> subprocess.Popen:
    def keep_to_one_core() -> None:
        cores = sorted(os.sched_getaffinity(0))
        if jobs > 1 and len(cores) >= jobs:
            os.sched_setaffinity(0, {cores[place]})

    with log.open("ab") as file:
        pin = keep_to_one_core if hasattr(os, "sched_setaffinity") else None
        return subprocess.Popen(
            arguments, stdout=file, stderr=subprocess.STDOUT, preexec_fn=pin, start_new_session=True
        )
