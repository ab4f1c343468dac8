"""Makes the tables that need no training run: `estimators` from exact sums, `completions` from tabular policies."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rpg_jax.reproduction import (
    completion_estimators,
    completion_laboratory,
    completion_page,
    completion_runs,
    estimator_page,
    laboratory,
    sampled_page,
)
from rpg_jax.reproduction.bars import progress_bars
from rpg_jax.reproduction.completion_laboratory import CompletionSettings, SampledSettings
from rpg_jax.reproduction.estimators import CLIPS, KL_TERMS, SAMPLERS
from rpg_jax.storage import write_atomically

QUICK_COMPLETIONS = CompletionSettings(length=4, prompts=4, end_prompts=2, end_steps=500, offline_steps=500)
QUICK_SAMPLES = SampledSettings(length=4, seeds=1, updates=320, updates_a_batch=(1, 32))


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
    with progress_bars() as progress:
        bar = progress.add_task(name, total=rows)
        yield lambda experiment, row: progress.update(bar, advance=1, description=f"{experiment}: {row}")


def _write_json(path: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False, default=dataclasses.asdict)
    write_atomically(path, text + "\n")
