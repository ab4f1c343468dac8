"""Scores of a model from k completions of each problem, with their uncertainty.

Problems are the units of sampling. The k completions of one problem are not k independent facts, so every standard
error and interval here counts a problem, with all its completions, as one draw. There are P problems; problem p has n_p
completions.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A score in [0, 1]: its mean over problems, standard error clustered by problem, and bootstrap interval.

    The standard error is nan for a single problem.
    """

    value: float
    standard_error: float
    low: float
    high: float


def mean_at_k(correct: Sequence[ArrayLike]) -> np.ndarray:
    """Accuracy of each problem, (1/n_p) Σ_i correct_pi: f64[P]. Its mean is Mean@k, the paper's headline number.

    Args:
      correct: P sequences of n_p verdicts, 1 or 0.

    Raises:
      ValueError: no problem, or a problem without completions.
    """
    return np.array([np.mean(verdicts) for verdicts in _checked(correct)])


def pass_at_k(correct: Sequence[ArrayLike], k: int) -> np.ndarray:
    """Probability that at least one of k completions is correct: 1 - C(n - c, k) / C(n, k), f64[P].

    c of a problem's n completions are correct. The estimate is unbiased for any k <= n. Drawing k of the n with
    replacement, or 1 - (1 - c/n)**k, would be biased.

    Raises:
      ValueError: k below 1 or above the completions of some problem.

    Source: arXiv:2107.03374 eq. 1.
    """
    estimates = []
    for p, verdicts in enumerate(_checked(correct)):
        n, c = len(verdicts), int(np.sum(verdicts))
        if not 1 <= k <= n:
            raise ValueError(f"pass@{k} needs k in [1, {n}], the completions of problem {p}")
        # C(n-c, k) / C(n, k) = Π_{i=n-c+1..n} (1 - k/i), without the large binomials.
        estimates.append(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)) if n - c >= k else 1.0)
    return np.array(estimates)


def maj_at_k(answers: Sequence[Sequence[Hashable]], correct: Sequence[ArrayLike], k: int | None = None) -> np.ndarray:
    """Accuracy of the most frequent answer among k completions, f64[P].

    A tie counts as a uniformly random choice: its score is the fraction of the tied answers that is correct. None means
    that no answer was found; it does not vote. Without any vote the answer is wrong. If k is below n_p, completions
    vote in disjoint groups of k, in the order sampled; the score is the average over groups, and the remainder is not
    used.

    Args:
      answers: P sequences of n_p answers or None. Normalise them first: only equal answers count as one.
      correct: P sequences of n_p verdicts. If equal answers have different verdicts, their mean counts.
      k: completions that vote; None means all completions of a problem.

    Raises:
      ValueError: shapes that differ, or k below 1 or above the completions of some problem.
    """
    if len(answers) != len(correct):
        raise ValueError(f"got answers for {len(answers)} problems but verdicts for {len(correct)}")
    estimates = []
    for p, (given, verdicts) in enumerate(zip(answers, _checked(correct), strict=True)):
        size = len(verdicts) if k is None else k
        if len(given) != len(verdicts) or not 1 <= size <= len(verdicts):
            raise ValueError(f"problem {p}: {len(given)} answers, {len(verdicts)} verdicts, k={size}")
        starts = range(0, len(given) - size + 1, size)
        estimates.append(np.mean([_majority(given[i : i + size], verdicts[i : i + size]) for i in starts]))
    return np.array(estimates)


def clustered_standard_error(by_problem: ArrayLike) -> float:
    """Standard error of the mean over problems, sqrt(Σ_p (x_p - x̄)² / (P (P - 1))); nan for one problem.

    If all problems have equally many completions, this is the clustered standard error of arXiv:2411.00640, times
    sqrt(P/(P - 1)), the correction for few clusters.
    """
    values = np.asarray(by_problem, np.float64)
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def bootstrap_interval(
    by_problem: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over problems, from `resamples` draws of P problems with replacement.

    Raises:
      ValueError: a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    values = np.asarray(by_problem, np.float64)
    counts = np.random.default_rng(seed).multinomial(len(values), np.full(len(values), 1 / len(values)), resamples)
    tail = (1 - level) / 2
    low, high = np.quantile(counts @ values / len(values), [tail, 1 - tail])
    return float(low), float(high)


def estimate(by_problem: ArrayLike, *, level: float = 0.95, seed: int = 0) -> Estimate:
    """Mean over problems of a per-problem score, with its clustered standard error and bootstrap interval."""
    low, high = bootstrap_interval(by_problem, level=level, seed=seed)
    return Estimate(float(np.asarray(by_problem).mean()), clustered_standard_error(by_problem), low, high)


def length_statistics(lengths: ArrayLike, finish_reasons: Sequence[str]) -> dict[str, float]:
    """Tokens of the completions (mean, median, 95 % quantile, longest) and the fraction that a limit ended."""
    lengths = np.asarray(lengths)
    if len(lengths) != len(finish_reasons) or len(lengths) == 0:
        raise ValueError(f"{len(lengths)} lengths and {len(finish_reasons)} finish reasons: give one of each, or more")
    return {
        "length_mean": float(lengths.mean()),
        "length_median": float(np.median(lengths)),
        "length_q95": float(np.quantile(lengths, 0.95)),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([reason != "stop" for reason in finish_reasons])),
    }


def _majority(answers: Sequence[Hashable], verdicts: np.ndarray) -> float:
    votes = collections.Counter(answer for answer in answers if answer is not None)
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
