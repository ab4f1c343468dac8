"""Evaluates a run on its held-out problems: Mean@k, pass@k, maj@k with errors clustered by problem.

  python -m rpg_jax.evaluate --run=runs/tiny-rpg-reinforce-urkl-seed0 --k=32

Writes into the run folder evaluations/step-S-k-K.jsonl, one object per completion with its verdict, and prints the
table. The same command gives the same completions, whatever the batching.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from rpg_jax import command_line, run_folder
from rpg_jax.experiment import Experiment
from rpg_jax.report import statistics
from rpg_jax.report.progress import Progress
from rpg_jax.training.experience import Group

_RUN = flags.DEFINE_string("run", None, "folder of the run")
_STEP = flags.DEFINE_integer("step", None, "checkpoint to evaluate; default: the last")
_K = flags.DEFINE_integer("k", 32, "completions per problem", lower_bound=1)
_PROBLEMS = flags.DEFINE_integer("problems", None, "held-out problems; default: as many as in training", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy", lower_bound=0)
_PER_CALL = 32  # problems sampled between two looks at the progress bar


def main() -> int:
    """Loads the checkpoint, samples, scores, prints and writes."""
    if _RUN.value is None:
        raise ValueError("which run? Give --run=runs/NAME")
    run_dir = Path(_RUN.value)
    config = run_folder.read_config(run_dir)
    config.evaluation.update(k=_K.value, temperature=_TEMPERATURE.value)
    if _PROBLEMS.value is not None:
        config.evaluation.problems = _PROBLEMS.value
    experiment = Experiment.open(config, run_dir)
    with experiment.activate():
        step, params = experiment.restore_policy(run_dir, _STEP.value)
        by_set = sample_groups(experiment, params, step)
    for name, groups in by_set.items():
        Console().print(scores_table(groups, f"{run_dir.name}, step {step}: {name}"))
    file = run_dir / "evaluations" / f"step-{step}-k-{_K.value}-temperature-{_TEMPERATURE.value:g}.jsonl"
    write_completions(file, by_set)
    print(f"every completion with its verdict: {file}")
    return 0


def sample_groups(experiment: Experiment, params: Any, step: int) -> dict[str, list[Group]]:
    """k scored completions for each problem of each held-out set."""
    rollout, held_out = experiment.make_rollout(params), experiment.task.held_out
    by_set: dict[str, list[Group]] = {name: [] for name in held_out}
    done = 0
    try:
        with (
            experiment.make_scorer() as scorer,
            Progress(sum(map(len, held_out.values())), title="evaluation", unit="problem") as progress,
        ):
            sampler = experiment.evaluation_sampler(rollout, scorer)
            for name, problems in held_out.items():
                for start in range(0, len(problems), _PER_CALL):
                    by_set[name] += sampler(problems[start : start + _PER_CALL], step=step)
                    done += len(problems[start : start + _PER_CALL])
                    accuracy = float(np.mean([g.accuracy.mean() for g in by_set[name]]))
                    progress.update(done, {"accuracy": accuracy})
    finally:
        rollout.close()
    return by_set


def write_completions(file: Path, by_set: dict[str, list[Group]]) -> None:
    """One JSON object per completion."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        for name, group in ((name, group) for name, groups in by_set.items() for group in groups):
            for i, completion in enumerate(group.completions):
                record = {
                    "set": name,
                    "prompt_id": group.problem.prompt_id,
                    "index": i,
                    "prompt": group.problem.prompt,
                    "completion": group.texts[i],
                    "answer": group.problem.answer,
                    "correct": bool(group.accuracy[i] > 0.5),
                    "reward": float(group.rewards[i]),
                    "tokens": len(completion.tokens),
                    "finish_reason": completion.finish_reason,
                }
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
    partial.replace(file)


def scores_table(groups: list[Group], title: str) -> Table:
    """Mean@k, pass@1, 2, 4, … k and maj@k with standard errors and 95 % intervals."""
    correct = [g.accuracy > 0.5 for g in groups]
    k = len(correct[0])
    scores = {f"Mean@{k}": statistics.mean_at_k(correct)}
    scores |= {f"pass@{n}": statistics.pass_at_k(correct, n) for n in _powers_of_two(k)}
    scores[f"maj@{k}"] = statistics.maj_at_k([g.texts for g in groups], correct)
    table = Table("", "score", "standard error", "95 % interval", title=title)
    for name, by_problem in scores.items():
        e = statistics.estimate(by_problem)
        table.add_row(name, f"{e.value:.4f}", f"{e.standard_error:.4f}", f"{e.low:.4f} – {e.high:.4f}")
    lengths = [len(c.tokens) for g in groups for c in g.completions]
    reasons = [c.finish_reason for g in groups for c in g.completions]
    for name, value in statistics.length_statistics(lengths, reasons).items():
        table.add_row(name, f"{value:.4g}", "", "")
    return table


def _powers_of_two(k: int) -> list[int]:
    powers = [2**i for i in range(k.bit_length()) if 2**i < k]
    return [*powers, k]


if __name__ == "__main__":
    command_line.run(main, __doc__)
