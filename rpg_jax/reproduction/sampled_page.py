"""Writes the results of runs with sampled gradients on completions as a page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from rpg_jax.report import markdown
from rpg_jax.reproduction.completion_estimators import SAMPLED, STALE, TO_GO
from rpg_jax.reproduction.completion_laboratory import Results, SampledSettings
from rpg_jax.reproduction.completion_page import joined
from rpg_jax.storage import write_atomically


def write_page(results: Results, tables: SampledSettings, out: Path) -> Path:
    """Writes `completions.md` into `out`; returns the page."""
    parts = (
        "# The right gradient of completions, with samples",
        "[The laboratory](estimators.md#completions-of-several-tokens-whose-gradient-is-it) says by exact sums which "
        "gradient every loss has, and what the names of the rows mean. Here gradients are sampled, as in training, and "
        "the end of a run is judged by exact sums. [Runs of a real model](objective.md) follow.",
        "```sh\npython -m rpg_jax.reproduce --table=completions\n```",
        *_tabular(results, tables),
    )
    out.mkdir(parents=True, exist_ok=True)
    page = out / "completions.md"
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


def _tabular(results: Results, s: SampledSettings) -> tuple[str, ...]:
    middle = len(s.updates_a_batch) // 2
    rows, optima = [], []
    for e in SAMPLED:
        row = results["sampled"][e.key]
        regrets = [_interval(x) for x in row[f"regret_{e.meant}"]]
        rows.append([*regrets, *(f"{np.mean(row[name][middle]):.3f}" for name in ("reward", "kl"))])
        optima.append(_optimum(row["reward"], row["kl"], row["regret_reverse"], s.kl_coef))
    updates = [f"{'regret, updates a batch: ' if i == 0 else ''}{n}" for i, n in enumerate(s.updates_a_batch)]
    at = f"at {s.updates_a_batch[middle]}"
    head = ["loss", "KL term", *updates, f"reward {at}", f"KL {at}"]
    return (
        "## Tabular policies",
        f"Policies are tables with a softmax at every prefix: {s.actions} actions, completions of {s.length} actions, "
        f"reward 1 for {100 * s.rewarded:.0f} % of them and 0 for the others. π_ref is softmax(N(0, 1)) at every "
        "prefix, stays fixed, and is the start.\n"
        f"A run has {s.prompts} prompts and {s.updates:,} updates. An update has a group of {s.group} "
        "completions of each prompt, which no other update has. π_old becomes π_θ after so many updates as the columns "
        f"say. β = {s.kl_coef:g}; Adam with learning rate {s.learning_rate:g}; leave-one-out advantages; no clip.",
        f"*Regret* is J* − J at the end, by exact sums over all {s.actions**s.length} completions, with the divergence "
        f"that the row is meant for; J* is {np.mean(optima):.3f} for KL(π_θ‖π_ref). Numbers are means over "
        f"{s.seeds * s.prompts} prompts of {s.seeds} seeds, ± half of a 95 % interval over "
        "the prompts.",
        markdown.table(head, joined(SAMPLED, rows), numbers=range(2, len(head))),
        _reading(results, s),
    )


def _reading(results: Results, s: SampledSettings) -> str:
    def regret(name: str, updates: int) -> str:
        return f"{np.mean(results['sampled'][name]['regret_reverse'][s.updates_a_batch.index(updates)]):.3f}"

    few, many = s.updates_a_batch[0], s.updates_a_batch[-1]
    present, stale, to_go = "sequence, weight w: URKL", f"{STALE}, weight w: URKL", f"{TO_GO}, k₃ form: URKL"
    return (
        f"Weight w with the present log-ratio ends {regret(present, few)} below J*, URKL per token "
        f"{regret('per token: URKL', few)} and GRPO's k₃ {regret('per token (GRPO): k₃', few)}, with {few} update a "
        f"batch. With {many} the stale log-ratio ends {regret(stale, many)} below, and the present one "
        f"{regret(present, many)}. The k₃ form of to-go has the right mean gradient on-policy, and still ends "
        f"{regret(to_go, few)} below."
    )


def _optimum(reward: Sequence[float], kl: Sequence[float], regret: Sequence[float], kl_coef: float) -> float:
    return float(np.mean(np.asarray(reward) - kl_coef * np.asarray(kl) + np.asarray(regret)))


def _interval(x: Sequence[float]) -> str:
    half = stats.t.ppf(0.975, len(x) - 1) * np.std(x, ddof=1) / np.sqrt(len(x))
    return f"{np.mean(x):.3f} ± {half:.3f}"
