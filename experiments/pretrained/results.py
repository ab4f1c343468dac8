"""The page's tables and its figure."""

from collections.abc import Sequence
from typing import Any

from experiments import kept
from experiments.pretrained.runs import NO_KL, ROWS, STRENGTHS
from rpg_jax.report import plots
from rpg_jax.report.seeds import mean

Record = dict[str, Any]
START = "start"
_PANELS = (  # title, below, quantity of the x-axis, quantity of the y-axis
    ("What is gained for the distance", "KL(π‖π₀), nats a completion", "kl", "reward"),
    ("What is lost for what is gained", "reward on held-out sums", "reward", "lost"),
)
_GAINED = {"reward": 2, "kl": 2, "length": 1, "entropy": 2}
_LOST = {"lost": 3, "perplexity": 2, "facts": 2, "general_length": 1, "general_entropy": 2}


def tables(runs: Sequence[Record]) -> dict[str, str]:
    """A table of what each cell gains and one of what it loses; numbers are means over seeds ± half of an interval."""
    return {
        "Gained": _table(runs, _GAINED, ("reward", "KL(π‖π₀)", "tokens", "entropy")),
        "Lost": _table(runs, _LOST, ("KL(π₀‖π) a token", "perplexity", "facts", "tokens", "entropy")),
    }


def _table(runs: Sequence[Record], quantities: dict[str, int], heads: Sequence[str]) -> str:
    lines = []
    for row, kl_coef in [(START, 0.0), (NO_KL, 0.0), *((r, b) for r in ROWS if r != NO_KL for b in STRENGTHS)]:
        if own := of(runs, row, kl_coef):
            cells = [kept.interval(mean([run[name] for run in own]), digits) for name, digits in quantities.items()]
            lines.append([row, f"{kl_coef:g}" if kl_coef else "–", len(own), *cells])
    return kept.table(["KL term", "β", "seeds", *heads], lines)


def of(runs: Sequence[Record], row: str, kl_coef: float) -> list[Record]:
    """The runs of a cell, by seed."""
    return sorted((r for r in runs if (r["row"], r["kl_coef"]) == (row, kl_coef)), key=lambda run: run["seed"])


def draw(runs: Sequence[Record]) -> bytes:
    """PNG: a line joins the β of a kind of KL term, each the mean over seeds; small points are runs."""
    figure = plots.empty_figure(11, 4.8)
    for axes, (title, below, x, y) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for colour, row in zip(plots.COLOURS, ROWS, strict=False):
            cells = [own for kl_coef in ((0.0,) if row == NO_KL else STRENGTHS) if (own := of(runs, row, kl_coef))]
            line = [(mean([run[x] for run in own]).value, mean([run[y] for run in own]).value) for own in cells]
            if line:
                axes.plot(*zip(*line, strict=True), "o-", color=colour, markersize=5, linewidth=1.4, label=row)
            for run in (run for own in cells for run in own):
                axes.plot(run[x], run[y], "o", color=colour, alpha=0.3, markersize=3, markeredgewidth=0)
        for run in of(runs, START, 0.0):
            axes.plot(run[x], run[y], "D", color=plots.INK, markersize=5, label="the start")
        plots.name_axes(axes, title, below)
        axes.set_ylabel({"reward": "reward on held-out sums", "lost": "KL(π₀‖π), nats a token"}[y])
    plots.legend_below(figure)
    return plots.png(figure)
