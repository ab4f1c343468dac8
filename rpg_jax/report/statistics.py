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
    """A score in [0, 1]: its mean over problems, standard error clustered by problem, and 95 % interval.

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


def interval(by_problem: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % confidence interval of the mean score of all problems like these P: f64[...], f64[...], in [0, 1].

    With the mean m and the sum of squares S = Σ_p (x_p − m)²,
      D = (S + 1) / (P m (1 − m) + 1), the variance between problems as a share of that of verdicts 0 and 1,
      N = P / D, the verdicts that know as much as these problems, from P up to P k,
      c = (N m + 2) / (N + 4),
      c ± t · sqrt(c (1 − c) / (N + 3)), t the 0.975 quantile of Student's t with P + 3 degrees of freedom.
    It is the usual interval of a mean after two right and two wrong verdicts are added. They are the 1 in D, and the 2
    and the 4 in c. So problems that are all right do not make an interval without width. What is outside [0, 1] is cut
    off, which loses no coverage.

    Where k = 1, N = P and the interval holds Wilson's. It covers at least 94 %, by exact sums over 1 to 1000 problems
    and means of 2 to 98 %; Wilson's covers 89 % where 4 % of 14 problems are right. For k > 1, and for pass@k, it
    covers at least 93 %, by simulation over rates that differ between problems. The tests have both.

    Args:
      by_problem: f64[..., P], scores in [0, 1].

    Raises:
      ValueError: no problem, or a score outside [0, 1].

    Source: Agresti and Coull 1998 (four verdicts more); Kish 1965 (N and D, the design effect); Korn and Graubard 1998
    (both together). They add nothing to D.
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


def estimate(by_problem: ArrayLike) -> Estimate:
    """Mean over problems of a score in [0, 1], f64[P], with its clustered standard error and `interval`."""
    low, high = interval(by_problem)
    return Estimate(float(np.asarray(by_problem).mean()), clustered_standard_error(by_problem), float(low), float(high))


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
