"""The results of a table: its rows as they were run, and its runs. One compact file keeps the results of a table.

Rows are compared from one warm start: the warm start of another machine may change scores more than any row does.
`merge` refuses earlier runs that started from other weights than the new runs.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report.plots import TABLE_PANELS
from rpg_jax.report.run_files import AROUND, Run
from rpg_jax.reproduction.tables import PlannedRun, Table
from rpg_jax.storage import write_atomically

_CRITIC = ("explained_variance", "value", "return")
_COSTS = ("groups_generated", "updates", "seconds", "time/compiling")
_TRAINING = (*(panel.key for panel in TABLE_PANELS), "kl_k1", *_CRITIC, *_COSTS)
METRICS = re.compile("|".join(("step", *_TRAINING, "eval/.*/.*")))  # with the scores of every held-out set
SCAN_METRICS = re.compile("step|accuracy|seconds")  # of runs that choose learning rates
DIGITS = 4  # significant digits of every number that is kept
_PLACES = (*AROUND, "warm_start.dir")
_MADE_WITH = ("commit", "uncommitted_changes", "python", "packages", "platform", "devices")

Rows = dict[str, dict[int, Run]]  # {row: {seed: run}}


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything that a table's page shows.

    Attributes:
      name: the name of the table and of its files.
      table: the table. The overrides of its rows lack the learning rates that the scan chose. `runs` have them.
      runs: the runs with their metrics, seed by seed, and for each seed in the order of the table's rows.
      command, hardware: the command that made the runs, and the hardware that ran them, as texts.
      extra: overrides of every run, as "--config.train.steps=20".
      scan: the results of the runs that chose the learning rates; None without such runs.
    """

    name: str
    table: Table
    runs: Sequence[Run]
    command: str = ""
    hardware: str = ""
    extra: Sequence[str] = ()
    scan: Results | None = None

    def rows(self) -> Rows:
        """{row: {seed: run}} of the runs that have taken a step, without those of the scan."""
        found: Rows = {}
        for run in self.runs:
            if run.trained:
                found.setdefault(run.row, {})[run.seed] = run
        return found

    def all_runs(self) -> list[Run]:
        """The runs of the table, then those of its scan."""
        return [*self.runs, *(self.scan.runs if self.scan else ())]


def collect(planned: Sequence[PlannedRun], out: Path, metrics: re.Pattern[str] = METRICS) -> list[Run]:
    """Reads the planned runs that have written a config from the folder `out`/runs, in the order of `planned`. The
    records keep the metrics whose whole names match `metrics`: floats with four significant digits, None for a float
    that is not finite. The configs lack `warm_start.dir` and the sections of `AROUND`, such as run and log. Of versions
    only commit, uncommitted changes, Python, packages, platform and devices stay. Raises ValueError for a damaged file.
    """
    runs = []
    for plan in planned:
        run = Run.read(out / "runs" / plan.name, plan.row)
        if not run.config:
            continue
        records = [{k: _rounded(v) for k, v in record.items() if metrics.fullmatch(k)} for record in run.records]
        runs.append(
            dataclasses.replace(
                run,
                seed=plan.seed,
                config={key: value for key, value in run.config.items() if not key.startswith(_PLACES)},
                versions={key: value for key, value in run.versions.items() if key in _MADE_WITH},
                records=records,
            )
        )
    return runs


def save(results: Results, path: Path) -> None:
    """Writes the results to `path` as compressed JSON. Makes the folder of `path`. Equal results give equal bytes."""
    text = json.dumps(_packed(results), separators=(",", ":"), ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(text.encode(), 9, mtime=0))


def load(path: Path) -> Results:
    """Reads the results that `save` wrote. Raises ValueError if there is no such file, or if it holds no results."""
    try:
        return _unpacked(json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        raise ValueError(f"no data in {path}: make the table first, or give --from-data=PATH") from None
    except Exception as error:  # its bytes may be anybody's: gzip, zlib, JSON and what reads it each raise their own
        raise ValueError(f"{path} is not the data of a table: {error}") from error


def check_kept(kept: Results, name: str, table: Table, extra: Sequence[str]) -> None:
    """Raises ValueError if `kept`, earlier results, cannot stand on one page with runs of `table`, whose name is `name`
    and whose runs all have the overrides `extra`. The reasons are another name or config file, other overrides of all
    runs, other learning rates to choose from, and a row of both tables with other settings."""
    if (kept.name, kept.table.config) != (name, table.config):
        raise ValueError(f"the kept numbers are of {kept.name} ({kept.table.config}), not of {name} ({table.config})")
    if tuple(kept.extra) != tuple(extra):
        raise ValueError(f"the kept runs of {name} have the overrides {list(kept.extra)}, not {list(extra)}")
    if kept.scan and tuple(kept.table.rates) != tuple(table.rates):
        rates = f"{list(kept.table.rates)}, today's from {list(table.rates)}"
        raise ValueError(f"the kept runs of {name} chose their learning rates from {rates}: make all rows anew")
    for row in table.rows.keys() & kept.table.rows.keys():
        if tuple(table.rows[row]) != tuple(kept.table.rows[row]):
            raise ValueError(
                f"the kept runs of {row} have {list(kept.table.rows[row])}, today's have {list(table.rows[row])}: "
                "make the table without kept runs, or leave this row out of --methods"
            )


def missing(planned: Sequence[PlannedRun], kept: Results | None) -> list[PlannedRun]:
    """The `planned` runs, in order, without those that ended in `kept` by row, seed and name; all for None."""
    ended = {(run.row, run.seed, run.name) for run in kept.runs if run.ended} if kept else set()
    return [plan for plan in planned if (plan.row, plan.seed, plan.name) not in ended]


def merge(kept: Results, new: Results, order: Collection[str]) -> Results:
    """`new` with the rows, runs and hardware of `kept` too. If both have a row and seed, the run of `new` counts. The
    runs stand seed by seed. The rows stand in the order of the names in `order`, and other rows come last. Raises
    ValueError if two runs of equal `model.*` fields began with different weights, from `model.path` or a warm start."""
    _check_starts(kept, new)
    rows = {**kept.table.rows, **new.table.rows}
    names = [row for row in order if row in rows] + [row for row in rows if row not in order]
    runs: dict[tuple[int, int], Run] = {}
    for run in [*kept.runs, *new.runs]:
        runs[run.seed, names.index(run.row)] = run
    table = dataclasses.replace(
        new.table,
        rows={row: rows[row] for row in names},
        swept={row: values for row, values in {**kept.table.swept, **new.table.swept}.items() if row in rows},
    )
    return dataclasses.replace(
        new,
        table=table,
        runs=[runs[place] for place in sorted(runs)],
        hardware="; ".join(dict.fromkeys([*kept.hardware.split("; "), *new.hardware.split("; ")])),
    )


def _check_starts(kept: Results, new: Results) -> None:
    """Raises ValueError if runs of one model that was read or warm-started began with different weights."""
    began: dict[str, dict[str, Run]] = {}
    for run in [*kept.all_runs(), *new.all_runs()]:
        if run.start and (run.config.get("warm_start.enabled") or run.config.get("model.path")):
            model = json.dumps({key: v for key, v in run.config.items() if key.startswith("model.")}, sort_keys=True)
            began.setdefault(model, {}).setdefault(run.start, run)
    for starts in began.values():
        if len(starts) > 1:
            names = " and ".join(f"{run.name} ({start})" for start, run in starts.items())
            raise ValueError(
                f"{names} did not start from the same weights, so their rows cannot be compared: copy the warm start "
                "of the kept runs into the folder warm_starts of these, or make the table without kept runs"
            )


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _packed(results: Results) -> dict[str, Any]:
    """The results as JSON holds them: what all configs share once, equal versions once, metrics by columns."""
    configs = [run.config for run in results.runs]
    common = {k: v for k, v in (configs[0] if configs else {}).items() if all(k in c and c[k] == v for c in configs)}
    versions: list[Mapping[str, Any]] = []
    runs = []
    for run in results.runs:
        if run.versions not in versions:
            versions.append(run.versions)
        own = {key: value for key, value in run.config.items() if key not in common}
        about = {"row": run.row, "seed": run.seed, "name": run.name, "versions": versions.index(run.versions)}
        about |= {name: value for name in ("start", "parent") if (value := getattr(run, name))}
        runs.append({**about, "config": own, "metrics": _columns(run.records)})
    return {
        "name": results.name,
        "table": dataclasses.asdict(results.table),
        "command": results.command,
        "hardware": results.hardware,
        "extra": list(results.extra),
        "versions": versions,
        "config": common,
        "runs": runs,
        "scan": _packed(results.scan) if results.scan else None,
    }


def _unpacked(packed: Mapping[str, Any]) -> Results:
    about = dict(packed["table"])
    about["rows"] = {row: tuple(overrides) for row, overrides in about["rows"].items()}
    about["swept"] = {row: (group, values) for row, (group, values) in about["swept"].items()}
    runs = [
        Run(
            **{name: run[name] for name in ("name", "seed", "row", "start", "parent") if name in run},
            config={**packed["config"], **run["config"]},
            records=_records(run["metrics"]),
            versions=packed["versions"][run["versions"]],
        )
        for run in packed["runs"]
    ]
    made_by = packed["command"], packed["hardware"], tuple(packed["extra"])
    scan = _unpacked(packed["scan"]) if packed["scan"] else None
    return Results(packed["name"], Table(**about), runs, *made_by, scan)


def _columns(records: Sequence[Mapping[str, Any]]) -> list[dict[str, list]]:
    """The metrics by columns. Columns with values at the same steps share one block, which has the steps."""
    keys = dict.fromkeys(key for record in records for key in record if key != "step")
    together: dict[tuple[int, ...], dict[str, list]] = {}
    for key in keys:
        steps = tuple(record["step"] for record in records if key in record)
        block = together.setdefault(steps, {"step": list(steps)})
        block[key] = [record[key] for record in records if key in record]
    return list(together.values())


def _records(blocks: Sequence[Mapping[str, list]]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {}
    for block in blocks:
        for place, step in enumerate(block["step"]):
            record = by_step.setdefault(step, {"step": step})
            record |= {key: values[place] for key, values in block.items() if key != "step"}
    return [by_step[step] for step in sorted(by_step)]
