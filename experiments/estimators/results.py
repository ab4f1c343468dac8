"""The results on one token and on completions of several: tables, a figure, and the verdicts from the numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import kept
from experiments.estimators import token
from experiments.estimators.completions import OBJECTIVES, CompletionSettings, Results
from experiments.estimators.estimators import (
    CLIPS,
    COMPARATORS,
    ENDS,
    ESTIMATORS,
    KL_TERMS,
    SAMPLERS,
    VOCABULARY,
    Estimator,
)
from rpg_jax.report import plots
from rpg_jax.report.plots import COLOURS, INK, MUTED
from rpg_jax.report.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYMBOLS = {"reverse": "KL(π_θ‖π_ref)", "forward": "KL(π_ref‖π_θ)"}
# A median relative error below EXACT is rounding. LIMIT, at the smallest drift, tells a bias that vanishes on-policy
# from a bias that does not: there the gradients of the two divergences differ by several times LIMIT.
EXACT, LIMIT = 1e-9, 0.15
# Exact estimators are drawn here in the figure, in place of zero.
FLOOR = 1e-4
# An end within this distance of an optimum, in nats, or with less regret, is that optimum: the last stretch is slow.
REACHED = 1e-3


def descends(row: Mapping[str, list[float]]) -> tuple[str | None, str]:
    """The divergence whose gradient a KL term has, or None; and how well: exactly, on-policy only, neither."""
    for divergence in SYMBOLS:
        if max(row[f"error_{divergence}"]) < EXACT:
            return divergence, "exactly"
    nearest = min(SYMBOLS, key=lambda d: row[f"error_{d}"][0])
    return (nearest, "on-policy only") if row[f"error_{nearest}"][0] < LIMIT else (None, "neither")


def destination(row: Mapping[str, float], mode: str) -> str:
    """The optimum that `mode` (`refreshed`, `offline`) reaches, or its distance from the nearest optimum."""
    distances = {d: row[f"{mode}_to_{d}"] for d in SYMBOLS}
    nearest = min(distances, key=distances.__getitem__)
    optimum = f"that of {SYMBOLS[nearest]}"
    return optimum if distances[nearest] < REACHED else f"neither ({distances[nearest]:.2f} nats from {optimum})"


def draw(results: Results, s: token.Settings) -> bytes:
    """PNG: bias of the KL terms, bias and noise of whole losses under clipping, bias with tokens from π_s."""
    figure = plots.empty_figure(15, 8.4, w_pad=0.15, h_pad=0.15)
    axes = figure.subplots(2, 2).flat
    meant = {e.name: f"error_{descends(results['kl_terms'][e.name])[0] or e.meant}" for e in KL_TERMS}
    panels = (
        ("Bias of the KL term alone", "kl_terms", KL_TERMS, meant.__getitem__, s.drifts),
        ("Bias of the whole loss, clips included", "clips", CLIPS, lambda name: "error", s.drifts),
        ("Noise of one token's gradient", "clips", CLIPS, lambda name: "noise", s.drifts),
        ("Bias where tokens come from another sampler", "sampler", SAMPLERS, lambda name: "error", s.sampler_kls),
    )
    for ax, (title, experiment, estimators, quantity, distances) in zip(axes, panels, strict=True):
        lines = {e.name: results[experiment][e.name][quantity(e.name)] for e in estimators}
        panel(ax, title, lines, distances)
        apart = "KL(π_s‖π_old)" if experiment == "sampler" else "drift KL(π_θ‖π_old)"
        ax.set_xlabel(f"{apart}, nats", color=MUTED)
        ax.set_ylabel("standard deviation / |mean|" if title.startswith("Noise") else "relative error", color=MUTED)
    return plots.png(figure)


def panel(
    ax: Axes, title: str, lines: Mapping[str, list[float]], distances: Sequence[float], legend: bool = True
) -> None:
    """Draws a line for each estimator and names it beside the panel, highest end first; exact ones share a line."""
    exact = [name for name, values in lines.items() if max(values) < EXACT]
    colours = dict(zip(lines, COLOURS, strict=False))
    for name in sorted(set(lines) - set(exact), key=lambda name: -lines[name][-1]):
        shown = [v if v > FLOOR else float("nan") for v in lines[name]]
        ax.plot(distances, shown, color=colours[name], marker="o", markersize=3.5, label=name)
    if exact:
        ax.plot(distances, [FLOOR] * len(distances), color=INK, linewidth=3, label="\n".join(["exact:", *exact]))
    ax.set_xscale("log")
    ax.set_yscale("log")
    plots.tidy(ax, title)
    if legend:
        ax.legend(fontsize=8, frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.02))


def token_tables(results: Results, s: token.Settings) -> dict[str, str]:
    """The tables of docs/estimators.md on completions of one token, by the title of their section."""
    return {
        "Which KL each term pulls towards": _kl_terms(results, s),
        "Where each KL term ends": _ends(results, s),
        "What clipping costs": _loss_table(CLIPS, results["clips"], s.drifts),
        "Losses of 2025 and 2026": _loss_table(COMPARATORS, results["comparators"], s.drifts),
        "What a sampler that is not π_old costs": _loss_table(SAMPLERS, results["sampler"], s.sampler_kls),
    }


def verdict(row: Mapping[str, list[float]]) -> str:
    """`descends` in words."""
    divergence, how = descends(row)
    return f"{SYMBOLS[divergence]}, {how}" if divergence else how


def _kl_terms(results: Results, s: token.Settings) -> str:
    shown, noisy = _decades(s.drifts), -3

    def cells(e: Estimator) -> list[str]:
        row = results["kl_terms"][e.name]
        errors = row[f"error_{descends(row)[0] or e.meant}"]
        return [verdict(row), *(number(errors[i]) for i in shown), number(row["noise"][noisy])]

    errors_at = kept.heads("error at drift ", [s.drifts[i] for i in shown])
    head = ["KL term", "loss of a token", "has the gradient of", *errors_at, f"noise at {s.drifts[noisy]:g}"]
    return kept.table(head, rows(KL_TERMS, cells), 3)


def _ends(results: Results, s: token.Settings) -> str:
    ends = results["fixed_points"].items()
    rows = [(name, destination(row, "refreshed"), destination(row, "offline")) for name, row in ends]
    refreshed = f"optimum reached, if π_old becomes π_θ every {s.refresh} updates"
    return kept.table(["KL term", refreshed, "optimum reached, if π_old stays"], rows, 3)


def _loss_table(
    estimators: Sequence[Estimator], results: Mapping[str, Mapping[str, list[float]]], distances: Sequence[float]
) -> str:
    shown = _decades(distances)
    last, rows = shown[-1], []
    for e in estimators:
        row = results[e.name]
        errors = (number(row["error"][i]) for i in shown)
        rows.append([e.name, *errors, f"{row['cosine'][last]:.3f}", number(row["noise"][last])])
    far = f"{distances[last]:g}"
    head = ["loss", *kept.heads("error at ", [distances[i] for i in shown]), f"cosine at {far}", f"noise at {far}"]
    return kept.table(head, rows)


def _decades(distances: Sequence[float]) -> list[int]:
    """Indices of the distances that are powers of ten: tables show these."""
    return [i for i, distance in enumerate(distances) if f"{distance:.0e}"[0] == "1"]


def number(x: float) -> str:
    """Two digits; 0 for an error that is rounding."""
    return "0" if x < EXACT else f"{x:.2g}"


def gradient_of(row: Mapping[str, Any]) -> str:
    """The divergence whose gradient a KL term has: exactly, on-policy only, or none."""
    largest = row["kl_term_largest"]
    for how, drifts in (("exactly", slice(None)), ("on-policy only", slice(1))):
        for level, divergence in OBJECTIVES:
            if max(largest[f"{level}_{divergence}"][drifts]) < EXACT:
                return f"{SYMBOLS[divergence]} of {level}, {how}"
    return "neither"


def optimum_of(row: Mapping[str, Any]) -> str:
    """The optimum that a descent reaches for every β and prompt, or `neither`."""
    reached = [d for d in SYMBOLS if np.max(row[f"regret_{d}"]) < REACHED]
    return f"that of {SYMBOLS[reached[0]]}" if reached else "neither"


def exact_tables(results: Results, s: CompletionSettings) -> dict[str, str]:
    """The tables of docs/estimators.md on completions of several tokens, by the title of their section."""
    errors, drifts = results["errors"], ["on-policy", *(f"{drift:g}" for drift in s.drifts[1:])]
    noisy = s.drifts.index(0.1) if 0.1 in s.drifts else -1

    def of(e: Estimator, part: str) -> list[str]:
        row = errors[e.key][part]
        return [number(x) for level in ("completions", "tokens") for x in row[f"{level}_{e.meant}"]]

    def kl_term(e: Estimator) -> list[str]:
        return [gradient_of(errors[e.key]), *of(e, "kl_term"), _noise(errors[e.key]["noise"][noisy])]

    head = [*kept.heads("completions: ", drifts), *kept.heads("tokens: ", drifts)]
    kl_head = ["loss", "KL term", "has the gradient of", *head, f"noise at {s.drifts[noisy]:g}"]
    return {
        "The KL term": kept.table(kl_head, rows(ESTIMATORS, kl_term), 3),
        "The whole loss": kept.table(["loss", "KL term", *head], rows(ESTIMATORS, lambda e: of(e, "whole")), 2),
        "Completions of several tokens: where does it end?": _completion_ends(results["ends"], s),
    }


def vocabulary_table(results: Results, s: CompletionSettings) -> dict[str, str]:
    """The table of docs/estimators.md on a KL that is summed over the vocabulary, by the title of its section."""

    def cells(e: Estimator) -> list[str]:
        row = results["errors"][e.key]
        return [gradient_of(row), *map(_noise, row["noise"])]

    drifts = ["noise on-policy", *(f"at {drift:g}" for drift in s.drifts[1:])]
    head = ["loss", "KL term", "has the gradient of", *drifts]
    return {"The KL summed over the vocabulary": kept.table(head, rows(VOCABULARY, cells), 3)}


def _completion_ends(ends: Mapping[str, Mapping[str, Any]], s: CompletionSettings) -> str:
    middle, beta = s.end_kl_coefs.index(s.kl_coef), f"{s.kl_coef:g}"

    def cells(e: Estimator) -> list[str]:
        refreshed, offline = (ends[e.key][mode] for mode in ("refreshed", "offline"))
        *moving, stays = map(regret, [*refreshed[f"regret_{e.meant}"], *offline[f"regret_{e.meant}"]])
        reward, kl = (f"{np.mean(refreshed[name][middle]):.3f}" for name in ("reward", "kl"))
        return [optimum_of(refreshed), *moving, reward, kl, stays, optimum_of(offline)]

    betas = kept.heads("regret at β = ", s.end_kl_coefs)
    columns = [*betas, f"reward at {beta}", f"KL at {beta}", f"π_old stays: regret at {beta}"]
    head = ["loss", "KL term", "optimum reached", *columns, "optimum reached"]
    return markdown_table(head, rows(ENDS, cells), numbers=range(3, len(head) - 1))


def rows(estimators: Sequence[Estimator], cells: Callable[[Estimator], Sequence[str]]) -> list[list[str]]:
    """The cells of each loss after its name and KL term; neighbours with equal cells become one row."""
    named = [(e.name, tuple(cells(e)), e.term) for e in estimators]
    grouped = groupby(named, key=lambda x: x[:2])
    return [[name, ", ".join(term for *_, term in members), *row] for (name, row), members in grouped]


def regret(x: Sequence[float]) -> str:
    """The mean over prompts, with the largest in brackets."""
    return "0" if np.max(x) < REACHED / 2 else f"{np.mean(x):.3f} ({np.max(x):.3f})"


def _noise(x: float) -> str:
    """Without a mean there is no relative noise."""
    return "–" if x > 1 / EXACT else f"{x:.2g}"
