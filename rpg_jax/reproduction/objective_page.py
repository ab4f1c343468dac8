"""Writes what the experiments on the objective found: a page with tables, and the figure of the frontier."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from rpg_jax.report import markdown
from rpg_jax.report.seeds import Mean, mean, paired_difference
from rpg_jax.reproduction import origin
from rpg_jax.reproduction.objective_figure import draw_frontier
from rpg_jax.reproduction.path_experiments import BASELINE, ROWS, SCAN, Record
from rpg_jax.reproduction.path_records import MIDDLE, Runs, Seeds, best_rates, own_regret
from rpg_jax.reproduction.path_runs import Kept
from rpg_jax.storage import write_atomically


def write_page(kept: Kept, out: Path) -> Path:
    """Writes `objective.md` and `objective.png` into `out`; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "objective.png", draw_frontier(Runs(kept.runs)))
    page = out / "objective.md"
    write_atomically(page, text(kept))
    return page


def text(kept: Kept) -> str:
    """The page; it depends on the runs alone."""
    found = Runs(kept.runs)
    parts = [
        "# Which objective a loss ascends",
        *_introduction(kept),
        _verdict(found),
        "![Expected reward against the divergence from the reference](objective.png)",
        "A line joins the five β of a row, each the mean over seeds; points are runs. The black line joins the best "
        "that any policy can do with each β. A row whose β only means something else lies on the line of another; one "
        "with a wrong gradient lies below.",
        *_strengths(found),
    ]
    sections = {
        "updates": _updates,
        "iterative": _iterative,
        "lengths": _lengths,
        "wrong verifier": _wrong,
        "others": _others,
        "longer": _longer,
    }
    for name, section in sections.items():
        parts += section(found) if found.has(name) else ()
    return "\n\n".join([*parts, *_rates(found)]) + "\n"


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


def _introduction(kept: Kept) -> tuple[str, ...]:
    task, s = kept.settings["task"], kept.settings
    mass = mean([r["mass"] for r in kept.runs if r["experiment"] == "strengths"]).value
    rates, completions = ", ".join(f"{rate:g}" for rate in s["rates"]), task["symbols"] ** task["length"]
    return (
        "```sh\npython -m rpg_jax.reproduce --table=objective\n```",
        f"Methods differ in which J = E[R] − β·KL(π_θ‖π_ref) they ascend, so this page measures J. A Qwen3 model of "
        f"{task['layers']} layers of width {task['width']} draws paths of {task['length']} symbols out of "
        f"{task['symbols']}. The prompt chooses a graph; a path has reward 1 if the graph forbids none of its steps. "
        "From some symbols almost every step is forbidden, from others none, so that a step that costs no KL now can "
        "cost KL later. The reference has random weights, and gives right paths "
        f"{100 * mass:.0f} % of its probability.",
        f"A run has {task['updates']:,} updates of {task['groups']} groups of {task['group']} completions that no "
        "other update has, Adam with cosine decay, leave-one-out advantages and no clip. Each row has the learning "
        f"rate with the least regret of {rates}, on other seeds.",
        f"*Regret* is J* − J at the end, by exact sums over all {completions:,} completions of each prompt; "
        "J* = β·log E_ref[exp(R/β)]. Rows of forward divergences are judged by their own J, and not "
        f"compared. Numbers are means over {len(s['seeds'])} seeds ± half of a 95 % interval; differences are "
        "paired by seed. The names of the rows are those of "
        "[the laboratory](estimators.md#completions-of-several-tokens-whose-gradient-is-it).",
        _origin(kept),
    )


def _origin(kept: Kept) -> str:
    hours = sum(record["cpu_seconds"] for record in kept.runs) / 3600
    code = {f"{origin.code_name(x)}, {x['platform']}" for x in kept.code}
    mixed = f"**{len(code)} versions of the code**: " if len(code) > 1 else ""
    return (
        f"{len(kept.runs):,} runs, {hours:.1f} hours of one core; {mixed}{'; '.join(sorted(code))}. "
        "`--from-data` makes this page from the kept runs."
    )


def _verdict(found: Runs) -> str:
    ours = found.get("strengths", BASELINE)
    parts = []
    for row, name in (("per token: URKL", "URKL per token"), ("per token (GRPO): k₃", "GRPO's k₃")):
        if runs := found.get("strengths", row):
            change = {q: _mean_text(paired_difference(_of(runs, q), _of(ours, q)), sign="+") for q in ("kl", "reward")}
            regret = _against(runs, ours)
            parts.append(f"{name} has a regret of {regret} (KL {change['kl']} nats, reward {change['reward']})")
    return (
        f"**At β = {MIDDLE:g} the KL term of whole completions ends {_text(_of(ours, own_regret))} below the best "
        f"possible J. Against it, {', and '.join(parts)}.**"
    )


def _strengths(found: Runs) -> tuple[str, ...]:
    betas = found.kl_coefs("strengths")
    head = ["loss", "KL term", *(f"{'regret, β = ' if i == 0 else ''}{b:g}" for i, b in enumerate(betas))]
    head += [f"against the first row, β = {MIDDLE:g}", f"reward, β = {MIDDLE:g}", f"KL, β = {MIDDLE:g}"]
    rows = []
    for row in found.rows("strengths"):
        middle = found.get("strengths", row)
        regrets = [_text(_of(found.get("strengths", row, b), own_regret)) for b in betas]
        shown = [_text(_of(middle, quantity)) for quantity in ("reward", "kl")]
        rows.append([*_names(row), *regrets, _against(middle, found.get("strengths", BASELINE)), *shown])
    best = {b: mean([r["best_reward"] - b * r["best_kl"] for r in found.get("strengths", BASELINE, b).values()]).value
            for b in betas}  # fmt: skip
    each = ", ".join(f"{value:.3f} at β = {b:g}" for b, value in best.items())
    return (
        "## The strength of the KL term",
        f"J* is {each}. Eight updates a batch, fixed reference.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )  # fmt: skip


def _updates(found: Runs) -> tuple[str, ...]:
    def of(row: str, updates: int) -> Seeds:
        return found.get("strengths" if updates == 8 else "updates", row, updates_a_batch=updates)

    head = ["loss", "KL term", "regret, updates a batch: 1", "8", "32", "32 against 1", "32 against the first row"]
    rows = []
    for row in found.rows("updates"):
        few, many = _of(of(row, 1), own_regret), _of(of(row, 32), own_regret)
        change = _mean_text(paired_difference(many, few), sign="+") if many and few else ""
        regrets = [_text(_of(of(row, updates), own_regret)) for updates in (1, 8, 32)]
        rows.append([*_names(row), *regrets, change, _against(of(row, 32), of(BASELINE, 32))])
    return (
        "## Updates from one behaviour policy",
        f"β = {MIDDLE:g}, fixed reference.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _iterative(found: Runs) -> tuple[str, ...]:
    head = ["loss", "KL term", "reward", "KL(π_θ‖first reference)", "with the fixed reference: reward", "KL"]
    shown = [(name, quantity) for name in ("iterative", "strengths") for quantity in ("reward", "kl")]
    rows = [
        [*_names(row), *(_text(_of(found.get(name, row), quantity)) for name, quantity in shown)]
        for row in found.rows("iterative")
    ]
    return (
        "## A reference that moves",
        f"The reference becomes the policy every 16 updates, β = {MIDDLE:g}. No fixed J belongs to such a run: the "
        "table has reward and KL to the first reference.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _lengths(found: Runs) -> tuple[str, ...]:
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
    error = max(r["regret_error"] for r in found.all if "regret_error" in r)
    return (
        "## Longer completions",
        f"β = {MIDDLE:g}, 8 updates a batch. Completions beyond enumeration are judged by independent samples of the "
        f"trained policy; the standard error of one run's regret is at most {error:.3f}.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _wrong(found: Runs) -> tuple[str, ...]:
    betas = found.kl_coefs("wrong verifier")
    head = ["loss", "KL term", *(f"{'right, β = ' if i == 0 else ''}{b:g}" for i, b in enumerate(betas))]
    head += [f"{q}, β = {MIDDLE:g}" for q in ("paid", "KL")]
    rows = [
        [*_names(row), *(_text(_of(found.get("wrong verifier", row, b), "right")) for b in betas)]
        + [_text(_of(found.get("wrong verifier", row), q)) for q in ("reward", "kl")]
        for row in found.rows("wrong verifier")
    ]
    return (
        "## A verifier that is wrong",
        "The verifier pays as well for a completion that begins with the prompt's symbol twice. *Right* is the "
        "probability of completions that the graph allows, *paid* the expected reward.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _others(found: Runs) -> tuple[str, ...]:
    head = ["loss", "KL term", "regret", "against the first row", "reward", "KL(π_θ‖π_ref)", "KL(π_ref‖π_θ)"]
    base, rows = found.get("strengths", BASELINE), []
    for row in ROWS:
        runs = found.get("others", row) or found.get("strengths", row)
        if runs:
            shown = [_text(_of(runs, q)) for q in ("reward", "kl", "kl_from_ref")]
            rows.append([*_names(row), _text(_of(runs, own_regret)), _against(runs, base), *shown])
    return (
        "## All divergences and weights",
        f"β = {MIDDLE:g}, 8 updates a batch, fixed reference. Rows of forward divergences have another J; they are not "
        "compared with the first row.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _longer(found: Runs) -> tuple[str, ...]:
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
    return (
        "## Longer runs",
        f"6,400 updates instead of 1,600, each row at the best of the same three rates for so many. β = {MIDDLE:g}, 8 "
        "updates a batch, fixed reference.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )


def _middle_j(record: Record) -> float:
    """J at β = `MIDDLE` of a run that was trained with any β."""
    return record["reward"] - MIDDLE * record["kl"]


def _rates(found: Runs) -> tuple[str, ...]:
    chosen, rows = best_rates(found.all), []
    scan = [r for r in found.all if r["experiment"] == SCAN]
    rates, seeds = (sorted({r[name] for r in scan}) for name in ("rate", "seed"))
    for row, best in chosen.items():
        cells = []
        for rate in rates:
            values = [own_regret(r) for r in scan if (r["row"], r["rate"]) == (row, rate)]
            cells.append(f"{mean(values).value:.3f}" + " ←" * (rate == best))
        rows.append([*_names(row), *cells])
    ends = sum(best in (rates[0], rates[-1]) for best in chosen.values())
    head = ["loss", "KL term", *(f"{rate:g}" for rate in rates)]
    return (
        "## Learning rates",
        f"Mean regret on seeds {', '.join(map(str, seeds))} at β = {MIDDLE:g}, with 8 updates a batch and the shortest "
        "completions. Every experiment takes its rates from here; the arrow marks the rate that "
        f"the row has above. For {ends} of {len(chosen)} rows it lies at an end of the range.",
        markdown.table(head, rows, numbers=range(2, len(head))),
    )
