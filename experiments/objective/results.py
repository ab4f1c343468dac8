"""The results of the experiments on the objective: tables, and the figure by distance, staleness and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.kept import heads, interval, table
from experiments.objective.design import (
    BASELINE,
    BOUND,
    CAPPED,
    CLIPPED,
    EXACT,
    GRPO,
    IN_REWARD,
    NO_KL,
    RATES,
    ROWS,
    SCAN,
    TOKEN,
)
from experiments.objective.runs import MIDDLE, Runs, best_rates, regret_of
from rpg_jax.report import plots
from rpg_jax.report.seeds import Mean, mean, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = {  # row: its words in the figure
    EXACT: "exact gradient, no samples",
    BASELINE: "KL of whole completions",
    CAPPED: "the same with min(W, 2)",
    "to-go, exact: URKL": "the same by the exact chain rule",
    IN_REWARD: "KL in the reward",
    TOKEN: "KL of each token alone",
    GRPO: "GRPO's KL term (k₃)",
}
LOST = 0.3  # runs with a larger regret
DISTANCES = (1.0, 2.0)  # nats a completion, at which rewards are compared
UNCLIPPED_OF = {row: row.replace(", clip", "") for row in CLIPPED} | {"no KL, clip: –": NO_KL.key}
LENGTHS = ("short", "staleness", "long")  # experiments whose completions have different lengths


def tables(found: Runs) -> dict[str, str]:
    """The tables of docs/objective.md, by the title of their section; they depend on the runs alone."""
    sections: dict[str, tuple[str, Callable[[Runs], str]]] = {
        "By staleness": ("staleness", _staleness),
        "At equal distance": ("staleness", _distances),
        "The strength of the KL term": ("staleness", _strengths),
        "Shorter and longer completions": ("long", _lengths),
        "The mean over tokens": ("token mean", lambda runs: _changes(runs, "token mean", "against the sum")),
        "With a clip": ("clipped", lambda runs: _changes(runs, "clipped", "against no clip")),
        "A verifier that is wrong": ("wrong verifier", _wrong),
        "A reference that moves": ("iterative", _iterative),
        "Longer runs": ("longer", lambda runs: _staleness(runs, "longer")),
        "Longer runs by learning rate": ("longer, by rate", _by_rate),
        "Learning rates": (SCAN, _rates),
    }
    return {title: table(found) for title, (name, table) in sections.items() if found.rows(name)}


def verdict(difference: Mean) -> str:
    """`equal`, `different` or nothing, by `BOUND` and the interval; one seed has no interval."""
    return "equal" if difference.within(BOUND) else "different" if difference.excludes_zero else ""


def draw(found: Runs) -> bytes:
    """PNG: reward that lacks by distance from the reference, and regret by staleness and by length."""
    figure = plots.empty_figure(16, 5.4, w_pad=0.1)
    distance, staleness, lengths = figure.subplots(1, 3)
    for row, colour, words in _shown(found):
        x, y = (np.mean(part, axis=0) for part in zip(*found.gaps(row, 8).values(), strict=True))
        distance.plot(x, y, label=words, **_style(row, colour))
    title = "Reward less than the best possible, 8 updates a batch"
    plots.name_axes(distance, title, "distance from the start: KL(π_θ‖π_ref), nats a completion")
    _draw_regrets(staleness, found, [("staleness", n, str(n)) for n in found.staleness("staleness")])
    plots.name_axes(staleness, f"Regret by staleness, β = {MIDDLE:g}", "updates from one batch of completions")
    reached = [name for name in LENGTHS if found.rows(name)]
    _draw_regrets(lengths, found, [(name, 8, f"{found.tokens(name):.1f}") for name in reached], EXACT)
    title = "Regret beyond the exact gradient's, by length"
    plots.name_axes(lengths, title, "tokens of the reference's completions, mean")
    figure.legend(*distance.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return plots.png(figure)


def _style(row: str, colour: str) -> dict[str, Any]:
    dashed = {"linestyle": "--", "marker": ""} if row == EXACT else {"marker": "o", "markersize": 4}
    return {"color": colour, "linewidth": 1.4, **dashed}


def _draw_regrets(ax: Axes, found: Runs, columns: Sequence[tuple[str, int, str]], than: str | None = None) -> None:
    for i, (row, colour, _) in enumerate(_shown(found)):
        each: dict[float, Mean] = {}
        for place, (experiment, updates_a_batch, _) in enumerate(columns):
            if row in found.rows(experiment):
                values = found.of(experiment, row, "regret", updates_a_batch=updates_a_batch)
                base = found.of(experiment, than, "regret") if than else dict.fromkeys(values, 0.0)
                each[place + 0.03 * i] = paired_difference(values, base)
        halves = [m.half for m in each.values()]
        ax.errorbar([*each], [m.value for m in each.values()], halves, capsize=2, **_style(row, colour))
    ax.set_xticks(range(len(columns)), [words for *_, words in columns])
    ax.set_ylim(0, 0.2)


def _shown(found: Runs) -> list[tuple[str, str, str]]:
    there = [row for row in SHOWN if row in found.rows("staleness")]
    colours = [plots.INK, *plots.COLOURS]
    return [(row, colour, SHOWN[row]) for row, colour in zip(there, colours, strict=False)]


def _text(values: dict[int, float], digits: int = 3) -> str:
    return interval(mean([*values.values()]), digits)


def _difference(m: Mean | None, row: str = "") -> str:
    """The difference to the first row with its verdict; nothing for the row itself, and for rows of another J."""
    if m is None or row == BASELINE or regret_of(row) != "regret":
        return ""
    return f"{interval(m, sign='+')} {verdict(m)}".strip()


def _names(row: str) -> list[str]:
    return [row, "reverse"] if row == EXACT else [ROWS[row].name, ROWS[row].term]


def _table(found: Runs, experiment: str, head: Sequence[str], cells: Callable[[str], Sequence[str]]) -> str:
    rows = [[*_names(row), *cells(row)] for row in found.rows(experiment)]
    return table(["loss", "KL term", *head], rows, 2)


def _regrets(found: Runs, of_rows: str, name: str, columns: Sequence[tuple[str, int, str]]) -> str:
    """Regrets, and what each row has more than the first row, in columns (experiment, updates a batch, head)."""

    def cells(row: str) -> list[str]:
        ours, first = (
            [found.of(e, name, "own_regret", updates_a_batch=n) for e, n, _ in columns] for name in (row, BASELINE)
        )
        return [*map(_text, ours), *(_difference(m, row) for m in map(paired_difference, ours, first))]

    words = [words for *_, words in columns]
    head = [*heads(f"regret, {name}: ", words), *heads("against the first row: ", words)]
    return _table(found, of_rows, head, cells)


def _staleness(found: Runs, experiment: str = "staleness") -> str:
    columns = [(experiment, n, str(n)) for n in found.staleness(experiment)]
    return _regrets(found, experiment, "updates a batch", columns)


def _lengths(found: Runs) -> str:
    return _regrets(found, "long", "tokens", [(name, 8, f"{found.tokens(name):.1f}") for name in LENGTHS])


def _by_rate(found: Runs) -> str:
    def cells(row: str) -> list[str]:
        each = [found.of("longer, by rate", row, "regret", updates_a_batch=64, rate=rate) for rate in RATES]
        lost = [sum(x > LOST for x in regrets.values()) for regrets in each]
        return [_text(x) + f"; {n} lost" * bool(n) for x, n in zip(each, lost, strict=True)]

    return _table(found, "longer, by rate", heads("regret, 64 updates a batch, rate ", RATES), cells)


def _distances(found: Runs) -> str:
    stale = found.staleness("staleness")
    columns = [(kl, n) for kl in DISTANCES for n in stale]

    def cells(row: str) -> list[str]:
        if row == NO_KL.key:
            return [""] * len(columns)
        made = []
        for ours, first in ([found.lost(name, kl, n) for name in (row, BASELINE)] for kl, n in columns):
            change = paired_difference(ours, first) if set(ours) & set(first) else None
            made.append(f"{_text(ours)}; {_difference(change, row)}".strip("; ") if ours else "")
        return made

    head = [h for kl in DISTANCES for h in heads(f"lost at KL {kl:g}, updates a batch: ", stale)]
    return _table(found, "staleness", head, cells)


def _strengths(found: Runs) -> str:
    betas = found.kl_coefs("staleness")

    def cells(row: str) -> list[str]:
        regrets = [_text(found.of("staleness", row, "own_regret", beta)) for beta in betas]
        return [*regrets, *(_text(found.of("staleness", row, q), 2) for q in ("reward", "kl", "length"))]

    head = heads("regret, β = ", betas)
    return _table(found, "staleness", [*head, f"β = {MIDDLE:g}: reward", "KL", "tokens"], cells)


def _changes(found: Runs, experiment: str, head: str) -> str:
    """Regrets of an experiment, and their differences to those of the same row in `staleness`, without a clip."""
    stale = found.staleness(experiment)

    def cells(row: str) -> list[str]:
        made = []
        for n in stale:
            ours = found.of(experiment, row, "own_regret", updates_a_batch=n)
            theirs = found.of("staleness", UNCLIPPED_OF.get(row, row), "own_regret", updates_a_batch=n)
            made += [_text(ours), _difference(paired_difference(ours, theirs))]
        return made

    return _table(found, experiment, [h for n in stale for h in (f"regret, {n} updates a batch", head)], cells)


def _wrong(found: Runs) -> str:
    betas = found.kl_coefs("wrong verifier")
    columns = [(quantity, beta) for quantity in ("right", "reward") for beta in betas]

    def cells(row: str) -> list[str]:
        return [_text(found.of("wrong verifier", row, *column)) for column in columns]

    head = [*heads("right, β = ", betas), *heads("paid, β = ", betas)]
    return _table(found, "wrong verifier", head, cells)


def _iterative(found: Runs) -> str:
    def cells(row: str) -> list[str]:
        return [_text(found.of(name, row, q)) for name in ("iterative", "staleness") for q in ("reward", "kl")]

    head = ["reward", "KL(π_θ‖first reference)", "with the fixed reference: reward", "KL"]
    return _table(found, "iterative", head, cells)


def _rates(found: Runs) -> str:
    chosen, stale = best_rates(found.all), found.staleness(SCAN)
    rates = sorted({rate for r in found.all if r["experiment"] == SCAN for rate in r["rates"]})

    def cells(row: str) -> list[str]:
        return [f"{chosen[row, n]:g}" if (row, n) in chosen else "" for n in stale]

    first = f"rate, of {', '.join(f'{rate:g}' for rate in rates)}; updates a batch: "
    return _table(found, SCAN, heads(first, stale), cells)
