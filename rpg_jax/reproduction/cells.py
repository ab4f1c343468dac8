"""Runs the cells of a table as training processes, several at once. An interrupted table continues where it was."""

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

from rpg_jax.report.run_files import read_config, read_metrics
from rpg_jax.reproduction.table import Cell
from rpg_jax.storage import write_atomically

POLL_SECONDS = 0.5
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(cell: Cell, out: Path, extra: Sequence[str]) -> list[str]:
    """The training command of a cell; the same command resumes it."""
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
    """Steps of one run of this table; 0 before the first run has started."""
    configs = (read_config(out / "runs" / cell.name) for cell in cells)
    return next((int(config["train"]["steps"]) for config in configs if config), 0)


def claim(out: Path, extra: Sequence[str]) -> None:
    """Notes the overrides of all runs in `out`.

    Raises:
      ValueError: the runs in `out` have other overrides; they do not belong to this table.
    """
    note = out / "overrides.json"
    if note.exists() and (found := json.loads(note.read_text(encoding="utf-8"))) != list(extra):
        before, now = (shlex.join(overrides) or "no overrides" for overrides in (found, extra))
        raise ValueError(f"the runs in {out} have {before}, not {now}: choose another --out, or delete that folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(note, json.dumps(list(extra)) + "\n")


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[int]:
    """Locks `out` against a second command. A process that inherits the descriptor holds the lock too.

    Raises:
      ValueError: another command, or a run that outlived its killed command, works in `out`.
    """
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another table is being run in {out}: wait for it, or choose another --out") from None
        yield file.fileno()


@contextlib.contextmanager
def _runs() -> Iterator[tuple[dict[int, tuple[Cell, subprocess.Popen]], list[int]]]:
    """Yields the runs at work by place, 0 ... jobs - 1, and the signals heard so far; ends the runs when it ends.

    The handlers only note a signal. If a handler raised between the start of a run and its entry here, nothing would
    end that run.
    """
    running: dict[int, tuple[Cell, subprocess.Popen]] = {}
    heard: list[int] = []
    asking = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    previous = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in asking}
    try:
        yield running, heard
    finally:
        for _, process in running.values():
            process.terminate()
        for number, handler in previous.items():  # a second signal ends the wait below
            signal.signal(number, handler)
        for _, process in running.values():
            process.wait()
    if heard:
        raise KeyboardInterrupt if heard[0] == signal.SIGINT else SystemExit(128 + heard[0])


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    extra: Sequence[str] = (),
    on_progress: Callable[[int, int, list[str]], None] = lambda steps, ended, running: None,
) -> dict[str, Path]:
    """Runs the cells that have not ended; returns {"row, seed": log} of cells that failed.

    In a new folder the first cell runs alone: it makes the warm start and the compiled programs that all cells share.
    If it fails, no other cell starts. If the platform allows it, each process keeps to one core, so that runs do not
    disturb each other. Ctrl-C, SIGTERM and a closed terminal stop the runs after their steps in progress; the same call
    continues them.

    Raises:
      ValueError: `out` has runs with other overrides than `extra`, or another command is at work in it.
      KeyboardInterrupt, SystemExit: a signal stopped the runs.
    """
    claim(out, extra)
    with _alone_in(out) as lock, _runs() as (running, heard):
        (out / "logs").mkdir(parents=True, exist_ok=True)
        progress = {cell.name: progress_of(cell, out) for cell in cells}
        waiting = collections.deque(cell for cell in cells if not progress[cell.name][1])
        alone = not any((out / "warm_starts").glob("*"))
        failed: dict[str, Path] = {}
        while (waiting or running) and not heard:
            for place in range(1 if alone else jobs):
                if waiting and place not in running:
                    cell = waiting.popleft()
                    running[place] = cell, _start(command(cell, out, extra), _log(cell, out), place, jobs, lock)
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
    return failed


def _log(cell: Cell, out: Path) -> Path:
    return out / "logs" / f"{cell.name}.log"


def _start(arguments: list[str], log: Path, place: int, jobs: int, lock: int) -> subprocess.Popen:
    with log.open("ab") as file:
        process = subprocess.Popen(
            arguments, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock]
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if 1 < jobs <= len(cores):  # no preexec_fn: it can wait for ever for a lock that a thread held at the fork
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, {cores[place]})
    return process
