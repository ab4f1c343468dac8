"""Makes a table: trains the runs that choose learning rates and the reported runs, and writes the page from them.

The numbers of the runs are kept beside the page. An interrupted table continues where it was.
"""

import contextlib
import dataclasses
import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

import rpg_jax
from rpg_jax.report.progress import Progress
from rpg_jax.report.run_files import Run, read_config
from rpg_jax.reproduction import page, results, sweeps
from rpg_jax.reproduction.results import Results
from rpg_jax.reproduction.tables import TABLES, PlannedRun, Table
from rpg_jax.reproduction.workers import Task, cores, run_tasks
from rpg_jax.runs import config_files, resolve, run_folder, train_command

SEEDS, QUICK_SEEDS, QUICK_STEPS = 5, 2, 20
QUICK_ROWS = ("GRPO", "DAPO", "RPG-REINFORCE-URKL")
LINE_SECONDS = 30.0  # between two lines of progress where there is no terminal
DATA = config_files.ROOT / "docs" / "tables" / "data"
"""The folder of the numbers that come with the code, NAME.json.gz for each table."""


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """How a table is run.

    Attributes:
      out: the folder in which `runs` has the runs of all tables, and NAME the page of each table.
      seeds: seeds of the reported runs.
      jobs: the number of runs at once.
      extra: overrides of every run, as "--config.train.steps=20".
      command: the command that the page names as its origin.
      scan: whether runs choose the learning rates, if the table has rates. If False, all rows have the config's rate.
      kept: NAME.json.gz of the same table of `TABLES`, whose runs are on the page too and are not repeated, or None.
    """

    out: Path
    seeds: Sequence[int]
    jobs: int
    extra: Sequence[str] = ()
    command: str = ""
    scan: bool = True
    kept: Path | None = None


def make_table(name: str, table: Table, options: TableOptions) -> tuple[Path, dict[str, Path]]:
    """Trains the runs of a table that have not ended, and writes page, figures and NAME.json.gz, the numbers, into
    `options.out`/NAME. Blocks until then. Returns (the path of the page, {"row, seed N": log} of failed runs). A row
    whose scan chose no rate is left out. This process uses only the CPU from now on. Raises ValueError if a run would
    be refused, a reported seed also chooses rates, another command is at work in `options.out`, a run there has another
    config, the runs of `options.kept` do not fit, or no run has a score. Errors of signals are as in `train_runs`."""
    jax.config.update("jax_platforms", "cpu")  # for this process: the accelerator belongs to the runs
    check_table(table, options.extra)
    kept = results.load(options.kept) if options.kept else None
    if kept:
        results.check_kept(kept, name, table, options.extra)
    scan, failed = _scan(name, table, options, kept.scan if kept else None)
    chosen = {row: values for row, values in sweeps.best_values(scan).items() if row in table.rows} if scan else None
    at_rates = table if chosen is None else table.with_settings(chosen)
    planned = results.missing(at_rates.planned_runs(options.seeds), kept)
    failed |= train_runs(planned, options.out, jobs=options.jobs, extra=options.extra)
    found = Results(name, table, results.collect(planned, options.out), *_about(options), scan)
    if kept:
        found = results.merge(kept, found, list(TABLES[name].rows))
    if not any(run.scores() for run in found.runs if run.trained):
        raise ValueError(f"{options.out / 'runs'} has no trained run of this table: look at {options.out / 'logs'}")
    data = options.out / name / f"{name}.json.gz"
    results.save(found, data)
    return page_from(data, options.out), failed


def page_from(data: Path, out: Path) -> Path:
    """Writes the page and figures of a table from the file `data` of its numbers into `out`/NAME, and returns the path
    of the page. Trains nothing. Raises ValueError if there is no file `data`, or it holds no table or no score."""
    found = results.load(data)
    return page.write_page(found, out / found.name)


def check_table(table: Table, extra: Sequence[str]) -> None:
    """Raises ValueError, which names the row, if a run of the table with the overrides `extra` would be refused: it has
    an unknown field, a value that a field does not take, or fields that contradict each other."""
    for row, overrides in table.rows.items():
        try:
            config = config_files.load(table.config, [*overrides, *extra]).config
            resolve.check_training(config)
            resolve.resolve(config)
        except ValueError as error:
            raise ValueError(f"{row}: {error}" if row else str(error)) from error


def quick_rows(table: Table) -> list[str]:
    """The rows of a quick look: `QUICK_ROWS`; if one is missing, the baseline and the last two other rows."""
    if set(QUICK_ROWS) <= set(table.rows):
        return list(QUICK_ROWS)
    return [table.baseline, *[row for row in reversed(list(table.rows)) if row != table.baseline][:2]]


def _scan(
    name: str, table: Table, options: TableOptions, kept: Results | None
) -> tuple[Results | None, dict[str, Path]]:
    """Trains the runs that choose the learning rates. Returns (their results, with those of `kept`, or None if nothing
    is to be chosen; the logs of the runs that failed). Raises ValueError if a reported seed is among their seeds."""
    if not table.rates or not options.scan:
        return None, {}
    if shared := sorted({*table.scan_seeds} & {*options.seeds}):
        raise ValueError(
            f"seeds {', '.join(map(str, shared))} choose the learning rates and would be reported too: give others to "
            "--seeds"
        )
    scanned = table.scan()
    planned = results.missing(scanned.planned_runs(table.scan_seeds), kept)
    failed = train_runs(planned, options.out, jobs=options.jobs, extra=options.extra)
    runs = results.collect(planned, options.out, results.SCAN_METRICS)
    scan = Results(f"{name}-scan", scanned, runs, *_about(options))
    return (results.merge(kept, scan, list(TABLES[name].scan().rows)) if kept else scan), failed


def _about(options: TableOptions) -> tuple[str, str, tuple[str, ...]]:
    """Command, hardware and overrides of a table's runs."""
    hardware = f"{options.jobs} at once on {cores()} CPU core{'s' * (cores() > 1)} ({platform.machine()})"
    return options.command, hardware, tuple(options.extra)


def arguments(plan: PlannedRun, out: Path, extra: Sequence[str]) -> list[str]:
    """The arguments of `rpg_jax.train` that train a planned run in `out`/runs. The same arguments resume the run."""
    return [
        *(f"--config={plan.config}", f"--config.seed={plan.seed}"),
        *(f"--config.run.dir={out / 'runs'}", f"--config.run.name={plan.name}"),
        *(f"--config.warm_start.dir={out / 'warm_starts'}", f"--config.run.compilation_cache={out / 'compiled'}"),
        *plan.overrides,
        *extra,
    ]


def _steps_done(plan: PlannedRun, out: Path) -> tuple[int, bool]:
    """(the last step in the metrics of the run, or 0; whether the run has ended and written its summary)."""
    folder = out / "runs" / plan.name
    run = Run.read(folder)
    return run.records[-1]["step"] if run.records else 0, run.ended and (folder / "summary.md").exists()


def check_config(plan: PlannedRun, out: Path, extra: Sequence[str]) -> None:
    """Raises ValueError, which names the fields, if the run of `plan` has begun in `out` with another config than now.
    Fields that a resumed run may change, as `mesh.*`, do not count. `train.steps` counts, although it may change."""
    if there := read_config(out / "runs" / plan.name):
        config = config_files.load(plan.config, arguments(plan, out, extra)[1:]).config
        differing = run_folder.differing(there, run_folder.as_json(resolve.with_method(config)))
        if there["train"]["steps"] != config.train.steps:
            differing = f"train.steps was {there['train']['steps']}, now {config.train.steps}; {differing}".strip("; ")
        if differing:
            raise ValueError(
                f"{out / 'runs' / plan.name} is of another config: {differing}. Undo the change of {plan.config} or "
                "of the overrides, or choose another --out"
            )


@contextlib.contextmanager
def locked(out: Path) -> Iterator[int]:
    """A context that holds a lock on the file `out`/lock and yields the file's descriptor. The folder `out` must exist.
    A process that inherits the descriptor holds the lock too. Raises ValueError at once if another command, or a run
    that outlived its killed command, works in `out`."""
    with (out / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another table is being run in {out}: wait for it, or choose another --out") from None
        yield file.fileno()


def train_runs(planned: Sequence[PlannedRun], out: Path, *, jobs: int, extra: Sequence[str] = ()) -> dict[str, Path]:
    """Trains the planned runs that have not ended, `jobs` at once; returns {"row, seed N": log} of runs that failed. If
    `out`/warm_starts is empty, the first run is alone: it makes the warm start and the programs that the other runs
    share. If this run fails, no other run starts. Ctrl-C, SIGTERM and a closed terminal stop the runs after their steps
    in progress; the same call continues the runs. The screen shows which runs train, and the steps of all runs. Raises
    ValueError if `out` has one of the runs with another config or other overrides, or if another command is at work in
    `out`; KeyboardInterrupt or SystemExit after a signal."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with locked(out) as lock:
        for plan in planned:
            check_config(plan, out, extra)
        done = {plan.name: _steps_done(plan, out) for plan in planned}
        plans = {plan.name: plan for plan in planned if not done[plan.name][1]}
        tasks = [
            Task(plan.name, train_in_worker, arguments(plan, out, extra), out / "logs" / f"{plan.name}.log")
            for plan in plans.values()
        ]
        failed: dict[str, Path] = {}
        total = sum(config_files.load(plan.config, [*plan.overrides, *extra]).config.train.steps for plan in planned)
        first = sum(steps for steps, _ in done.values())
        with Progress(total, first=first, title=f"{len(planned)} runs", every=LINE_SECONDS) as progress:

            def on_tick(running: Sequence[Task]) -> None:
                done.update({task.name: _steps_done(plans[task.name], out) for task in running})
                ended = sum(has_ended for _, has_ended in done.values())
                now = f"; now {', '.join(str(plans[task.name]) for task in running)}" if running else ""
                steps = sum(steps for steps, _ in done.values())
                progress.update(steps, {}, title=f"{ended}/{len(planned)} runs{now}")

            first_alone = not any((out / "warm_starts").glob("*"))
            for result in run_tasks(tasks, jobs=jobs, inherited=lock, first_alone=first_alone, on_tick=on_tick):
                done[result.task.name] = _steps_done(plans[result.task.name], out)
                if result.code:
                    failed[str(plans[result.task.name])] = result.task.log
    return failed


def train_in_worker(arguments: Sequence[str]) -> int:
    """Trains one run by the command line `arguments`, which replaces `sys.argv`; returns the run's exit code."""
    sys.argv = [str(Path(rpg_jax.__file__).parent / "train.py"), *arguments]  # noted in versions.json
    return train_command.main(arguments)


def platform_name() -> str:
    """The backend that JAX finds in another process: "cpu", "gpu" or "tpu". Raises ValueError if JAX does not start."""
    # A process that opens a TPU keeps the TPU from the runs.
    asked = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    answer = subprocess.run(asked, capture_output=True, text=True, errors="replace")
    if answer.returncode:
        raise ValueError(f"JAX does not start: {(answer.stderr.splitlines() or ['no message'])[-1]}")
    return answer.stdout.split()[-1]


def jobs_at_once(asked: int | None, backend: str) -> int:
    """The number of runs at a time on the backend "cpu", "gpu" or "tpu": `asked`; for None 1 on a TPU, else one for
    each CPU core. For several runs on a GPU the call sets XLA_PYTHON_CLIENT_MEM_FRACTION, if this variable is unset:
    each run then takes an equal part of the GPU's memory. Raises ValueError if `asked` is below 1, or above 1 on a TPU.
    """
    if asked is not None and asked < 1:
        raise ValueError(f"--jobs={asked}: at least 1")
    jobs = asked or (1 if backend == "tpu" else cores())
    if backend == "tpu" and jobs > 1:
        raise ValueError(f"--jobs={jobs}: a TPU belongs to one run at a time; give --jobs=1, or JAX_PLATFORMS=cpu")
    if backend == "gpu" and jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / jobs:.3f}")
    return jobs
