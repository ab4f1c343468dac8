"""The runs: SmolLM2-135M-Instruct learns sums under KL terms of several kinds and strengths; a file keeps them."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rpg_jax
from experiments import kept
from experiments.pretrained.judge import ANSWER, judge, start_answers
from rpg_jax.report.run_files import read_jsonl
from rpg_jax.runs.policy import Policy

FILE = "pretrained.jsonl"
CONFIG = "configs/smollm2_135m_sums.py"
# Rewards and KL of whole completions in nats: β means the same in every row.
_SHARED = {
    "loss.advantage": "leave_one_out",
    "loss.aggregate": "sequence_mean_token_sum",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "dynamic_sampling.enabled": False,
    "reference.rule": "fixed",
    "train.updates_per_step": 2,
    "evaluation.every": 8,
    "log.rollouts_every": 8,
}
NO_KL = "no KL"
ROWS = {
    "completions: RKL": {"method": "RPG-SEQ-RKL"},
    "to-go: URKL": {"method": "RPG-REINFORCE-URKL", "loss.level": "to_go"},
    "per token: URKL": {"method": "RPG-REINFORCE-URKL"},
    "per token (GRPO): k₃": {"method": "GRPO-DeepSeekMath"},
    "KL in the reward": {"method": "KL-in-reward"},
    NO_KL: {"method": "RPG-REINFORCE-URKL"},
}
"""The kind of KL term, and the config fields of it."""
STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a kind of KL term, its β and a seed."""

    row: str
    kl_coef: float
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"frontier-{[*ROWS].index(self.row)}-{self.kl_coef:g}-seed{self.seed}"

    @property
    def overrides(self) -> dict[str, object]:
        """The fields in which the run differs from `CONFIG`."""
        own = ROWS[self.row] | {"loss.kl_coef": self.kl_coef, "seed": self.seed, "run.name": self.name}
        return _SHARED | own


def cells(seeds: int) -> Iterator[Cell]:
    """All runs, the most telling ones first: a table that is interrupted has all seeds of its strongest contrasts."""
    yield from (Cell(NO_KL, 0.0, seed) for seed in range(seeds))
    for strengths in ((0.1,), (0.03, 0.3), (0.01, 0.003)):
        for seed in range(seeds):
            yield from (Cell(row, strength, seed) for strength in strengths for row in ROWS if row != NO_KL)


def missing(out: Path, chosen: Iterable[Cell]) -> list[Cell]:
    """The chosen cells that `out`/pretrained.jsonl lacks."""
    done = {(run["row"], run["kl_coef"], run["seed"]) for run in read_jsonl(out / FILE)}
    return [cell for cell in chosen if dataclasses.astuple(cell) not in done]


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
    _add(out / FILE, dataclasses.asdict(cell) | numbers | seconds | curve | {"made_with": kept.made_with()})
    shutil.rmtree(result.folder)


def _add(file: Path, record: Mapping[str, Any]) -> None:
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(rounded, ensure_ascii=False) + "\n")
