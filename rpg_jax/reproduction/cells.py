"""Runs the cells of a table, several at once. An interrupted table continues where it was.

Each core has a process that trains one cell after another (`cell_worker`).
"""

import collections
import contextlib
import fcntl
import json
import os
import select
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
WORKER = (sys.executable, "-m", "rpg_jax.reproduction.cell_worker")
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def arguments(cell: Cell, out: Path, extra: Sequence[str]) -> list[str]:
    """The arguments of `rpg_jax.train` for a cell; the same ones resume it."""
    return [
        *(f"--config={cell.config}", f"--config.seed={cell.seed}"),
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
def alone_in(out: Path) -> Iterator[int]:
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


class Worker:
    """A process that trains cells one after another on one core, if the platform allows it.

    Args:
      place: of the core among those that this process may use; None leaves the choice to the system.
      lock: a descriptor that the process inherits.
    """

    def __init__(self, place: int | None, lock: int):
        self.cell: Cell | None = None
        self._place, self._lock = place, lock
        self._process: subprocess.Popen[bytes] | None = None

    def give(self, cell: Cell, arguments: Sequence[str], log: Path) -> None:
        """Starts a cell; its output goes to `log`."""
        self.cell = cell
        if self._process is None or self._process.poll() is not None:
            self._process = self._start(log)
        assert self._process.stdin is not None
        order = json.dumps({"arguments": list(arguments), "log": str(log)})
        with contextlib.suppress(BrokenPipeError):  # it has just ended: `take` tells
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()

    def take(self) -> int | None:
        """The exit code of the cell, once, when it has ended; None before that."""
        process = self._process
        assert process is not None and process.stdout is not None
        code = process.poll()  # before the look: an answer that is written later is seen the next time
        answered = select.select([process.stdout], [], [], 0)[0] and process.stdout.readline()
        if not answered and code is None:
            return None
        self.cell = None
        return 0 if answered else code or 1

    def terminate(self) -> None:
        """Ends the process; a cell in progress finishes its step and saves first."""
        if self._process is not None:
            self._process.terminate()

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as errors:
            process = subprocess.Popen(
                WORKER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=[self._lock],
                bufsize=0,
            )
        if self._place is not None:  # no preexec_fn: it can wait for ever for a lock that a thread held at the fork
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, {sorted(os.sched_getaffinity(0))[self._place]})
        return process


@contextlib.contextmanager
def _workers(jobs: int, lock: int) -> Iterator[tuple[list[Worker], list[int]]]:
    """Yields the workers and the signals heard so far; ends the workers when it ends.

    The handlers only note a signal. If a handler raised between the start of a process and its entry in a worker,
    nothing would end that process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else 0
    workers = [Worker(place if 1 < jobs <= cores else None, lock) for place in range(jobs)]
    heard: list[int] = []
    asking = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    previous = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in asking}
    try:
        yield workers, heard
    finally:
        for worker in workers:
            worker.terminate()
        for number, handler in previous.items():  # a second signal ends the wait below
            signal.signal(number, handler)
        for worker in workers:
            worker.wait()
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
    disturb each other. A cell that fails ends its process, and the next cell gets a new one. Ctrl-C, SIGTERM and a
    closed terminal stop the runs after their steps in progress; the same call continues them.

    Raises:
      ValueError: `out` has runs with other overrides than `extra`, or another command is at work in it.
      KeyboardInterrupt, SystemExit: a signal stopped the runs.
    """
    claim(out, extra)
    with alone_in(out) as lock, _workers(jobs, lock) as (workers, heard):
        (out / "logs").mkdir(parents=True, exist_ok=True)
        progress = {cell.name: progress_of(cell, out) for cell in cells}
        waiting = collections.deque(cell for cell in cells if not progress[cell.name][1])
        alone = not any((out / "warm_starts").glob("*"))
        failed: dict[str, Path] = {}
        while (waiting or any(w.cell for w in workers)) and not heard:
            for worker in workers[: 1 if alone else jobs]:
                if waiting and worker.cell is None:
                    cell = waiting.popleft()
                    worker.give(cell, arguments(cell, out, extra), _log(cell, out))
            time.sleep(POLL_SECONDS)
            for worker, cell in [(w, w.cell) for w in workers if w.cell is not None]:
                code = worker.take()
                progress[cell.name] = progress_of(cell, out)
                if code:
                    failed[str(cell)] = _log(cell, out)
                    if alone:
                        waiting.clear()
                alone = alone and code is None
            steps, ends = zip(*progress.values(), strict=True)
            on_progress(sum(steps), sum(ends), [str(w.cell) for w in workers if w.cell])
    return failed


def _log(cell: Cell, out: Path) -> Path:
    return out / "logs" / f"{cell.name}.log"
