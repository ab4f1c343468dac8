"""The results of the experiments on the objective: tables, and the figure of the frontier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from experiments.objective.design import BASELINE, NO_KL, ROWS, SCAN, Record
from experiments.objective.runs import MIDDLE, Runs, Seeds, best_rates, own_regret
from rpg_jax.report import plots
from rpg_jax.report.seeds import Mean, mean, paired_difference
from rpg_jax.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = {  # row: its words in the figure
    BASELINE: "KL of whole completions",
    "to-go, weight w: URKL": "the same, each token with the KL to come",
    "per token: URKL": "KL of each token alone",
    "per token (GRPO): k₃": "GRPO's KL term (k₃)",
    "per token (Tunix): k₁": "Tunix's default (k₁ in the loss)",
}
_PANELS = (  # title, experiment, quantity, (KL from, to), (quantity from, to)
    ("Reward reached at a distance from the start", "strengths", "reward", (0, 5.2), (0.25, 1.02)),
    ("Truly right answers, where the verifier can be fooled", "wrong verifier", "right", (0, 5.2), (0, 1.02)),
)


def tables(found: Runs) -> dict[str, str]:
    """The tables of docs/objective.md, by the title of their section; they depend on the runs alone."""
    sections = {
        "The strength of the KL term": ("strengths", _strengths),
        "Updates from one behaviour policy": ("updates", _updates),
        "A reference that moves": ("iterative", _iterative),
        "Longer completions": ("lengths", _lengths),
        "A verifier that is wrong": ("wrong verifier", _wrong),
        "All divergences and weights": ("others", _others),
        "Longer runs": ("longer", _longer),
        "Learning rates": (SCAN, _rates),
    }
    return {title: table(found) for title, (name, table) in sections.items() if found.has(name)}


def draw_frontier(found: Runs) -> bytes:
    """PNG: a line through the β of each row, means over seeds, with a point for every run and the best possible."""
    panels = [panel for panel in _PANELS if found.has(panel[1])]
    figure = plots.empty_figure(6.4 * len(panels), 5.4)
    for ax, (title, experiment, quantity, xs, ys) in zip(
        [*figure.subplots(1, len(panels), squeeze=False).flat], panels, strict=True
    ):
        _draw(ax, found, experiment, quantity)
        plots.tidy(ax, title)
        ax.set_xlim(*xs)
        ax.set_ylim(*ys)
        ax.set_xlabel("distance from the start: KL(π_θ‖π_ref), nats a completion", color=plots.MUTED)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return plots.png(figure)


def _draw(ax: Axes, found: Runs, experiment: str, quantity: str) -> None:
    kl_coefs = found.kl_coefs(experiment)
    if quantity == "reward":
        best = [found.get(experiment, BASELINE, kl_coef).values() for kl_coef in kl_coefs]
        line = [tuple(mean([run[f"best_{q}"] for run in runs]).value for q in ("kl", "reward")) for runs in best]
        ax.plot(
            *zip(*line, strict=True), color=plots.INK, linewidth=1.4, marker="|", label="best possible at this distance"
        )
    for colour, (row, words) in zip(plots.COLOURS, SHOWN.items(), strict=False):
        line = []
        for kl_coef in kl_coefs:
            if runs := found.get(experiment, row, kl_coef).values():
                points = [run["kl"] for run in runs], [run[quantity] for run in runs]
                ax.plot(*points, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
                line.append(tuple(mean(values).value for values in points))
        if line:
            ax.plot(*zip(*line, strict=True), "o-", color=colour, markersize=5, linewidth=1.4, label=words)
    if runs := found.get(experiment, NO_KL.key).values():
        points = [run["kl"] for run in runs], [run[quantity] for run in runs]
        ax.plot(*points, "x", color=plots.MUTED, label="no KL term (PPO)")


def _of(runs: Seeds, quantity: str | Callable[[Record], float]) -> dict[int, float]:
    value = quantity if callable(quantity) else lambda record: record[quantity]
    return {seed: value(record) for seed, record in runs.items()}


def _text(values: Mapping[int, float], digits: int = 3) -> str:
    return _mean_text(mean(list(values.values())), digits) if values else ""


def _mean_text(m: Mean, digits: int = 3, sign: str = "") -> str:
    return f"{m.value:{sign}.{digits}f}" + ("" if math.isnan(m.half) else f" ± {m.half:.{digits}f}")


def _against(runs: Seeds, others: Seeds) -> str:
    """The paired difference of regrets; nothing for the row itself, and for rows of another J."""
    row = next(iter(runs.values()))["row"] if runs else BASELINE
    if row == BASELINE or ROWS[row].meant == "forward" or not others:
        return ""
    return _mean_text(paired_difference(_of(runs, own_regret), _of(others, own_regret)), sign="+")


def _names(row: str) -> list[str]:
    return [ROWS[row].name, ROWS[row].term]


def _strengths(found: Runs) -> str:
    betas = found.kl_coefs("strengths")
    head = ["loss", "KL term", *(f"{'regret, β = ' if i == 0 else ''}{b:g}" for i, b in enumerate(betas))]
    head += [f"against the first row, β = {MIDDLE:g}", f"reward, β = {MIDDLE:g}", f"KL, β = {MIDDLE:g}"]
    rows = []
    for row in found.rows("strengths"):
        middle = found.get("strengths", row)
        regrets = [_text(_of(found.get("strengths", row, b), own_regret)) for b in betas]
        shown = [_text(_of(middle, quantity)) for quantity in ("reward", "kl")]
        rows.append([*_names(row), *regrets, _against(middle, found.get("strengths", BASELINE)), *shown])
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _updates(found: Runs) -> str:
    def of(row: str, updates: int) -> Seeds:
        return found.get("strengths" if updates == 8 else "updates", row, updates_a_batch=updates)

    head = ["loss", "KL term", "regret, updates a batch: 1", "8", "32", "32 against 1", "32 against the first row"]
    rows = []
    for row in found.rows("updates"):
        few, many = _of(of(row, 1), own_regret), _of(of(row, 32), own_regret)
        change = _mean_text(paired_difference(many, few), sign="+") if many and few else ""
        regrets = [_text(_of(of(row, updates), own_regret)) for updates in (1, 8, 32)]
        rows.append([*_names(row), *regrets, change, _against(of(row, 32), of(BASELINE, 32))])
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _iterative(found: Runs) -> str:
    head = ["loss", "KL term", "reward", "KL(π_θ‖first reference)", "with the fixed reference: reward", "KL"]
    shown = [(name, quantity) for name in ("iterative", "strengths") for quantity in ("reward", "kl")]
    rows = [
        [*_names(row), *(_text(_of(found.get(name, row), quantity)) for name, quantity in shown)]
        for row in found.rows("iterative")
    ]
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _lengths(found: Runs) -> str:
    first = found.lengths("strengths")[0]
    lengths = [first, *found.lengths("lengths")]

    def of(row: str, length: int) -> Seeds:
        return found.get("strengths" if length == first else "lengths", row, length=length)

    head = ["loss", "KL term", *(f"{'regret, tokens: ' if i == 0 else ''}{n}" for i, n in enumerate(lengths))]
    head += [f"{'against the first row: ' if i == 0 else ''}{n}" for i, n in enumerate(lengths)]
    head += [f"KL, {lengths[-1]} tokens", f"reward, {lengths[-1]} tokens"]
    rows = []
    for row in found.rows("lengths"):
        regrets = [_text(_of(of(row, n), "regret")) for n in lengths]
        differences = [_against(of(row, n), of(BASELINE, n)) for n in lengths]
        rows.append(
            [*_names(row), *regrets, *differences, *(_text(_of(of(row, lengths[-1]), q)) for q in ("kl", "reward"))]
        )
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _wrong(found: Runs) -> str:
    betas = found.kl_coefs("wrong verifier")
    head = ["loss", "KL term", *(f"{'right, β = ' if i == 0 else ''}{b:g}" for i, b in enumerate(betas))]
    head += [f"{q}, β = {MIDDLE:g}" for q in ("paid", "KL")]
    rows = [
        [*_names(row), *(_text(_of(found.get("wrong verifier", row, b), "right")) for b in betas)]
        + [_text(_of(found.get("wrong verifier", row), q)) for q in ("reward", "kl")]
        for row in found.rows("wrong verifier")
    ]
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _others(found: Runs) -> str:
    head = ["loss", "KL term", "regret", "against the first row", "reward", "KL(π_θ‖π_ref)", "KL(π_ref‖π_θ)"]
    base, rows = found.get("strengths", BASELINE), []
    for row in ROWS:
        runs = found.get("others", row) or found.get("strengths", row)
        if runs:
            shown = [_text(_of(runs, q)) for q in ("reward", "kl", "kl_from_ref")]
            rows.append([*_names(row), _text(_of(runs, own_regret)), _against(runs, base), *shown])
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _longer(found: Runs) -> str:
    """Runs of more updates: regrets, and J at the middle β of the rows that were trained with other β too."""
    head = ["loss", "KL term", "regret, 1,600 updates", "6,400", "6,400 against the first row"]
    head += [f"J at β = {MIDDLE:g} against the first row, trained with β = {b:g}" for b in found.kl_coefs("strengths")]
    base, rows = found.get("longer", BASELINE), []
    for name in ("longer", "longer, per token"):
        for row in found.rows(name):
            runs = found.get(name, row)
            cells = [_text(_of(found.get("strengths", row), own_regret)), _text(_of(runs, own_regret))]
            for beta in found.kl_coefs("strengths"):
                trained = found.get(name, row, beta)
                shown = trained and row != BASELINE
                change = paired_difference(_of(trained, _middle_j), _of(base, _middle_j)) if shown else None
                cells.append(_mean_text(change, sign="+") if change else "")
            rows.append([*_names(row), *cells[:2], _against(runs, base), *cells[2:]])
    return markdown_table(head, rows, numbers=range(2, len(head)))


def _middle_j(record: Record) -> float:
    """J at β = `MIDDLE` of a run that was trained with any β."""
    return record["reward"] - MIDDLE * record["kl"]


def _rates(found: Runs) -> str:
    chosen, rows = best_rates(found.all), []
    scan = [r for r in found.all if r["experiment"] == SCAN]
    rates = sorted({r["rate"] for r in scan})
    for row, best in chosen.items():
        cells = []
        for rate in rates:
            values = [own_regret(r) for r in scan if (r["row"], r["rate"]) == (row, rate)]
            cells.append(f"{mean(values).value:.3f}" + " ←" * (rate == best))
        rows.append([*_names(row), *cells])
    head = ["loss", "KL term", *(f"{rate:g}" for rate in rates)]
    return markdown_table(head, rows, numbers=range(2, len(head)))
