"""The tables of the page as HTML, which a browser shows without running a script. Text of runs is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import QUANTITIES
from rpg_jax.report.seeds import SEEDS_TO_RANK, Mean
from rpg_jax.report.tables import Budget, Config, Json, Row, anchor

HEADS = {"last": "Last", "best": "Best", "pass": "pass@"}
COSTS = {"steps": "trained", "completions": "completions", "seconds": "time"}
BASELINE_NOTE = (
    "&Delta; is Last minus Last of the first row, paired by seed, in points; it is <em>in italics</em> if its 95 % "
    "interval excludes 0. One of twenty such intervals excludes 0 by chance."
)
ASIDE = "The seed and the fields that say where a run is and what it logs do not count."


class Markup(str):
    """A text that is markup already. `element` escapes every other text."""


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An HTML element, as `element("td", "1.0", class_="number")`. `_` in a name is a hyphen, a last `_` is dropped."""
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    opened = "".join(f' {name}="{escape(value)}"' for name, value in given)
    return Markup(f"<{tag}{opened}>" + ("" if tag == "input" else f"{''.join(map(escape, children))}</{tag}>"))


def escape(content: object) -> str:
    """Returns `Markup` unchanged, and any other text in ASCII with references in place of special characters."""
    if isinstance(content, Markup):
        return content
    return html.escape(str(content)).encode("ascii", "xmlcharrefreplace").decode()


def results_table(
    configs: Sequence[Config], rows: Sequence[Row], ks: Mapping[str, int | None], budget: Budget
) -> Markup:
    """A sentence on the budget, each config's scores within the budget, and why a difference is left out.

    `ks`: the completions of a problem.
    """
    sets = [name for name in ks if any((name, "last") in row.scores for row in rows)]
    if not sets:
        return element("p", "No evaluation yet.", class_="muted")
    delta = ["Δ Last"] if len(configs) > 1 else []
    costs = [axis for axis in COSTS if all(axis in row.spent for row in rows)]
    letters = anchor_letters(configs)
    heads = []
    for name in sets:
        heads += [*(HEADS[q] + str(ks[name] or "k") * (q == "pass") for q in QUANTITIES), *delta]
    heads += ["KL, mnats", "seeds", "Last is of", *(COSTS[axis] for axis in costs)]
    lines = []
    for i, (config, row) in enumerate(zip(configs, rows, strict=True)):
        cells: list[object] = []
        for name in sets:
            cells += [_score(row.scores.get((name, q)), row.ranks.get((name, q))) for q in QUANTITIES]
            cells += [_difference(row.differences.get(name)) if i else element("small", "baseline") for _ in delta]
        at = "–".join(str(s) for s in sorted({row.steps[0], row.steps[-1]})) if row.steps else ""
        cells += [_kl(row.kl, letters.get(anchor(config), "")), row.seeds, f"step {at}" if at else "–"]
        cells += [_cost(axis, row.spent[axis]) for axis in costs]
        key = element("i", class_=f"key hue-{i % 6} dash-{i // 6 % 3}", aria_hidden="true")  # six hues, then dashes
        lines.append(_line((key, config.label), cells))
    top = [element("th", name, scope="colgroup", colspan=len(QUANTITIES) + len(delta)) for name in sets]
    top = [element("td"), *top, element("td", colspan=3 + len(costs))]
    sentence = f"Every run is shown at its last evaluation within {budget.text}: all that {budget.run} has spent."
    head = element("thead", element("tr", *top), element("tr", *map(_head, ["", *heads])))
    table = element("table", head, element("tbody", *lines))
    left_out = [
        element("p", f"{config.label}: Δ of {name} is left out, because {why}.", class_="warning", role="note")
        for config, row in zip(configs, rows, strict=True)
        for name, why in row.left_out.items()
    ]
    return Markup(
        "".join((element("p", sentence, class_="note"), _wide(table, f"Results at equal {budget.axis}"), *left_out))
    )


def anchor_letters(configs: Sequence[Config]) -> dict[str, str]:
    """A letter for each reference policy of a KL; no letters if all configs have the same reference policy."""
    anchors = list(dict.fromkeys(map(anchor, configs)))
    return {name: chr(ord("a") + i) for i, name in enumerate(anchors)} if len(anchors) > 1 else {}


def notes(configs: Sequence[Config], rows: Sequence[Row]) -> Markup:
    """Explains the marks of the results, names the parents of branches, and warns if KLs have different anchors."""
    parts = []
    if any(row.ranks for row in rows):
        parts.append("In each column the <b>best</b> value is bold, the <u>second</u> underlined.")
    elif len(configs) > 1:
        parts.append(f"No value is bold: some row has fewer than {SEEDS_TO_RANK} seeds.")
    if len(configs) > 1:
        parts.append(BASELINE_NOTE)
    found = [element("p", Markup(" ".join(parts)), class_="note")] if parts else []
    for run in (run for config in configs for run in config.runs if run.parent):
        begun = f"{run.name} was begun from {run.parent}: its completions and its time are counted from there."
        found.append(element("p", begun, class_="note"))
    if letters := anchor_letters(configs):
        named = "; ".join(f"{letter}: to {name}" for name, letter in letters.items())
        warning = f"KLs with different letters have different anchors and cannot be compared. {named}."
        found.append(element("p", warning, class_="warning", role="note"))
    return Markup("".join(found))


def timing_table(configs: Sequence[Config], timing: Json) -> Markup:
    """The mean seconds of each part of a step, and its share of the step."""
    lines = []
    for config, row in ((c, row) for c, row in zip(configs, timing["rows"], strict=True) if row):
        seconds, total = [*row["seconds"], max(row["total"] - sum(row["seconds"]), 0)], row["total"] or 1
        shares = [Markup(escape(number(s)) + _small(f"{100 * s / total:.0f} %")) for s in seconds]
        cells = [*shares, *(number(row[name]) for name in ("total", "tokens_per_second", "compiling"))]
        lines.append(_line([config.label], cells))
    names = ["", *timing["parts"], "other", "step, s", "tokens/s", "compiling, s per run"]
    head = element("thead", element("tr", *map(_head, names)))
    return _wide(element("table", head, element("tbody", *lines), id="timing-table"), "Table of times")


def configs_table(configs: Sequence[Config], differences: Sequence[Json]) -> Markup:
    """The fields whose values differ between configs."""
    if not differences:
        return element("p", f"All runs have the same config. {ASIDE}", class_="note")
    head = element("tr", element("td"), *(element("th", c.label, scope="col") for c in configs))
    lines = [
        element("tr", element("th", element("code", row["field"]), scope="row"),
                *(element("td", element("code", value)) for value in row["values"]))
        for row in differences
    ]  # fmt: skip
    note = element("p", f"Fields of config.json that differ: {len(differences)}. {ASIDE}", class_="note")
    table = element("table", element("thead", head), element("tbody", *lines), id="configs-table")
    return Markup(note + _wide(table, "Table of config fields"))


def number(x: float) -> str:
    """Three digits: 12,345 · 123 · 1.23 · 0.0123 · 3.6e−7."""
    if not x or not math.isfinite(x):
        return "0" if x == 0 else _minus(str(x))
    size = float(f"{abs(x):.2e}")
    if size < 1e-3:
        return _minus(f"{x:.1e}".replace("e-0", "e-"))
    return _minus(f"{x:,.{min(max(2 - math.floor(math.log10(size)), 0), 4)}f}")


def _cost(axis: str, amount: float) -> str:
    return duration(amount) if axis == "seconds" else f"{amount:,.0f}{' steps' * (axis == 'steps')}"


def _score(m: Mean | None, rank: int | None) -> Markup:
    if m is None:
        return Markup("&#8211;")
    text = element({1: "b", 2: "u"}.get(rank or 0, "span"), f"{m.value:.1f}")
    return Markup(text + _small(m.margin.strip()))


def _difference(m: Mean | None) -> Markup:
    if m is None:
        return Markup("&#8211;")
    text = element("em" if abs(m.value) > m.half else "span", _minus(f"{m.value:+.1f}"))
    return Markup(text + _small(m.margin.strip()))


def _kl(m: Mean | None, letter: str) -> Markup:
    if m is None:
        return Markup("&#8211;")
    half = "" if math.isnan(m.half) else f"± {number(m.half)}"
    return Markup(escape(number(m.value)) + (element("sup", letter) if letter else "") + _small(half))


def _small(text: str) -> Markup:
    return element("small", text)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _head(text: str) -> Markup:
    return element("th", text, scope="col", class_="number") if text else element("td")


def _line(name: Iterable[object], cells: Iterable[object]) -> Markup:
    return element("tr", element("th", *name, scope="row"), *(element("td", cell, class_="number") for cell in cells))


def _wide(table: Markup, label: str) -> Markup:
    return element("div", table, class_="wide", tabindex=0, role="region", aria_label=label)
