"""Scores of a model from k completions of each problem, with their uncertainty, and the tables of an evaluation.

Problems are the units of sampling. The k completions of one problem are not k independent facts, so every standard
error and interval here counts a problem, with all its completions, as one draw.

A record of an evaluation is a dict of one completion: prompt_id, reference (the right answer), verdict ("right", or
another kind), answer (a text or None), reward, tokens (their number), finish_reason ("stop", or what cut it off), and
turns of a conversation. The records of one problem stand together.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rpg_jax.report.screen import code, prose
from rpg_jax.report.tables import markdown_table
from rpg_jax.rewards.verdicts import CHANCE


def mean_at_k(correct: Sequence[ArrayLike]) -> np.ndarray:
    """Accuracy of each of P problems, (1/n_p) Σ_i correct_pi: f64[P]. Its mean is Mean@k, the paper's headline number.
    `correct` has P sequences: of problem p a verdict, 1 or 0, for each of n_p completions. Raises ValueError if there
    is no problem, if a problem has no verdict, or if a verdict is not 0 or 1."""
    return np.array([np.mean(verdicts) for verdicts in _checked(correct)])


def pass_at_k(correct: Sequence[ArrayLike], k: int) -> np.ndarray:
    """Probability that at least one of k completions is correct: 1 - C(n - c, k) / C(n, k) for each problem, f64[P].

    c of a problem's n completions are correct. The estimate is unbiased for any k <= n. Drawing k of the n with
    replacement, or 1 - (1 - c/n)**k, would be biased. `correct` has, for each of P problems, its n verdicts 1 or 0.

    Raises ValueError if k is not in [1, n] for some problem, and as `mean_at_k`. Source: arXiv:2107.03374 eq. 1.
    """
    estimates = []
    for p, verdicts in enumerate(_checked(correct)):
        n, c = len(verdicts), int(np.sum(verdicts))
        if not 1 <= k <= n:
            raise ValueError(f"pass@{k} needs k in [1, {n}], the completions of problem {p}")
        # C(n-c, k) / C(n, k) = Π_{i=n-c+1..n} (1 - k/i), without the large binomials.
        estimates.append(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) if n - c >= k else 1.0)
    return np.array(estimates)


def maj_at_k(answers: Sequence[Sequence[Hashable]], correct: Sequence[ArrayLike]) -> np.ndarray:
    """Accuracy of the most frequent answer among the completions of each problem, f64[P].

    A tie counts as a uniformly random choice: its score is the fraction of the tied answers that is correct. None means
    that no answer was found, and does not vote. Without any vote the score is 0.

    Args:
      answers: P sequences of n_p answers or None. Normalise the answers first: only equal texts count as one answer.
      correct: P sequences of n_p verdicts, 1 or 0. If equal answers have different verdicts, their mean counts.

    Raises ValueError if the shapes differ, a problem or its completion is missing, or a verdict is not 0 or 1.
    """
    if len(answers) != len(correct):
        raise ValueError(f"got answers for {len(answers)} problems but verdicts for {len(correct)}")
    estimates = []
    for p, (given, verdicts) in enumerate(zip(answers, _checked(correct), strict=True)):
        if len(given) != len(verdicts):
            raise ValueError(f"problem {p}: {len(given)} answers, {len(verdicts)} verdicts")
        estimates.append(_majority(given, verdicts))
    return np.array(estimates)


def clustered_standard_error(by_problem: ArrayLike) -> float:
    """Standard error of the mean of the scores f64[P] of P problems, sqrt(Σ_p (x_p - x̄)² / (P (P - 1))); nan if P < 2.

    If all problems have equally many completions, this is the clustered standard error of arXiv:2411.00640, times
    sqrt(P/(P - 1)), the correction for few clusters.
    """
    values = np.asarray(by_problem, np.float64)
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def interval(by_problem: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of the 95 % confidence interval of the mean score of all problems like these P, f64[...] in [0, 1].

    With the mean m and the sum of squares S = Σ_p (x_p − m)²,
      D = (S + 1) / (P m (1 − m) + 1), the variance between problems as a share of that of verdicts 0 and 1,
      N = P / D, independent verdicts with as much information: at least P, about P k if all are alike,
      c = (N m + 2) / (N + 4),
      c ± t · sqrt(c (1 − c) / (N + 3)), t the 0.975 quantile of Student's t with P + 3 degrees of freedom.
    This is the usual interval of a mean after two right and two wrong verdicts are added: the 1 in D, and the 2 and the
    4 in c. So the interval has a width even if all problems are right. The part outside [0, 1] is cut off.

    For k = 1, N = P and the interval contains Wilson's. Then it covers at least 94 %, by exact sums over 1 to 1000
    problems and means of 2 to 98 %. For k > 1 and for pass@k it covers at least 93 %, by simulation (tests).

    `by_problem` is f64[..., P], scores in [0, 1]. Raises ValueError if P is 0, or a score is outside [0, 1].

    Source: Agresti and Coull 1998 (four verdicts more); Kish 1965 (N and D, the design effect); Korn and Graubard 1998
    (both together). These sources add nothing to D.
    """
    from scipy import stats

    values = np.asarray(by_problem, np.float64)
    problems = values.shape[-1]
    if problems == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("an interval needs at least one problem, and scores in [0, 1]: pass accuracies, not rewards")
    mean = values.mean(-1)
    design = (problems * values.var(-1) + 1) / (problems * mean * (1 - mean) + 1)
    size = problems / design
    centre = (size * mean + 2) / (size + 4)
    half = stats.t.ppf(0.975, problems + 3) * np.sqrt(centre * (1 - centre) / (size + 3))
    return np.maximum(centre - half, 0.0), np.minimum(centre + half, 1.0)


def estimate(by_problem: ArrayLike) -> dict[str, float | None]:
    """A score in [0, 1] from the scores f64[P] of its problems, as JSON can hold it: {"value": the mean over problems,
    "standard_error": of this mean, None for a single problem, "low" and "high": the ends of its 95 % `interval`}.
    Raises ValueError if there is no problem, or a score is outside [0, 1]."""
    low, high = interval(by_problem)
    error = clustered_standard_error(by_problem)
    value, known = float(np.asarray(by_problem).mean()), None if np.isnan(error) else error
    return {"value": value, "standard_error": known, "low": float(low), "high": float(high)}


def _majority(answers: Sequence[Hashable], verdicts: np.ndarray) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    return float(np.mean([np.mean([v for a, v in zip(answers, verdicts, strict=True) if a == w]) for w in tied]))


def _checked(correct: Sequence[ArrayLike]) -> list[np.ndarray]:
    problems = [np.asarray(verdicts, np.float64) for verdicts in correct]
    if not problems or any(v.ndim != 1 or len(v) == 0 for v in problems):
        raise ValueError("need at least one problem, and at least one verdict for each")
    if any(((v != 0) & (v != 1)).any() for v in problems):
        raise ValueError("verdicts must be 0 or 1: pass accuracies, not rewards")
    return problems


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a held-out set from its records (as at the top of this file), as JSON can hold them: {"scores":
    {"Mean@4": {value, standard_error, low, high}, …}, …}, with Mean@k, unbiased pass@1, 2, 4, … k and maj@k. Beside
    "scores" are problems and completions (numbers), k (a list if problems differ), reward (the mean), lengths
    (length_mean, length_median, length_q95 and length_max in tokens, and truncated, the share that a limit cut off),
    verdicts (numbers by kind), without_answer (a number), by_problem (a dict for each). If problems have different
    numbers of completions, pass@k goes up to the smallest number; Mean and maj take all completions. There must be at
    least one record."""
    correct, answers, problems = _columns(records)
    lengths = np.array([r["tokens"] for r in records])
    counts = sorted({len(rows) for rows in problems})
    label = str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    mean, majority = mean_at_k(correct), maj_at_k(answers, correct)
    by_problem = {f"Mean@{label}": mean}
    by_problem |= {f"pass@{n}": pass_at_k(correct, n) for n in _powers_of_two(counts[0])}
    by_problem[f"maj@{label}"] = majority
    return {
        "problems": len(problems),
        "completions": len(records),
        "k": counts[0] if len(counts) == 1 else counts,
        "scores": {name: estimate(values) for name, values in by_problem.items()},
        "reward": float(np.mean([r["reward"] for r in records])),
        "lengths": {
            "length_mean": float(lengths.mean()),
            "length_median": float(np.median(lengths)),
            "length_q95": float(np.quantile(lengths, 0.95)),
            "length_max": float(lengths.max()),
            "truncated": float(np.mean([r["finish_reason"] != "stop" for r in records])),
        },
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
    """The metrics that training logs for a held-out set, from the records of k completions of each problem: mean_at_k
    and its standard_error over problems (nan for one problem), pass@1, 2, 4, … k, pass_at_k, maj_at_k, k, mean reward,
    mean completion_length in tokens, truncated, the share that a limit cut off, and no_verdict, the number of verdicts
    in `CHANCE`, which count as wrong. For conversations also the mean number of turns, and failed, the share that the
    environment failed. Raises ValueError without a record."""
    correct, answers, _ = _columns(records)
    mean, k = mean_at_k(correct), len(correct[0])
    return {f"pass@{n}": float(pass_at_k(correct, n).mean()) for n in _powers_of_two(k)} | {
        "mean_at_k": float(mean.mean()),
        "standard_error": clustered_standard_error(mean),
        "pass_at_k": float(pass_at_k(correct, k).mean()),
        "maj_at_k": float(maj_at_k(answers, correct).mean()),
        "k": k,
        "no_verdict": sum(r["verdict"] in CHANCE for r in records),
        "reward": float(np.mean([r["reward"] for r in records])),
        "completion_length": float(np.mean([r["tokens"] for r in records])),
        "truncated": float(np.mean([r["finish_reason"] != "stop" for r in records])),
        **_of_conversations([r["turns"] for r in records if "turns" in r]),
    }


def without_verdict(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A line, without its line break, that counts by kind the records of the set `name` without a verdict. The
    kinds are those in `CHANCE`, such as "timeout". Returns "" if all records have a verdict."""
    kinds = Counter(r["verdict"] for r in records if r["verdict"] in CHANCE)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    said = f"{kinds.total()} of {len(records)} completions of {name} have no verdict and count as wrong ({counted})"
    return f"note: {said}" if kinds else ""


def _of_conversations(played: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not played:
        return {}
    failed = [turns["error"] is not None for turns in played]
    return {"turns": float(np.mean([len(turns["rewards"]) for turns in played])), "failed": float(np.mean(failed))}


def one_row_a_set(by_set: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table that fits a screen, as rows of texts: the header, then for each set its problems and Mean@k with
    standard error and interval; pass@k and maj@k if k > 1. `by_set` is {set: what `summarise` returns}."""
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
    """The header, then a row of texts for each score of {set: what `summarise` returns}; one score a set if k = 1."""
    lines = [["set", "problems", "score", "value", "standard error", "95 % interval"]]
    for name, summary in by_set.items():
        for score, e in list(summary["scores"].items())[: 1 if summary["k"] == 1 else None]:
            lines.append([name, str(summary["problems"]), score, *_shown(e)])
    return lines


def markdown(title: str, settings: Mapping[str, Any], by_set: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of an evaluation in Markdown: all scores; lengths, verdicts and every problem of each set; `settings`.
    `by_set` is {set: what `summarise` returns}. The page ends with a line break."""
    head, *rows = overview(by_set)
    parts = [f"# {prose(title)}", markdown_table(head, [[prose(row[0]), *row[1:]] for row in rows])]
    for name, summary in by_set.items():
        lengths, verdicts = summary["lengths"], summary["verdicts"]
        parts.append(f"## {prose(name)}")
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
            [
                p["prompt_id"],
                prose(p["reference"]),
                f"{p['right']}/{p['completions']}",
                prose(p["most_frequent"] or "–"),
            ]
            + [f"{p['majority']:.2f}", f"{p['mean_tokens']:.1f}", p["truncated"]]
            for p in summary["by_problem"]
        ]
        parts.append(markdown_table(head, rows))
    parts += ["## Settings", markdown_table(("", ""), [(name, code(value)) for name, value in settings.items()])]
    return "\n\n".join(parts) + "\n"


def _columns(records: Sequence[Mapping[str, Any]]) -> tuple[list, list, list]:
    """For each problem, in order, its verdicts as bools, its answers, and its records: three lists of lists."""
    problems = [list(rows) for _, rows in itertools.groupby(records, key=lambda r: r["prompt_id"])]
    correct = [[r["verdict"] == "right" for r in rows] for rows in problems]
    return correct, [[r["answer"] for r in rows] for rows in problems], problems


def _shown(estimate: Mapping[str, Any]) -> list[str]:
    """Value, standard error and interval of a score, as text."""
    error = "–" if estimate["standard_error"] is None else f"{estimate['standard_error']:.4f}"
    return [f"{estimate['value']:.4f}", error, f"{estimate['low']:.4f} – {estimate['high']:.4f}"]


def _most_frequent(answers: Sequence[str | None]) -> str | None:
    votes = Counter(a for a in answers if a is not None)
    return min(votes, key=lambda a: (-votes[a], a)) if votes else None


def _powers_of_two(k: int) -> list[int]:
    return [*(2**i for i in range(k.bit_length()) if 2**i < k), k]
