"""Describes the training of a table's runs: dynamics, completions generated, the critic."""

import math
from collections.abc import Mapping

from rpg_jax.report import markdown
from rpg_jax.report.seeds import Mean, mean, over_starts, paired_difference, pooled, tally
from rpg_jax.reproduction.results import DYNAMICS, Rows, Run
from rpg_jax.reproduction.table import Table

ROUNDING = 5e-5  # of a shown number


def training_table(table: Table, rows: Rows) -> list[str]:
    """Paragraphs and a table: metrics over the last third of the steps, and completions generated.

    The difference in training accuracy to the compared row is paired by seed. Training accuracy averages many more
    completions than held-out accuracy: it has far less noise.
    """
    dynamics = {
        title: (key, scale)
        for title, (key, scale) in DYNAMICS.items()
        if any(_late(by_seed, key, scale) != "–" for by_seed in rows.values())
    }
    heads = [*dynamics, "KL to the reference, millinats per token", "Completions generated", "difference in accuracy"]
    accuracy = {row: {seed: 100 * c.late("accuracy") for seed, c in by_seed.items()} for row, by_seed in rows.items()}
    lines, critics = [], []
    for row, by_seed in rows.items():
        texts = [_late(by_seed, key, scale) for key, scale in dynamics.values()]
        texts += [_reference(by_seed), f"{_completions(by_seed):,.0f}"]
        lines.append([row, *texts, *difference(table, row, accuracy)])
        if (explained := _late(by_seed, "explained_variance")) != "–":
            critics.append(
                f"Critic of the row {row}: it explains {explained} of the variance of the returns; its mean value is "
                f"{_late(by_seed, 'value')}, the mean return {_late(by_seed, 'return')}."
            )
    return [
        "Means over the last third of the steps, ± as above. The difference in accuracy is paired by seed, in points.\n"
        "The number of completions generated counts all steps; it is a cost.",
        "The KL to the behaviour policy is KL(π_old‖π_θ), the mean of log π_old/π_θ; the KL to the reference is "
        "KL(π_old‖π_ref), the mean of log π_old/π_ref.\n"
        "Both are means over the trained tokens, which π_old sampled. Dynamic sampling trains mixed groups only.",
        "The reference stands in brackets; KLs to different references cannot be compared. initial: the policy at the "
        "start of the run; every K: the policy after the last multiple of K steps or updates;\n"
        "κ: the policy at the end of the last step in which the average passed κ nats; –: the behaviour policy itself.",
        markdown.table(["", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads))),
        *all_differences(table, {"training accuracy": accuracy}),
        *critics,
    ]


def all_differences(table: Table, columns: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """Paragraphs on the differences of {column: {row: {seed: points}}} to the compared rows: the tally of all columns,
    and the mean of rows that are one algorithm."""
    differences = []
    for values in columns.values():
        for row, by_seed in values.items():
            others = values.get(table.compared_with(row), {})
            if row != table.compared_with(row) and by_seed.keys() & others.keys():
                differences.append(paired_difference(by_seed, others))
    parts = [tally(differences)] if len(differences) > 1 else []
    for name, rows in table.pooled.items():
        if all({*rows, table.baseline} <= values.keys() for values in columns.values()):
            found = [
                f"{column} {starred(paired_difference(pooled(values, rows), values[table.baseline]))}"
                for column, values in columns.items()
            ]
            parts.append(
                f"Of {name}, which are one algorithm here, differences from each other are noise. Their mean minus "
                f"{table.baseline}: {', '.join(found)}."
            )
    for name, rows in table.starts.items():
        compared = [table.compared_with(row) for row in rows]
        if compared != list(rows) and all({*rows, *compared} <= values.keys() for values in columns.values()):
            found = [f"{column} {starred(over_starts(v, rows, compared))}" for column, v in columns.items()]
            parts.append(f"Over {len(rows)} starts, each the mean of its seeds, {name}: {', '.join(found)}.")
    return parts


def _completions(by_seed: Mapping[int, Run]) -> float:
    """Completions of a run, the mean over seeds."""
    return sum(run.completions()[-1] for run in by_seed.values()) / len(by_seed)


def _reference(by_seed: Mapping[int, Run]) -> str:
    """KL(π_old‖π_ref) in millinats per token, and the name of π_ref.

    It is the sum of two metrics: the mean of log π_θ/π_ref and the mean of log π_old/π_θ.
    """
    anchor = next(iter(by_seed.values())).reference()
    values = [1000 * (run.late("kl_k1") + run.late("behaviour_forward_kl_k1")) for run in by_seed.values()]
    return f"{significant(mean(values))} ({anchor})" if anchor else "–"


def _late(by_seed: Mapping[int, Run], metric: str, scale: float = 1) -> str:
    values = [scale * run.late(metric) for run in by_seed.values()]
    return "–" if math.isnan(sum(values)) else significant(mean(values))


def difference(table: Table, row: str, values: Mapping[str, Mapping[int, float]]) -> tuple[str, str]:
    """`values` of a row minus those of the compared row, paired by seed; and the name of the compared row."""
    other = table.compared_with(row)
    mine, theirs = values.get(row, {}), values.get(other, {})
    if row == other or not mine.keys() & theirs.keys():
        return "–", "–"
    return starred(paired_difference(mine, theirs)), other


def starred(points: Mean) -> str:
    """A difference in points, in italics if its interval excludes 0."""
    text = f"{points.value:+.1f}{points.margin}"
    return f"*{text}*" if points.excludes_zero else text


def significant(m: Mean) -> str:
    """A mean with as many decimals as give the interval two digits; 0 if only rounding keeps it from 0."""
    if abs(m.value) < ROUNDING and not m.half >= ROUNDING:
        return "0"
    if not m.half > 1e-9 * abs(m.value):  # one seed, or equal numbers up to rounding
        return f"{m.value:.3g}"
    decimals = max(0, 1 - math.floor(math.log10(m.half)))
    return f"{m.value:.{decimals}f} ± {m.half:.{decimals}f}"
