"""Tables of runs: a row is a config over its seeds, a column a quantity with a unit and an interval.

Rows are compared at an equal cost: as many steps, completions or seconds as the cheapest run has spent at its end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import AROUND, QUANTITIES, START_FROM, Run, Scores
from rpg_jax.report.seeds import Mean, mean, paired_difference, ranks_of

SHOWN_FIELDS = 2  # most fields in a label
AXES = ("steps", "completions", "seconds")  # of `Run.costs`

Json = dict[str, Any]
Name = TypeVar("Name")


@dataclasses.dataclass(frozen=True)
class Config:
    """Runs whose configs differ only in seed, places, logs and servers. `label` is the method and two fields, or all if
    another config would have an equal label."""

    label: str
    runs: Sequence[Run]

    @property
    def fields(self) -> Mapping[str, Any]:
        """{dotted name: value} of the config of the first run."""
        return self.runs[0].config


def configs_of(runs: Sequence[Run]) -> list[Config]:
    """Groups runs by config, branches by their first weights too, in the order of the first run of each. Runs without
    config.json are grouped by name. Of several runs of one seed the last counts: a repeated run is no second seed.
    stderr names the runs left out."""
    by_fields: dict[str, dict[Any, Run]] = {}
    for run in runs:
        counted = {k: v for k, v in run.config.items() if not _is_aside(k)}
        key = json.dumps([counted or run.name, run.parent and run.start], sort_keys=True)
        seeds = by_fields.setdefault(key, {})
        seed = run.folder if run.seed is None else run.seed
        if seed in seeds:
            print(f"left out: {seeds[seed].name}: {run.name} has the same config and seed", file=sys.stderr)
        seeds[seed] = run
    groups = [list(seeds.values()) for seeds in by_fields.values()]
    firsts = [own[0] for own in groups]
    short = [_label(run, firsts, SHOWN_FIELDS) for run in firsts]
    labels = [text if short.count(text) == 1 else _label(run, firsts) for text, run in zip(short, firsts, strict=True)]
    return [Config(label, own) for label, own in zip(labels, groups, strict=True)]


def _is_aside(field: str) -> bool:
    """Whether runs of one config may differ in a field: the seed, the place of warm starts, or a field of the sections
    `AROUND`, such as places, logs and servers. They may not differ in the run that they branched from."""
    return field in ("seed", "warm_start.dir") or (field.startswith(AROUND) and field != START_FROM)


def differences(configs: Sequence[Config]) -> list[Json]:
    """[{"field": name, "values": [its text in each config]}] of the fields in which configs differ, sorted by name.
    Seed, places, logs and servers are left out. A field that a config lacks has the text "–"."""
    names = dict.fromkeys(name for c in configs for name in c.fields if not _is_aside(name))
    rows = [{"field": name, "values": [_text(c.fields.get(name)) for c in configs]} for name in sorted(names)]
    return [row for row in rows if len(set(row["values"])) > 1]


def anchor(config: Config) -> str:
    """The reference policy of a config's KL in words, as "the initial policy (1f)"; "unknown" without config.json. A
    rule without words here has its name and the fields of `reference` that only such rules read: "halves, share 2"."""
    section = {k.removeprefix("reference."): v for k, v in config.fields.items() if k.startswith("reference.")}
    rule, every, threshold, _ = (section.pop(name, None) for name in ("rule", "every", "kl_threshold", "resident"))
    own = f" ({run.start})" if (run := config.runs[0]).start and not run.parent else ""  # a branch has its parent's
    words = {None: "unknown", "fixed": f"the initial policy{own}", "behaviour": "the policy that sampled"}
    words |= {"every": f"the policy after every {every}", "kl": f"the policy after the last KL above {threshold} nats"}
    words |= {"teacher": f"the teacher {section.get('path')}"}
    return words.get(rule) or ", ".join([str(rule), *(f"{k} {_text(v)}" for k, v in section.items() if v is not None)])


def _label(run: Run, all_runs: Sequence[Run], most: int | None = None) -> str:
    """The method's name, and the first `most` fields (None: all) in which `run` differs from another run of the method
    in `all_runs`, with its values; "…" for further fields. Fields as loss.name come first, then all by name. Without
    config.json, the name of the run."""
    if run.config.get("method") is None:
        return run.name
    rivals = [r.config for r in all_runs if r.method == run.method]
    names = sorted({k for r in rivals for k in r if not _is_aside(k)}, key=lambda k: (not k.endswith(".name"), k))
    fields = [k for k in names if any(r.get(k) != run.config.get(k) for r in rivals)]
    parts = [f"{k.rpartition('.')[2]} {_text(run.config.get(k))}" for k in fields[:most]]
    start = [f"first weights {run.start}"] if run.parent and most is None else []  # of equal texts in `start_from`
    return ", ".join([str(run.method), *parts, *(["…"] if len(parts) < len(fields) else start)])


def _text(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Collection[int] = ()) -> str:
    """A table in Markdown. The columns whose indices are in `numbers` are aligned to the right. In the cells, shown by
    `str`, `|` is escaped and a line break becomes a blank; other markup stays."""
    rule = ("--:" if column in numbers else "---" for column in range(len(head)))
    return "\n".join([_markdown_line(head), f"|{'|'.join(rule)}|", *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[object]) -> str:
    texts = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return " ".join(part for text in texts for part in ("|", text) if part) + " |"


@dataclasses.dataclass(frozen=True)
class Budget:
    """The cost at which runs are compared: `amount` steps, completions or seconds, as `axis` says. The cheapest run,
    whose name is `run`, has spent this amount until its end."""

    axis: str
    amount: float
    run: str  # the name of the cheapest run

    @property
    def text(self) -> str:
        """The amount with its unit, as "1,024 completions" or "3 min 05 s"."""
        return duration(self.amount) if self.axis == "seconds" else f"{self.amount:,.0f} {self.axis}"


def budgets(configs: Sequence[Config]) -> list[Budget]:
    """The budgets of the axes in `AXES` that all runs record: of each axis, all that the cheapest run has spent."""
    runs = [run for config in configs for run in config.runs]
    found = []
    for axis in AXES:
        if all(axis in run.costs for run in runs):
            cheapest = min(runs, key=lambda run: run.spent(axis))
            found.append(Budget(axis, cheapest.spent(axis), cheapest.name))
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of a config at the cost of a budget, by held-out set and quantity: "last", "best" or "pass".

    Attributes:
      seeds: the number of runs with an evaluation within the budget.
      steps: the steps of the runs' last evaluations within the budget, sorted, each once.
      spent: {axis that all runs of the config record: cost up to the last step within the budget, the mean over runs}.
      scores: {(set, quantity): score in %}.
      ranks: {(set, quantity): 1 for the best config, 2 for the second, …}. A column has no ranks if it has fewer than
        two configs, if a config in it has fewer than three seeds, or if evaluations cannot be compared.
      differences: {set: Last minus Last of the first config in percentage points, paired by seed}, without sets in
        `left_out` or without a common seed; {} in the first row.
      left_out: {set: why its evaluations cannot be compared with those of the first config}.
      kl: KL to the reference, millinats per token, over the last third of the steps in the budget; None without it.
    """

    seeds: int
    steps: Sequence[int]
    spent: Mapping[str, float]
    scores: Mapping[tuple[str, str], Mean]
    ranks: Mapping[tuple[str, str], int]
    differences: Mapping[str, Mean]
    left_out: Mapping[str, str]
    kl: Mean | None


def columns(scores: Mapping[Name, Mapping[Any, Scores]]) -> dict[tuple[str, str], dict[Name, dict[Any, float]]]:
    """{(held-out set, one of `QUANTITIES`): {row: {seed: score in %}}} of {row: {seed: `Run.scores`}}, in order."""
    found: dict[tuple[str, str], dict[Name, dict[Any, float]]] = {}
    for row, by_seed in scores.items():
        for seed, by_set in by_seed.items():
            for name, own in by_set.items():
                for quantity in QUANTITIES:
                    found.setdefault((name, quantity), {}).setdefault(row, {})[seed] = 100 * own[quantity]
    return found


def rows_within(configs: Sequence[Config], budget: Budget) -> list[Row]:
    """A row for each config, in order, with intervals over seeds and differences to the first config. A run counts up
    to its last step within the budget, at least step 0. Raises KeyError if a run does not record the budget's axis."""
    cuts = [[(run, run.last_step_within(budget.axis, budget.amount)) for run in config.runs] for config in configs]
    scored = [[(run, s) for run, step in own if (s := run.scores(step))] for own in cuts]
    # Runs without a seed are paired with no other run.
    by_seed = ({run.folder if run.seed is None else run.seed: s for run, s in own} for own in scored)
    found = columns(dict(enumerate(by_seed)))
    means: list[dict[tuple[str, str], Mean]] = [{} for _ in configs]
    ranked: list[dict[tuple[str, str], int]] = [{} for _ in configs]
    for (name, quantity), by_row in found.items():
        column = {i: mean(list(own.values())) for i, own in by_row.items()}
        for i, m in column.items():
            means[i][name, quantity] = m
        comparable = not _unlike([each for own in scored for each in own], name)
        for i, rank in zip(column, ranks_of(list(column.values())) if comparable else (), strict=False):
            ranked[i][name, quantity] = rank
    lasts = {name: by_row for (name, quantity), by_row in found.items() if quantity == "last"}
    rows = []
    for i, own in enumerate(cuts):
        kls = [1000 * value for run, step in own if not math.isnan(value := run.late("kl", step))]
        left_out = {name: why for name, _ in means[i] if i and (why := _unlike([*scored[i], *scored[0]], name))}
        pairs = {name: (last.get(i, {}), last.get(0, {})) for name, last in lasts.items() if name not in left_out}
        paired = [name for name, (mine, theirs) in pairs.items() if i and mine.keys() & theirs.keys()]
        axes = [axis for axis in AXES if all(axis in run.costs for run, _ in own)]
        rows.append(
            Row(
                seeds=len(scored[i]),
                steps=sorted({max(int(x["step"]) for x in s.values()) for _, s in scored[i]}),
                spent={axis: statistics.fmean(run.spent(axis, step) for run, step in own) for axis in axes},
                scores=means[i],
                ranks=ranked[i],
                differences={name: paired_difference(*pairs[name]) for name in paired},
                left_out=left_out,
                kl=mean(kls) if kls else None,
            )
        )
    return rows


def _unlike(scored: Sequence[tuple[Run, Scores]], name: str) -> str:
    """Why the scores of the set `name` cannot be compared between these runs; "" if they can. Then their evaluations
    have the same problems, as many completions of each, and the same temperature, and each run's last evaluation comes
    after its first step: an earlier evaluation is of a policy that the run has not trained."""
    runs = [(run, scores[name]["step"]) for run, scores in scored if name in scores]
    if early := [run.name for run, step in runs if step <= run.begun]:
        return f"{early[0]} has no evaluation after its first step"
    for field in ("evaluation.problems", "evaluation.k", "evaluation.temperature"):
        if len(values := {_text(run.config.get(field)) for run, _ in runs}) > 1:
            return f"{field} is {' and '.join(sorted(values))}"
    digests = {run.problems.get(name, "") for run, _ in runs} - {""}
    return "its problems differ" if len(digests) > 1 else ""
