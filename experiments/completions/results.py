"""The results on completions as tables, and the verdicts that follow from the numbers."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from experiments import kept
from experiments.completions.estimators import ENDS, ESTIMATORS, VOCABULARY, Estimator
from experiments.completions.exact import OBJECTIVES, CompletionSettings, Results
from experiments.estimators.results import EXACT, REACHED, SYMBOLS, number
from rpg_jax.report.tables import markdown_table


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
    drifts = ["on-policy", *(f"{drift:g}" for drift in s.drifts[1:])]
    of = [*kept.heads("completions: ", drifts), *kept.heads("tokens: ", drifts)]
    whole_head = ["loss", "KL term", *of]
    noisy = s.drifts.index(0.1) if 0.1 in s.drifts else -1
    kl_rows, whole_rows = [], []
    for e in ESTIMATORS:
        row = results["errors"][e.key]
        kl_rows.append([gradient_of(row), *_errors(row, "kl_term", e), _noise(row["noise"][noisy])])
        whole_rows.append(_errors(row, "whole", e))
    kl_head = ["loss", "KL term", "has the gradient of", *of, f"noise at {s.drifts[noisy]:g}"]
    return {
        "The KL term": markdown_table(kl_head, joined(ESTIMATORS, kl_rows), numbers=range(3, len(kl_head))),
        "The whole loss": markdown_table(whole_head, joined(ESTIMATORS, whole_rows), numbers=range(2, len(whole_head))),
        "Completions of several tokens: where does it end?": _ends(results, s),
    }


def vocabulary_table(results: Results, s: CompletionSettings) -> dict[str, str]:
    """The table of docs/estimators.md on a KL that is summed over the vocabulary, by the title of its section."""
    rows = []
    for e in VOCABULARY:
        row = results["errors"][e.key]
        rows.append([e.name, e.term, gradient_of(row), *map(_noise, row["noise"])])
    drifts = ["noise on-policy", *(f"at {drift:g}" for drift in s.drifts[1:])]
    head = ["loss", "KL term", "has the gradient of", *drifts]
    return {"The KL summed over the vocabulary": markdown_table(head, rows, numbers=range(3, len(head)))}


def _errors(row: Mapping[str, Any], part: str, e: Estimator) -> list[str]:
    return [number(x) for level in ("completions", "tokens") for x in row[part][f"{level}_{e.meant}"]]


def _ends(results: Results, s: CompletionSettings) -> str:
    rows = []
    for e in ENDS:
        refreshed, offline = (results["ends"][e.key][mode] for mode in ("refreshed", "offline"))
        regrets = [regret(x) for x in refreshed[f"regret_{e.meant}"]]
        middle = s.end_kl_coefs.index(s.kl_coef)
        reward, kl = (f"{np.mean(refreshed[name][middle]):.3f}" for name in ("reward", "kl"))
        stays = regret(offline[f"regret_{e.meant}"][0])
        rows.append([optimum_of(refreshed), *regrets, reward, kl, stays, optimum_of(offline)])
    betas = kept.heads("regret at β = ", [f"{beta:g}" for beta in s.end_kl_coefs])
    beta = f"{s.kl_coef:g}"
    columns = [*betas, f"reward at {beta}", f"KL at {beta}", f"π_old stays: regret at {beta}"]
    head = ["loss", "KL term", "optimum reached", *columns, "optimum reached"]
    return markdown_table(head, joined(ENDS, rows), numbers=range(3, len(head) - 1))


def joined(estimators: Sequence[Estimator], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows with the names of their losses and KL terms; neighbours with equal cells become one row."""
    named = [(e.name, tuple(row), e.term) for e, row in zip(estimators, rows, strict=True)]
    grouped = groupby(named, key=lambda x: x[:2])
    return [[name, ", ".join(term for *_, term in members), *row] for (name, row), members in grouped]


def regret(x: Sequence[float]) -> str:
    """The mean over prompts, with the largest in brackets."""
    return "0" if np.max(x) < REACHED / 2 else f"{np.mean(x):.3f} ({np.max(x):.3f})"


def _noise(x: float) -> str:
    """Without a mean there is no relative noise."""
    return "–" if x > 1 / EXACT else f"{x:.2g}"
