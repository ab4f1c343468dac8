"""Makes the table `objective`: its runs, the file that keeps them, and the page."""

import gzip
import sys
from pathlib import Path

from rpg_jax.reproduction import objective_page, path_runs
from rpg_jax.reproduction.bars import progress_bars
from rpg_jax.reproduction.path_experiments import BASELINE, Experiment, ObjectiveSettings, count_units
from rpg_jax.reproduction.paths import PathSettings
from rpg_jax.storage import write_atomically

QUICK = ObjectiveSettings(
    task=PathSettings(symbols=4, length=4, width=16, updates=160),
    seeds=(0, 1),
    rates=(2e-3,),
    scan_seeds=(100,),
    experiments={
        "strengths": Experiment([BASELINE, "per token: URKL", "per token (GRPO): k₃"], (0.1, 0.5), lengths=(4,)),
    },
)


def objective(out: Path, quick: bool, jobs: int) -> Path:
    """Makes the runs that `out` lacks; writes `objective.{md,png,jsonl.gz}` and returns the page."""
    settings = QUICK if quick else ObjectiveSettings()
    out = out / "quick" if quick else out
    with progress_bars() as progress:
        bar = progress.add_task("objective", total=count_units(settings))

        def on_unit(name: str, done: int) -> None:
            progress.update(bar, completed=done, description=name)
            if not progress.console.is_terminal:
                print(f"{done} of {count_units(settings)} programs: {name}", file=sys.stderr)

        path_runs.run_objective(settings, out / "objective.jsonl", jobs=jobs, on_unit=on_unit)
    data = out / "objective.jsonl.gz"
    write_atomically(data, packed((out / "objective.jsonl").read_bytes()))
    return page_from(data, out)


def packed(text: bytes) -> bytes:
    """The file of the runs as it comes with the code: equal runs are equal bytes."""
    return gzip.compress(text, 9, mtime=0)


def page_from(data: Path, out: Path) -> Path:
    """The page of runs as they were.

    Raises:
      ValueError: `data` is no such file.
    """
    try:
        text = gzip.decompress(data.read_bytes()).decode()
        kept = path_runs.read(text)
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{data} is not the data of the table objective: {error}") from error
    return objective_page.write_page(kept, out)
