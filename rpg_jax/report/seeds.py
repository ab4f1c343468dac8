"""Means over seeds with 95 % intervals, differences that are paired by seed, and ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

Values = Mapping[str, Mapping[int, float]]  # {row: {seed: value}}
SEEDS_TO_RANK = 3  # with two seeds the 95 % interval is 12.7 standard errors to either side


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over `seeds` seeds with its 95 % confidence interval, `value` ± `half`; `half` is nan for one seed."""

    value: float
    half: float
    seeds: int

    @property
    def margin(self) -> str:
        """The text " ± half", half of the 95 % interval with one decimal; "" if there is one seed."""
        return "" if math.isnan(self.half) else f" ± {self.half:.1f}"

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval. Always False for one seed."""
        return abs(self.value) > self.half

    def within(self, bound: float) -> bool:
        """Whether the whole interval lies in ± `bound`: then the difference is at most `bound`. False for one seed.

        State `bound` before the runs. An interval that merely contains 0 does not show that a difference is small."""
        return abs(self.value) + self.half <= bound


def mean(values: Sequence[float]) -> Mean:
    """The mean of n ≥ 1 values, one for each seed, with its interval from Student's t with n − 1 degrees of freedom."""
    from scipy import stats

    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Mean(float(x.mean()), math.nan, len(x))
    half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return Mean(float(x.mean()), float(half), len(x))


def paired_difference(row: Mapping[int, float], baseline: Mapping[int, float]) -> Mean:
    """The mean of row − baseline, each {seed: value}, over the seeds that both have, and the differences' interval.
    Raises ValueError if the two have no seed in common."""
    seeds = sorted(set(row) & set(baseline))
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(row)} and {sorted(baseline)}")
    return mean([row[seed] - baseline[seed] for seed in seeds])


def pooled(values: Values, rows: Sequence[str]) -> dict[int, float]:
    """{seed: mean over `rows`} of `values`, for the seeds that all of these rows have."""
    seeds = sorted(set.intersection(*(set(values[row]) for row in rows)))
    return {seed: float(np.mean([values[row][seed] for row in rows])) for seed in seeds}


def over_starts(values: Values, rows: Sequence[str], others: Sequence[str]) -> Mean:
    """The mean of row − other over starting weights: `rows` and `others` name one row of `values` for each start, in
    equal order. For each start, the differences are averaged over seeds first, since its runs are not independent. The
    result's `seeds` is the number of starts. Raises ValueError if the two rows of a start have no seed in common."""
    return mean([paired_difference(values[row], values[other]).value for row, other in zip(rows, others, strict=True)])


def tally(differences: Sequence[Mean]) -> str:
    """A sentence: how many intervals exclude 0, how many would by chance (1 in 20), how many differences are negative.
    Differences to one row share its runs, so their signs are not independent. A difference of one seed does not count;
    "" if fewer than two differences count."""
    known = [d for d in differences if d.seeds > 1]
    if len(known) < 2:
        return ""
    found, negative = sum(d.excludes_zero for d in known), sum(d.value < 0 for d in known)
    return (
        f"{found} of {len(known)} intervals exclude 0, where chance alone gives {len(known) / 20:.1f} on average; "
        f"{negative} of {len(known)} differences are negative."
    )


def ranks_of(means: Sequence[Mean]) -> list[int]:
    """The rank of each mean: 1 for the largest, 2 for the next smaller. Means equal to 9 decimals share a rank. [] if
    there are fewer than two, or one is over fewer than 3 seeds."""
    if len(means) < 2 or any(m.seeds < SEEDS_TO_RANK for m in means):
        return []
    values = [round(m.value, 9) for m in means]
    distinct = sorted(set(values), reverse=True)
    return [distinct.index(value) + 1 for value in values]
