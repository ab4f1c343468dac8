"""Trains and measures one cell; a file keeps the numbers of all."""

import json
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rpg_jax
from experiments import kept
from experiments.pretrained.design import CONFIG, Cell
from experiments.pretrained.judge import ANSWER, judge, start_answers
from rpg_jax.runs.policy import Policy

FILE = "pretrained.jsonl"


def missing(out: Path, chosen: Iterable[Cell]) -> list[Cell]:
    """The chosen cells that `out`/pretrained.jsonl lacks."""
    file = out / FILE
    done = {(run["row"], run["kl_coef"], run["seed"]) for run in read(file)} if file.exists() else set()
    return [cell for cell in chosen if (cell.row, cell.kl_coef, cell.seed) not in done]


def make_run(model: str, out: Path, cell: Cell) -> None:
    """Trains and judges a cell, and adds a line to `out`/pretrained.jsonl; the first call adds the line of the start.

    A run's folder takes 1.4 GB, and is deleted once its numbers are written. A process that makes several runs grows by
    2 GB with each: the allocator keeps what JAX has freed. So every cell has a process of its own.
    """
    cache = {"run.compilation_cache": str(out / "cache")}
    start = Policy.from_pretrained(model, max_prompt_tokens=64, max_tokens=ANSWER, config=CONFIG, overrides=cache)
    answers = start_answers(start, out / "answers.json")
    if not (out / FILE).exists():
        _add(out / FILE, {"row": "start", "kl_coef": 0.0, "seed": 0} | judge(start, start, answers))
    began = time.monotonic()
    own = {"model.path": model, "run.dir": str(out / "runs")} | cache
    result = rpg_jax.train(CONFIG, overrides=own | cell.overrides)
    trained = time.monotonic()
    policy = Policy.from_run(result.folder, overrides={"rollout.max_tokens": ANSWER, "task.max_prompt_tokens": 64})
    numbers = judge(policy, start, answers)
    seconds = {"train_seconds": trained - began, "judge_seconds": time.monotonic() - trained}
    curve = {"accuracy": [line["accuracy"] for line in result.metrics if line["step"]]}
    which = {"row": cell.row, "kl_coef": cell.kl_coef, "seed": cell.seed}
    _add(out / FILE, which | numbers | seconds | curve | {"made_with": kept.made_with()})
    shutil.rmtree(result.folder)


def read(file: Path) -> list[dict[str, Any]]:
    """The runs of a file, one a line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _add(file: Path, record: Mapping[str, Any]) -> None:
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(rounded, ensure_ascii=False) + "\n")
