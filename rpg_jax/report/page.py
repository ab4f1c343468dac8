"""Writes `report.html`: one page that compares runs and browses their rollouts, without a server or a network.

The page is made of the files in `web/`, of tables, and of the data of figures and rollouts, as text that no browser
executes. Text of runs is not trusted: tables hold it escaped, all other parts make text nodes of it. A content security
policy allows our script, by its hash, and nothing else: no other script and no request. Without scripts the page shows
its tables, which is all but curves and rollouts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report import budgets, compare, dynamics, html_tables, rollouts
from rpg_jax.storage import write_atomically

WEB = Path(__file__).with_name("web")
SCRIPTS = ("core.js", "figures.js", "rollouts.js", "tokens.js", "browser.js")
ROLLOUT_STEPS = 8  # of each run, by default
NAMED = 8  # most runs that are named under the title


def write_page(run_dirs: Sequence[Path], out: Path, *, rollout_steps: int = ROLLOUT_STEPS) -> Path:
    """Writes the page of runs, finished or not, to the file `out` and returns its path.

    The page holds the rollouts of at most `rollout_steps` steps of each run. They lie evenly among the kept steps.

    Raises:
      ValueError: a run has no steps, or its folder has a broken file.
    """
    runs = [compare.Run.read(folder) for folder in run_dirs]
    if empty := [str(run.folder) for run in runs if not run.records]:
        raise ValueError(f"no steps in {', '.join(empty)}: metrics.jsonl is missing or empty; run at least one step")
    configs = compare.configs_of(runs)
    courses = budgets.courses_of(configs)
    data, chunks = page_data(configs, courses, rollout_steps=rollout_steps)
    style = (WEB / "page.css").read_text(encoding="utf-8")
    script = "\n".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)
    contents = {
        "STYLE-HASH": _hash(style),
        "SCRIPT-HASH": _hash(script),
        "STYLE": style,
        "SCRIPT": script,
        "RUNS": _names(configs),
        "RESULTS": _results(configs, courses),
        "TIMING": html_tables.timing_table(configs, dynamics.timing(configs)),
        "CONFIGS": html_tables.configs_table(configs, compare.differences(configs)),
        "CHUNKS": "\n".join(f'<script type="text/plain" id="chunk-{i}">{c}</script>' for i, c in enumerate(chunks)),
        "DATA": embedded(data),
    }
    page = (WEB / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"%([A-Z-]+)%", lambda mark: contents[mark[1]], page)  # once: the text of runs may look like a mark
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def page_data(
    configs: Sequence[compare.Config], courses: Sequence[Sequence[budgets.Course]], *, rollout_steps: int
) -> tuple[dict[str, Any], list[str]]:
    """What figures and rollouts show: JSON-able data, and the packed rollouts that it names by their indices."""
    chunks: list[str] = []
    numbers = []
    shown = []
    for c, config in enumerate(configs):
        for run in config.runs:
            read = [rollouts.Rollouts.read(file) for file in rollouts.files(run.folder, steps=rollout_steps)]
            worst = sorted((g for r in read for g in r.worst_gaps()), key=lambda g: -abs(g["gap"]))[: rollouts.WORST]
            first = len(chunks)
            chunks += [r.packed() for r in read]
            numbers += [r.numbers for r in read]
            kept = [{"chunk": first + i, "step": r.step, "completions": len(r.lengths)} for i, r in enumerate(read)]
            seed, steps = run.config.get("seed"), run.records[-1]["step"]
            backwards = run.config.get("task.name") == "arithmetic" and run.config.get("task.reverse", False)
            about = {"name": run.name, "config": c, "seed": seed, "steps": steps, "backwards": backwards}
            shown.append({**about, "kept": kept, "worst": worst})
    data = {
        "configs": [c.label for c in configs],
        "runs": shown,
        "dynamics": dynamics.dynamics(configs),
        "axes": [_axis(budget, courses) for budget in budgets.budgets(courses)],
        "numbers": rollouts.NUMBERS,
        "scales": rollouts.scales(numbers),
    }
    return data, chunks


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: no text in it can end the element or break a line."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _axis(budget: budgets.Budget, courses: Sequence[Sequence[budgets.Course]]) -> dict[str, Any]:
    """An axis of the figures: its unit, the budget, and each config's costs by step, from step 0."""
    costs = [budgets.mean_costs(own, budget.axis) for own in courses]
    unit, scale = budget.axis, 1
    if budget.axis == "seconds":
        longest = max(max(own) for own in costs)
        unit, scale = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    costs = [[float(f"{cost / scale:.6g}") for cost in own] for own in costs]
    return {"name": budget.axis, "unit": unit, "budget": budget.amount / scale, "costs": costs}


def _results(configs: Sequence[compare.Config], courses: Sequence[Sequence[budgets.Course]]) -> str:
    """The switch between axes, and the results on each; the style sheet shows those of the chosen axis."""
    ks = {name: rows[-1].get("k") for own in courses for c in own for name, rows in c.evaluated.items()}
    choices, tables, rows = [], [], []
    for i, budget in enumerate(budgets.budgets(courses)):
        given = {"checked": "checked"} if not i else {}
        radio = html_tables.element("input", type="radio", name="axis", value=budget.axis, **given)
        choices.append(html_tables.element("label", radio, f" {budget.axis}"))
        rows = budgets.results(courses, budget)
        table = html_tables.results_table(configs, rows, ks, budget)
        tables.append(html_tables.element("div", table, class_="at-equal", data_axis=budget.axis))
    legend = html_tables.element("legend", "Compare at equal")
    switch = html_tables.element("fieldset", legend, *choices, class_="switch")
    return "".join((switch, *tables, html_tables.notes(configs, rows)))


def _names(configs: Sequence[compare.Config]) -> str:
    """The runs under the title: their names, or their number where they are many."""
    runs = [run for config in configs for run in config.runs]
    if len(runs) > NAMED:
        return f"{len(runs)} runs of {len(configs)} configs"
    return html_tables.escape("  ·  ".join(f"{run.name} ({run.records[-1]['step']} steps)" for run in runs))


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
