"""What the templates in `web/` show: the tables of the page are HTML, so a browser runs no script for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from markupsafe import Markup

from rpg_jax.report import tables
from rpg_jax.report.progress import duration
from rpg_jax.report.seeds import SEEDS_TO_RANK
from rpg_jax.report.tables import Budget, Config, Row, anchor

WEB = Path(__file__).with_name("web")
COSTS = {"steps": "trained", "completions": "completions", "seconds": "time"}


def results(configs: Sequence[Config]) -> Markup:
    """The switch between axes, the results on each, and the meaning of their marks."""
    ks = {name: own[-1].get("k") for c in configs for run in c.runs for name, own in run.evaluations.items()}
    rows = {budget: tables.rows_within(configs, budget) for budget in tables.budgets(configs)}
    by_axis = {budget.axis: results_table(configs, own, ks, budget) for budget, own in rows.items()}
    return _filled("compared", by_axis) + notes(configs, [*rows.values()][-1])


def results_table(
    configs: Sequence[Config], rows: Sequence[Row], ks: Mapping[str, int | None], budget: Budget
) -> Markup:
    """The results of each config within a budget. `ks`: the completions of a problem in each set."""
    if not (sets := [name for name in ks if any((name, "last") in row.scores for row in rows)]):
        return Markup('<p class="muted">No evaluation yet.</p>')
    costs = [axis for axis in COSTS if all(axis in row.spent for row in rows)]
    lines = list(zip(configs, rows, strict=True))
    return _filled("results", lines, sets, ks, costs, anchor_letters(configs), budget)


def anchor_letters(configs: Sequence[Config]) -> dict[str, str]:
    """A letter for each reference policy of a KL; no letters if all configs have the same reference policy."""
    anchors = list(dict.fromkeys(map(anchor, configs)))
    return {name: chr(ord("a") + i) for i, name in enumerate(anchors)} if len(anchors) > 1 else {}


def notes(configs: Sequence[Config], rows: Sequence[Row]) -> Markup:
    """Explains the marks of the results, names the parents of branches, and warns if KLs have different anchors."""
    return _filled("notes", configs, any(row.ranks for row in rows), SEEDS_TO_RANK, anchor_letters(configs))


def number(x: float) -> str:
    """Three digits: 12,345 · 123 · 1.23 · 0.0123 · 3.6e−7."""
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
    """The HTML of a macro of `web/tables.html`."""
    return getattr(templates().get_template("tables.html").module, macro)(*values)


@functools.cache
def templates() -> jinja2.Environment:
    """The templates in `web/`. They write values in ASCII: a special character becomes a reference, as &#960;."""

    def escaped(value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        return Markup(markupsafe.escape(value).encode("ascii", "xmlcharrefreplace").decode())

    how: dict[str, Any] = {"autoescape": True, "finalize": escaped, "trim_blocks": True, "lstrip_blocks": True}
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(WEB), undefined=jinja2.StrictUndefined, **how)
    made.filters.update(number=number, cost=_cost, anchor=anchor, heading=COSTS.__getitem__)
    made.globals.update(zip=zip)
    return made
