"""Turns the records of an evaluation, one for each completion, into scores and tables."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax.report import statistics
from rpg_jax.report.markdown import table
from rpg_jax.rewards.verdicts import CHANCE


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of one set, JSON-able. The completions of a problem count in the order of the records.

    Mean@k, unbiased pass@1, 2, 4, … k and maj@k, each with its standard error clustered by problem and its
    interval of 95 % (`statistics.interval`); mean reward; lengths in tokens; verdicts by kind; one row for each
    problem. Where problems have different numbers of completions, pass@k goes up to the smallest number; Mean and maj
    take all completions.
    """
    correct, answers, problems = _columns(records)
    counts = sorted({len(rows) for rows in problems})
    label = str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    mean, majority = statistics.mean_at_k(correct), statistics.maj_at_k(answers, correct)
    by_problem = {f"Mean@{label}": mean}
    by_problem |= {f"pass@{n}": statistics.pass_at_k(correct, n) for n in _powers_of_two(counts[0])}
    by_problem[f"maj@{label}"] = majority
    lengths = [r["tokens"] for r in records]
    return {
        "problems": len(problems),
        "completions": len(records),
        "k": counts[0] if len(counts) == 1 else counts,
        "scores": {name: _estimate(values) for name, values in by_problem.items()},
        "reward": float(np.mean([r["reward"] for r in records])),
        "lengths": statistics.length_statistics(lengths, [r["finish_reason"] for r in records]),
        "verdicts": dict(sorted(Counter(r["verdict"] for r in records).items())),
        "without_answer": sum(a is None for given in answers for a in given),
        "by_problem": [
            {
                "prompt_id": rows[0]["prompt_id"],
                "reference": rows[0]["reference"],
                "completions": len(rows),
                "right": sum(verdicts),
                "most_frequent": _most_frequent(given),
                "majority": float(vote),
                "mean_tokens": float(np.mean([r["tokens"] for r in rows])),
                "truncated": sum(r["finish_reason"] != "stop" for r in rows),
            }
            for rows, verdicts, given, vote in zip(problems, correct, answers, majority, strict=True)
        ],
    }


def metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics that training logs for a held-out set with k completions of each problem.

    Mean@k with its standard error over problems, pass@1, 2, 4, … k, maj@k, k, mean reward, mean tokens, the share that
    a limit ended, the number that lack a verdict and count as wrong; of conversations the mean number of turns and the
    share that a failure of the environment ended.
    """
    correct, answers, _ = _columns(records)
    mean, k = statistics.mean_at_k(correct), len(correct[0])
    return {f"pass@{n}": float(statistics.pass_at_k(correct, n).mean()) for n in _powers_of_two(k)} | {
        "mean_at_k": float(mean.mean()),
        "standard_error": statistics.clustered_standard_error(mean),
        "pass_at_k": float(statistics.pass_at_k(correct, k).mean()),
        "maj_at_k": float(statistics.maj_at_k(answers, correct).mean()),
        "k": k,
        "no_verdict": sum(r["verdict"] in CHANCE for r in records),
        "reward": float(np.mean([r["reward"] for r in records])),
        "completion_length": float(np.mean([r["tokens"] for r in records])),
        "truncated": float(np.mean([r["finish_reason"] != "stop" for r in records])),
        **_of_conversations([r["turns"] for r in records if "turns" in r]),
    }


def without_verdict(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A line for people on the completions of the set `name` that lack a verdict; "" if none does."""
    kinds = Counter(r["verdict"] for r in records if r["verdict"] in CHANCE)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    said = (
        f"note: {kinds.total()} of {len(records)} completions of {name} have no verdict and count as wrong ({counted})"
    )
    return said if kinds else ""


def _of_conversations(played: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not played:
        return {}
    failed = [turns["error"] is not None for turns in played]
    return {"turns": float(np.mean([len(turns["rewards"]) for turns in played])), "failed": float(np.mean(failed))}


def one_row_a_set(by_set: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table that fits a screen: Mean@k of every set with its error, and of several completions pass@k and maj@k.

    Its header comes first.
    """
    labels = {next(iter(summary["scores"])).partition("@")[2] for summary in by_set.values()}
    label = labels.pop() if len(labels) == 1 else "k"
    several = [f"pass@{label}", f"maj@{label}"] if label != "1" else []
    lines = [["set", "problems", f"Mean@{label}", "standard error", "95 % interval", *several]]
    for name, summary in by_set.items():
        found = list(summary["scores"].items())
        head = [name, str(summary["problems"]), *_shown(found[0][1])]
        lines.append(head + [f"{e['value']:.4f}" for _, e in found[-2:]][: len(several)])
    return lines


def overview(by_set: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table of all sets, with a row for each score; its header comes first. With k = 1 all scores are one."""
    lines = [["set", "problems", "score", "value", "standard error", "95 % interval"]]
    for name, summary in by_set.items():
        for score, e in list(summary["scores"].items())[: 1 if summary["k"] == 1 else None]:
            lines.append([name, str(summary["problems"]), score, *_shown(e)])
    return lines


def markdown(title: str, settings: Mapping[str, Any], by_set: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of an evaluation: all scores, then lengths, verdicts and every problem of each set."""
    head, *rows = overview(by_set)
    parts = [f"# {title}", table(head, rows)]
    for name, summary in by_set.items():
        lengths, verdicts = summary["lengths"], summary["verdicts"]
        parts.append(f"## {name}")
        parts.append(
            f"{summary['completions']} completions; mean reward {summary['reward']:.4f}; "
            f"tokens: mean {lengths['length_mean']:.1f}, median "
            f"{lengths['length_median']:.0f}, 95 % quantile {lengths['length_q95']:.0f}, longest "
            f"{lengths['length_max']:.0f}; {100 * lengths['truncated']:.1f} % cut off by the limit. Verdicts: "
            + ", ".join(f"{count} {kind}" for kind, count in verdicts.items())
            + f"; {summary['without_answer']} without an answer."
        )
        head = ["problem", "reference", "right", "most frequent answer", "maj", "mean tokens", "cut off"]
        rows = [
            [p["prompt_id"], p["reference"], f"{p['right']}/{p['completions']}", p["most_frequent"] or "–"]
            + [f"{p['majority']:.2f}", f"{p['mean_tokens']:.1f}", p["truncated"]]
            for p in summary["by_problem"]
        ]
        parts.append(table(head, rows))
    parts += ["## Settings", table(("", ""), [(name, f"`{value}`") for name, value in settings.items()])]
    return "\n\n".join(parts) + "\n"


def _columns(records: Sequence[Mapping[str, Any]]) -> tuple[list, list, list]:
    """Verdicts, answers and records by problem."""
    problems = [list(rows) for _, rows in itertools.groupby(records, key=lambda r: r["prompt_id"])]
    correct = [[r["verdict"] == "right" for r in rows] for rows in problems]
    return correct, [[r["answer"] for r in rows] for rows in problems], problems


def _estimate(by_problem: np.ndarray) -> dict[str, float | None]:
    e = statistics.estimate(by_problem)
    error = None if np.isnan(e.standard_error) else e.standard_error
    return {"value": e.value, "standard_error": error, "low": e.low, "high": e.high}


def _shown(estimate: Mapping[str, Any]) -> list[str]:
    """Value, standard error and interval of a score."""
    error = "–" if estimate["standard_error"] is None else f"{estimate['standard_error']:.4f}"
    return [f"{estimate['value']:.4f}", error, f"{estimate['low']:.4f} – {estimate['high']:.4f}"]


def _most_frequent(answers: Sequence[str | None]) -> str | None:
    votes = Counter(a for a in answers if a is not None)
    return min(votes, key=lambda a: (-votes[a], a)) if votes else None


def _powers_of_two(k: int) -> list[int]:
    return [*(2**i for i in range(k.bit_length()) if 2**i < k), k]
