"""Writes `report.html`: one page that compares runs and browses their rollouts, without a server or a network.

The page is made of the files in `web/`, of tables, and of the data of figures and rollouts, as text that no browser
executes. Text of runs is not trusted: Jinja escapes this text, and scripts make text nodes of it. A content
security policy allows our script, by its hash, but no other script and no request. Without scripts the page shows
its tables, which is all but curves and rollouts.
"""

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np
from markupsafe import Markup

from rpg_jax.report import rollouts, tables
from rpg_jax.report.plots import CONVERSATION_PANELS, PANELS, SUPERVISED_PANELS, Panel, curves_of, shared_points, smooth
from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import Run
from rpg_jax.report.seeds import SEEDS_TO_RANK
from rpg_jax.report.tables import Budget, Config, Json
from rpg_jax.storage import write_atomically

WEB = Path(__file__).with_name("web")
SCRIPTS = ("core.js", "figures.js", "rollouts.js", "tokens.js", "browser.js")
ROLLOUT_STEPS = 8  # of each run, by default
DYNAMICS = (
    SUPERVISED_PANELS[0],
    *PANELS,
    *CONVERSATION_PANELS,
    Panel("Sampler–trainer gap", "nats per token, mean of absolute values", "sampler_gap"),
    Panel("KL term's share of the gradient", "%, by norms over trained tokens", "kl_gradient_share", 100),
    Panel("Gradient norm", "before it is clipped", "grad_norm"),
    Panel("Learning rate", "of the step's last update", "learning_rate"),
    Panel("Speed", "completion tokens per second", "tokens_per_second"),
)
COMPILING = ("time/compilations", "time/compiling")  # other times include these
BETWEEN_STEPS = ("time/evaluation", "time/checkpoint")  # not in a step's "seconds"
POINTS = 400  # most points of a curve
COSTS = {"steps": "trained", "completions": "completions", "seconds": "time"}  # axis: the head of its column


def write_page(runs: Sequence[Run], out: Path, *, rollout_steps: int = ROLLOUT_STEPS) -> Path:
    """Writes `page_of` these runs to the HTML file `out`, and makes its folder; returns `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page_of(runs, rollout_steps=rollout_steps))
    return out


def page_of(runs: Sequence[Run], *, rollout_steps: int = ROLLOUT_STEPS) -> str:
    """The page in HTML of runs that were read from their folders, finished or not, each with a step at least. The page
    holds the rollouts of at most `rollout_steps` steps of each run, spread evenly over the steps with a rollout file. A
    line on stderr names each rollout file that cannot be read."""
    configs = tables.configs_of(runs)
    data, chunks = _page_data(configs, rollout_steps=rollout_steps)
    style = (WEB / "page.css").read_text(encoding="utf-8")
    script = "\n".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)
    page = _templates().get_template("page.html")
    return page.render(
        style_hash=_hash(style),
        script_hash=_hash(script),
        style=Markup(style),
        script=Markup(script),
        runs=[run for config in configs for run in config.runs],
        configs=configs,
        results=_results(configs),
        timing=timing(configs),
        differences=tables.differences(configs),
        data=Markup(_embedded(data)),
        chunks=chunks,
    )


def is_page(file: Path) -> bool:
    """Whether `file` is a page that `write_page` wrote, by its first bytes. False for a folder or a missing file."""
    head = (WEB / "page.html").read_bytes()[:60]
    return file.is_file() and file.read_bytes()[: len(head)] == head


def _results(configs: Sequence[Config]) -> Markup:
    """HTML with the switch between the axes of `tables.budgets`, a table for each axis, and the tables' `notes`."""
    ks = {name: own[-1].get("k") for c in configs for run in c.runs for name, own in run.evaluations.items()}
    rows = {budget: tables.rows_within(configs, budget) for budget in tables.budgets(configs)}
    by_axis = {budget.axis: results_table(configs, own, ks, budget) for budget, own in rows.items()}
    return _filled("compared", by_axis) + notes(configs, [*rows.values()][-1])


def results_table(
    configs: Sequence[Config], rows: Sequence[tables.Row], ks: Mapping[str, int | None], budget: Budget
) -> Markup:
    """The HTML of the table of `rows`, one for each config within `budget`; a note if there is no evaluation. `ks` is
    {held-out set: completions of each problem, None if unknown}, in the order of the columns."""
    if not (sets := [name for name in ks if any((name, "last") in row.scores for row in rows)]):
        return Markup('<p class="muted">No evaluation yet.</p>')
    costs = [axis for axis in COSTS if all(axis in row.spent for row in rows)]
    lines = list(zip(configs, rows, strict=True))
    return _filled("results", lines, sets, ks, costs, _anchor_letters(configs), budget)


def _anchor_letters(configs: Sequence[Config]) -> dict[str, str]:
    """{what `tables.anchor` says of a config: its letter, from "a" on}; {} if it says the same of all configs."""
    anchors = list(dict.fromkeys(map(tables.anchor, configs)))
    return {name: chr(ord("a") + i) for i, name in enumerate(anchors)} if len(anchors) > 1 else {}


def notes(configs: Sequence[Config], rows: Sequence[tables.Row]) -> Markup:
    """HTML that explains the marks in `rows`, names the parents of branches, and warns if the configs' KLs are to
    different reference policies."""
    return _filled("notes", configs, any(row.ranks for row in rows), SEEDS_TO_RANK, _anchor_letters(configs))


def _number(x: float) -> str:
    """The number as text, with two or three digits, or all before the point: 12,345 · 123 · 1.23 · 0.0012 · 3.6e−7."""
    size = float(f"{abs(x):.2e}")
    if not x or not math.isfinite(x):
        text = "0" if x == 0 else str(x)
    elif size < 1e-3:
        text = f"{x:.1e}".replace("e-0", "e-")
    else:
        text = f"{x:,.{min(max(2 - math.floor(math.log10(size)), 0), 4)}f}"
    return text.replace("-", "−")


def _cost(amount: float, axis: str) -> str:
    return duration(amount) if axis == "seconds" else f"{amount:,.0f}{' steps' * (axis == 'steps')}"


def _filled(macro: str, *values: Any) -> Markup:
    """The HTML of a macro of `web/tables.html`, whose arguments are `values`."""
    return getattr(_templates().get_template("tables.html").module, macro)(*values)


@functools.cache
def _templates() -> jinja2.Environment:
    """The templates in `web/`. They write values in ASCII: a special character becomes a reference, as &#960;."""

    def escaped(value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        return Markup(markupsafe.escape(value).encode("ascii", "xmlcharrefreplace").decode())

    how: dict[str, Any] = {"autoescape": True, "finalize": escaped, "trim_blocks": True, "lstrip_blocks": True}
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(WEB), undefined=jinja2.StrictUndefined, **how)
    made.filters.update(number=_number, cost=_cost, anchor=tables.anchor, heading=COSTS.__getitem__)
    made.globals.update(zip=zip)
    return made


def _page_data(configs: Sequence[Config], *, rollout_steps: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the data of figures and rollouts, as JSON can hold them, and the `Rollouts.packed` of all rollout files
    that are shown. The data name a packed text by its index."""
    chunks: list[str] = []
    numbers = []
    shown = []
    for c, config in enumerate(configs):
        for run in config.runs:
            assert run.folder is not None
            read = [*rollouts.read_all(rollouts.files(run.folder, steps=rollout_steps))]
            numbered = enumerate(read, start=len(chunks))
            kept = [{"chunk": i, "step": r.text["step"], "completions": len(r.lengths)} for i, r in numbered]
            chunks += [r.packed for r in read]
            numbers += [r.numbers for r in read]
            steps = run.records[-1]["step"]
            backwards = run.config.get("task.name") == "arithmetic" and run.config.get("task.reverse", False)
            about = {"name": run.name, "config": c, "seed": run.seed, "steps": steps, "backwards": backwards}
            shown.append({**about, "kept": kept})
    panels = dynamics(configs)
    data = {
        "configs": [c.label for c in configs],
        "runs": shown,
        "dynamics": panels,
        "axes": [_axis(budget, configs, panels) for budget in tables.budgets(configs)],
        "numbers": rollouts.NUMBERS,
        "scales": rollouts.scales(numbers),
    }
    return data, chunks


def dynamics(configs: Sequence[Config]) -> list[Json]:
    """[{"title": text, "unit": text, "curves": one for each config}] of the panels of `DYNAMICS` that any run has. A
    curve is None if the config's runs lack the metric, or in place of it the panel's held-out metric. Else it has lists
    over at most `POINTS` steps, evenly among those that all seeds with the metric have: "steps"; "mean", "low" and
    "high" of the seeds' moving averages; "raw", the mean without moving averages. If the panel has a held-out metric,
    "held_out" has its points [step, mean]."""
    curves = {panel: [_curve(c, panel) for c in configs] for panel in DYNAMICS}
    differ = "; anchors differ: do not compare" if len({tables.anchor(c) for c in configs}) > 1 else ""
    units = {panel: panel.unit + differ * (panel.key == "kl") for panel in curves}
    return [{"title": panel.title, "unit": units[panel], "curves": own} for panel, own in curves.items() if any(own)]


def timing(configs: Sequence[Config]) -> Json:
    """Mean seconds of each part of a step, over all timed steps that did not compile. Evaluations and checkpoints come
    between steps; their time is spread over all steps.

    Returns {"parts": names in order, "rows": one for each config}. A row is None without such steps, else {"seconds":
    [one for each part], "total": seconds of a step with its share of evaluations and checkpoints, "tokens_per_second":
    the rate within steps, "compiling": seconds of all compilations of a run, the mean over runs}."""
    timed = [
        [r for run in c.runs for r in run.records if "seconds" in r and not r.get("time/compiling")] for c in configs
    ]
    keys = dict.fromkeys(k for own in timed for r in own for k in r if k.startswith("time/") and k not in COMPILING)
    rows = [_times(c, own, list(keys)) if own else None for c, own in zip(configs, timed, strict=True)]
    parts = [k.removeprefix("time/").replace("_", " ").replace("logprobs", "log-probs") for k in keys]
    return {"parts": parts, "rows": rows}


def _times(config: Config, records: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Json:
    def mean_of(key: str) -> float:
        return sum(r.get(key) or 0.0 for r in records) / len(records)

    seconds = {key: mean_of(key) for key in keys}
    step = mean_of("seconds")
    tokens = sum(r["seconds"] * (r.get("tokens_per_second") or 0.0) for r in records) / len(records)
    compiling = [sum(r.get("time/compiling") or 0.0 for r in run.records) for run in config.runs]
    return {
        "seconds": list(seconds.values()),
        "total": step + sum(seconds.get(key, 0.0) for key in BETWEEN_STEPS),
        "tokens_per_second": tokens / step if step else 0.0,
        "compiling": sum(compiling) / len(compiling),
    }


def _curve(config: Config, panel: Panel) -> Json | None:
    trained, held_out = (curves_of(config.runs, key) for key in (panel.key, panel.held_out))
    if not any(curves := trained if any(trained) else held_out):
        return None
    steps, values = shared_points(curves)
    raw = panel.scale * values
    averaged = np.array([smooth(row) for row in raw])
    kept = rollouts.evenly(len(steps), POINTS)
    found: Json = {"steps": [steps[i] for i in kept], "raw": _rounded(raw.mean(0)[kept])}
    for name, values in (("mean", averaged.mean(0)), ("low", averaged.min(0)), ("high", averaged.max(0))):
        found[name] = _rounded(values[kept])
    if panel.held_out:
        at, scores = shared_points(held_out)
        found["held_out"] = [[step, float(panel.scale * each.mean())] for step, each in zip(at, scores.T, strict=True)]
    return found


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def _embedded(data: Any) -> str:
    """JSON that can stand in a script element: no text in it can end the element or break a line."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _axis(budget: Budget, configs: Sequence[Config], panels: Sequence[Json]) -> dict[str, Any]:
    """The data of an axis of the figures: its unit, the budget, and {step: cost} of each config, both in this unit, for
    the steps that the config's curves of `panels` have. A cost is the mean over the config's runs; steps after the last
    that all of them have reached cost as much as this one."""
    costs = []
    for i, config in enumerate(configs):
        last = int(min(run.spent("steps") for run in config.runs))
        own = [panel["curves"][i] for panel in panels if panel["curves"][i]]
        steps = sorted({last, *(s for c in own for s in (*c["steps"], *(s for s, _ in c.get("held_out", ()))))})
        of_runs = [np.array([*run.costs[budget.axis].items()]).T for run in config.runs]  # steps and costs
        at = np.minimum(steps, last)
        means = np.mean([cost[np.searchsorted(ends, at, "right") - 1] for ends, cost in of_runs], axis=0)
        costs.append(dict(zip(steps, means.tolist(), strict=True)))
    unit, scale = budget.axis, 1
    if budget.axis == "seconds":
        longest = max(max(own.values()) for own in costs)
        unit, scale = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    scaled = [{step: float(f"{cost / scale:.6g}") for step, cost in own.items()} for own in costs]
    return {"name": budget.axis, "unit": unit, "budget": budget.amount / scale, "costs": scaled}


def _hash(text: str) -> str:
    """The name of an inline script or style, whose content is `text`, in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
