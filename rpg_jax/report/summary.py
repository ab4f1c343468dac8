"""Writes `summary.md`, the page that a run leaves: scores, work, settings, files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import Record, Run, series
from rpg_jax.report.screen import code, prose
from rpg_jax.report.tables import markdown_table
from rpg_jax.storage import write_atomically

HIGHLIGHTS = (  # config field, name in the table
    ("method", "method"),
    ("task.name", "task"),
    ("model.size", "model"),
    ("model.path", "weights"),
    ("seed", "seed"),
    ("train.steps", "steps"),
    ("rollout.prompts_per_step", "prompts per step"),
    ("rollout.group_size", "completions per prompt"),
    ("train.updates_per_step", "updates per step"),
    ("rollout.max_tokens", "tokens per completion, at most"),
    ("loss.name", "loss"),
    ("loss.arguments", "hyperparameters of the loss"),
    ("loss.kl_coef", "KL coefficient β"),
    ("loss.advantage", "advantage"),
    ("reference.rule", "reference"),
    ("optimizer.name", "optimizer"),
    ("optimizer.learning_rate", "learning rate"),
)
SUPERVISED = (  # the same of a run on demonstrations
    ("task.train", "demonstrations"),
    ("warm_start.train", "demonstrations"),
    ("model.path", "weights"),
    ("warm_start.seed", "seed"),
    ("warm_start.epochs", "passes"),
    ("warm_start.batch_size", "rows of an update"),
    ("rollout.max_tokens", "tokens per completion, at most"),
    ("optimizer.name", "optimizer"),
    ("optimizer.learning_rate", "learning rate"),
    ("warm_start.schedule", "schedule"),
)
FILES = (
    ("curves.png", "the training dynamics"),
    ("metrics.jsonl", "all metrics of every step and of every evaluation"),
    ("samples.jsonl", "prompts, completions and their rewards"),
    ("rollouts", "the numbers of every token, for some steps; `python -m rpg_jax.report` shows them"),
    ("report.html", "the page that shows rollouts and compares runs"),
    ("config.json", "the resolved configuration"),
    ("versions.json", "package versions and commit"),
    ("base", "the weights that are frozen beside adapters"),
    ("checkpoints", "weights and training state; the same command continues from here"),
)


def write_summary(run: Run) -> Path:
    """Writes `summary.md` into the folder that a run was read from, and returns its path."""
    assert run.folder is not None
    path = run.folder / "summary.md"
    write_atomically(path, summary_of(run))
    return path


def summary_of(run: Run) -> str:
    """The text of `summary.md`, in Markdown, of a run that was read from its folder."""
    assert run.folder is not None
    sections = [
        f"# {prose(run.name)}",
        _scores(run.evaluations),
        _work(run.records),
        _settings(run),
        _files(run.folder),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def closing_message(run: Run) -> str:
    """The last lines that a run prints: the first and the last held-out loss, the first and the last accuracy on each
    held-out set, and the paths of curves.png and summary.md; each line only if the run has it, so maybe ""."""
    assert run.folder is not None
    lines = []
    if losses := series(run.records, "held_out_nll")[1]:
        lines.append(f"held-out loss: {losses[0]:.3f} → {losses[-1]:.3f} nats per token")
    for name, scores in run.evaluations.items():
        first, last = scores[0], scores[-1]
        start = f"{first['mean_at_k']:.3f} (step {first['step']}) → " if first is not last else ""
        lines.append(f"{name} accuracy: {start}{last['mean_at_k']:.3f} (step {last['step']})")
    for name, note in (*FILES[:1], ("summary.md", "summary")):
        if (run.folder / name).exists():
            lines.append(f"{note}: {run.folder / name}")
    return "\n".join(lines)


def _scores(by_set: Mapping[str, list[dict[str, Any]]]) -> str:
    """A table with two rows for each set: Last, the last evaluation, and Best, the evaluation with the highest Mean@k;
    a sentence if there is no evaluation."""
    if not by_set:
        return "No evaluation yet."
    rows = []
    for name, scores in by_set.items():
        best = max(scores, key=lambda score: score["mean_at_k"])
        for label, score in (("Last", scores[-1]), ("Best", best)):
            values = map(score.get, ("mean_at_k", "standard_error", "pass_at_k", "maj_at_k"))
            shown = ["–" if value is None else f"{value:.4f}" for value in values]
            rows.append((prose(name), label, score["step"], score.get("k", "–"), *shown))
    head = ("set", "", "step", "k", "Mean@k", "standard error", "pass@k", "maj@k")
    return f"## Scores\n\n{markdown_table(head, rows)}"


def _work(records: Sequence[Record]) -> str:
    if not records:
        return "No step was finished."
    rows = [("steps", f"{records[-1]['step']}")]
    timed = [r for r in records if "seconds" in r and "tokens_per_second" in r]
    if timed:
        seconds = sum(r["seconds"] for r in timed)
        tokens = sum(r["seconds"] * r["tokens_per_second"] for r in timed)
        rows.append(("time in steps", duration(seconds)))
        rows.append(("completion tokens", f"{tokens:,.0f}"))
        rows.append(("completion tokens per second", f"{tokens / seconds:,.0f}"))
    if gaps := series(records, "sampler_gap_max")[1]:
        rows.append(("largest sampler–trainer gap", f"{max(gaps):.1e} nats"))
    if skipped := series(records, "skipped_updates")[1]:
        rows.append(("updates skipped as not finite", f"{skipped[-1]:.0f}"))
    return f"## Work\n\n{markdown_table(('', ''), rows)}"


def _settings(run: Run) -> str:
    supervised = run.method == "supervised"
    config, fields = run.config, SUPERVISED if supervised else HIGHLIGHTS
    rows = [("begun from", code(run.parent))] if run.parent else []
    rows += [(name, code(config[field])) for field, name in fields if config.get(field) is not None]
    rank, alpha, targets = (config.get(f"model.lora.{name}") for name in ("rank", "alpha", "targets"))
    if rank and not supervised:
        rows.append(("adapters", f"`rank {rank}, alpha {alpha:g}, {targets}`"))
    return f"## Settings\n\n{markdown_table(('', ''), rows)}" if rows else ""


def _files(run_dir: Path) -> str:
    present = [(f"[{name}]({name})", note) for name, note in FILES if (run_dir / name).exists()]
    return f"## Files\n\n{markdown_table(('', ''), present)}" if present else ""
