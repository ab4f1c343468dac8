"""Draws the frontier: expected reward against the divergence from the reference, for all β."""

from rpg_jax.report import plots
from rpg_jax.report.seeds import mean
from rpg_jax.reproduction.path_experiments import BASELINE, NO_KL
from rpg_jax.reproduction.path_records import Runs

SHOWN = (BASELINE, "to-go, weight w: URKL", "per token: URKL", "per token (GRPO): k₃", "per token (REINFORCE++): k₁")


def draw_frontier(found: Runs) -> bytes:
    figure = plots.empty_figure(11, 5)
    for ax, experiment, quantity in zip(
        figure.subplots(1, 2), ("strengths", "wrong verifier"), ("reward", "right"), strict=True
    ):
        rows = [row for row in SHOWN if row in found.rows(experiment)]
        if experiment == "strengths" and rows:
            best = [found.get(experiment, BASELINE, b).values() for b in found.kl_coefs(experiment)]
            points = [
                (mean([r["best_kl"] for r in x]).value, mean([r["best_reward"] for r in x]).value) for x in best if x
            ]
            ax.plot(
                *zip(*sorted(points), strict=True), color=plots.INK, linewidth=1.4, marker="|", label="best possible"
            )
        for colour, row in zip(plots.COLOURS, rows, strict=False):
            line = []
            for kl_coef in found.kl_coefs(experiment):
                runs = found.get(experiment, row, kl_coef).values()
                xs, ys = [r["kl"] for r in runs], [r[quantity] for r in runs]
                ax.plot(xs, ys, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
                line += [(mean(xs).value, mean(ys).value)] if xs else []
            ax.plot(*zip(*line, strict=True), "o-", color=colour, markersize=5, linewidth=1.4, label=row)
        without = found.get(experiment, NO_KL.key).values()
        if without:
            ax.plot(
                [r["kl"] for r in without], [r[quantity] for r in without], "x", color=plots.MUTED, label=NO_KL.name
            )
        title = "Expected reward" if quantity == "reward" else "Right completions, where the verifier is wrong"
        plots.tidy(ax, title)
        ax.set_xlabel("KL(π_θ‖π_ref), nats a completion", color=plots.MUTED, fontsize=9)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return plots.png(figure)
