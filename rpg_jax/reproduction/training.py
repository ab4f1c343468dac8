"""Describes the training of a table's runs: dynamics, completions generated, the critic; rows at equal costs."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from rpg_jax.report.plots import TABLE_PANELS
from rpg_jax.report.run_files import Run
from rpg_jax.report.seeds import Mean, Values, mean, over_starts, paired_difference, pooled, tally
from rpg_jax.report.tables import markdown_table
from rpg_jax.reproduction.results import Rows
from rpg_jax.reproduction.tables import Table
from rpg_jax.training.reference import make_rule

ROUNDING = 5e-5  # of a shown number
AXES = ("updates", "completions", "seconds")  # of `Run.costs`
UNEQUAL = 0.05  # share of a row's cost: a larger difference counts. One more batch costs 1 to 2 %


def training_table(table: Table, rows: Rows) -> list[str]:
    """Paragraphs and a table in Markdown: a row's metrics over the last third of its steps, and completions generated.
    `rows` is {row: {seed: run}}; each row has a run. The difference in training accuracy to the compared row is paired
    by seed. Training accuracy averages many more completions than held-out accuracy: it has far less noise."""
    panels = [p for p in TABLE_PANELS if any(_late(by_seed, p.key, p.scale) != "–" for by_seed in rows.values())]
    heads = [*(f"{panel.title}, {panel.unit}" for panel in panels), "KL to the reference, millinats per token"]
    heads += ["Completions generated", "difference in accuracy"]
    accuracy = {row: {seed: 100 * c.late("accuracy") for seed, c in by_seed.items()} for row, by_seed in rows.items()}
    lines, critics = [], []
    for row, by_seed in rows.items():
        texts = [_late(by_seed, panel.key, panel.scale) for panel in panels]
        generated = fmean(run.spent("completions") for run in by_seed.values())
        texts += [_reference(by_seed), f"{generated:,.0f}"]
        gain = _difference(table, row, accuracy)
        lines.append([row, *texts, *((_starred(gain), table.compared_with(row)) if gain else ("–", "–"))])
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
        markdown_table(["", *heads, "compared with"], lines, numbers=range(1, 1 + len(heads))),
        *all_differences(table, {"training accuracy": accuracy}),
        *critics,
    ]


def all_differences(table: Table, columns: Mapping[str, Values]) -> list[str]:
    """Paragraphs on the differences to compared rows, paired by seed. `columns` is {column: {row: {seed: points}}}. The
    paragraphs count the intervals without 0, and give the mean of rows that are one algorithm (`table.pooled`) and the
    mean over starts (`table.starts`), both only of rows with a common seed. [] if there is nothing to say."""
    each = columns.values()
    differences = [d for values in each for row in values if (d := _difference(table, row, values))]
    parts = [text] if (text := tally(differences)) else []
    for name, rows in table.pooled.items():
        known = all({*rows, table.baseline} <= values.keys() for values in each)
        if known and all(pooled(values, rows).keys() & values[table.baseline].keys() for values in each):
            found = [
                f"{column} {_starred(paired_difference(pooled(values, rows), values[table.baseline]))}"
                for column, values in columns.items()
            ]
            parts.append(
                f"Of {name}, which are one algorithm here, differences from each other are noise. Their mean minus "
                f"{table.baseline}: {', '.join(found)}."
            )
    for name, rows in table.starts.items():
        compared = [table.compared_with(row) for row in rows]
        known = all({*rows, *compared} <= values.keys() for values in each)
        pairs = list(zip(rows, compared, strict=True))
        if compared != list(rows) and known and all(v[a].keys() & v[b].keys() for v in each for a, b in pairs):
            found = [f"{column} {_starred(over_starts(v, rows, compared))}" for column, v in columns.items()]
            parts.append(f"Over {len(rows)} starts, each the mean of its seeds, {name}: {', '.join(found)}.")
    return parts


def _reference(by_seed: Mapping[int, Run]) -> str:
    """KL(π_old‖π_ref) in millinats per token, and the name of π_ref; "–" if π_ref is the behaviour policy. The KL is
    the sum of two metrics: the mean of log π_θ/π_ref and the mean of log π_old/π_θ."""
    config = next(iter(by_seed.values())).config
    section = {k.removeprefix("reference."): v for k, v in config.items() if k.startswith("reference.")}
    anchor = make_rule(section).anchor()
    values = [1000 * (run.late("kl_k1") + run.late("behaviour_forward_kl_k1")) for run in by_seed.values()]
    return f"{significant(mean(values))} ({anchor})" if anchor else "–"


def _late(by_seed: Mapping[int, Run], metric: str, scale: float = 1) -> str:
    values = [scale * run.late(metric) for run in by_seed.values()]
    return "–" if math.isnan(sum(values)) else significant(mean(values))


def _difference(table: Table, row: str, values: Values) -> Mean | None:
    """The row's values minus the compared row's, paired by seed; None without another row or a common seed."""
    other = table.compared_with(row)
    mine, theirs = values.get(row, {}), values.get(other, {})
    return paired_difference(mine, theirs) if row != other and mine.keys() & theirs.keys() else None


def difference_table(table: Table, rows: Iterable[str], columns: Mapping[str, Values], corner: str = "") -> str:
    """A table in Markdown of differences to the compared rows, paired by seed, with 95 % intervals. `columns` is
    {column: {row: {seed: points}}}. Of `rows`, those with a difference have a line. `corner` heads the rows."""
    found = {row: [_difference(table, row, values) for values in columns.values()] for row in rows}
    shown = {row: own for row, own in found.items() if any(own)}
    lines = [[row, *(_starred(d) if d else "–" for d in own), table.compared_with(row)] for row, own in shown.items()]
    return markdown_table([corner, *columns, "compared with"], lines, numbers=range(1, 1 + len(columns)))


def _starred(points: Mean) -> str:
    """A difference in points as text, in italics if its interval excludes 0. No digit depends on a sum's order."""
    text = f"{round(points.value, 9) + 0.0:+.1f}{points.margin}"
    return f"*{text}*" if points.excludes_zero else text


def significant(m: Mean) -> str:
    """A mean as "12.3 ± 1.1", with two digits of the interval. One seed or equal seeds give three significant digits
    and no interval. A mean and an interval below 5e-5 give "0"."""
    if abs(m.value) < ROUNDING and not m.half >= ROUNDING:
        return "0"
    if not m.half > 1e-9 * abs(m.value):  # one seed, or equal numbers up to rounding
        return f"{m.value:.3g}"
    decimals = max(0, 1 - math.floor(math.log10(m.half)))
    return f"{m.value:.{decimals}f} ± {m.half:.{decimals}f}"


def equal_cost(table: Table, rows: Rows) -> list[str]:
    """Paragraphs, and a table of the differences in training accuracy at equal updates, completions and seconds. `rows`
    is {row: {seed: run}}; runs that have not ended are left out. [] if none has ended or costs differ by up to 5 %."""
    ended = {row: own for row, by_seed in rows.items() if (own := {s: run for s, run in by_seed.items() if run.ended})}
    runs = [run for by_seed in ended.values() for run in by_seed.values()]
    totals: dict[str, tuple[float, float]] = {}  # {axis: what the cheapest row spends, what the dearest}
    for axis in AXES:
        if runs and all(axis in run.costs for run in runs):
            of_rows = [fmean(run.spent(axis) for run in by_seed.values()) for by_seed in ended.values()]
            totals[axis] = min(of_rows), max(of_rows)
    if all(most <= (1 + UNEQUAL) * least for least, most in totals.values()):
        return []
    budgets = {axis: least for axis, (least, _) in totals.items()}
    accuracy = {f"Δ at {most:,.0f} {axis}": _accuracy_within(ended, axis, most) for axis, most in budgets.items()}
    spent = (f"{'–'.join(dict.fromkeys(f'{x:,.0f}' for x in total))} {axis}" for axis, total in totals.items())
    return [
        f"Rows spend {', '.join(spent)}. The cheapest row sets the budget of its cost: what it spends in its whole "
        "run. Each row is shown at the last step within that budget; a row that spends more for an update has had "
        "fewer updates by then.",
        "Accuracy while training is the mean over the last third of the steps up to that step. Differences (Δ) are "
        "paired by seed, in points; one in *italics* has a 95 % interval that excludes 0. None of these comparisons is "
        "the fair one: each answers a question of its own.",
        "Seconds are the wall time of training steps, without evaluations and checkpoints; a step that compiled counts "
        "as the run's median step. They hold for this machine and this program: runs and other work that share the "
        "machine slow each other, so a difference of some percent between rows need not be theirs.",
        difference_table(table, ended, accuracy, "training accuracy"),
    ]


def _accuracy_within(rows: Rows, axis: str, budget: float) -> dict[str, dict[int, float]]:
    """{row: {seed: training accuracy in %}} over the last third of the steps within `budget`, a cost on the axis `axis`
    of `Run.costs`. Runs whose first step costs more are left out."""
    found: dict[str, dict[int, float]] = {}
    for row, by_seed in rows.items():
        for seed, run in by_seed.items():
            if last := run.last_step_within(axis, budget):
                found.setdefault(row, {})[seed] = 100 * run.late("accuracy", last)
    return found
