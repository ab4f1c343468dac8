"""Reads results from run folders, and keeps those of a table in one compact file."""

import dataclasses
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpg_jax.report.run_files import flat, read_config, read_metrics, read_start, read_versions
from rpg_jax.reproduction.results import DYNAMICS, Record, Results, Run
from rpg_jax.reproduction.table import Cell, Table
from rpg_jax.storage import write_atomically

_CRITIC = ("explained_variance", "value", "return")
_COSTS = ("groups_generated", "updates", "seconds", "time/compiling")
COLUMNS = (*(key for key, _ in DYNAMICS.values()), "kl_k1", *_CRITIC, *_COSTS)  # and all of eval/
SCAN_COLUMNS = ("accuracy", "seconds")  # of runs that choose learning rates; without eval/
DIGITS = 4  # significant, of every number that is kept
_RENAMED = {"behaviour_kl_k1": ("behaviour_forward_kl_k1", -1)}  # metrics of older runs: name and factor of today
_PLACES = ("run.", "distributed.", "log.", "profile.", "warm_start.dir")  # they change no number of a run
_MADE_WITH = ("commit", "uncommitted_changes", "python", "packages", "platform", "devices")


def collect(cells: Sequence[Cell], out: Path, columns: Sequence[str] = COLUMNS, *, evaluated: bool = True) -> list[Run]:
    """Reads the runs of the cells that have started; numbers are rounded to `DIGITS`."""
    runs = []
    for cell in cells:
        folder = out / "runs" / cell.name
        config = flat(read_config(folder))
        if not config:
            continue
        config = {key: value for key, value in config.items() if not key.startswith(_PLACES)}
        versions = {key: value for key, value in read_versions(folder).items() if key in _MADE_WITH}
        records = [
            {key: _rounded(v) for key, v in record.items() if key in ("step", *columns) or evaluated and _of_set(key)}
            for record in map(_of_today, read_metrics(folder))
        ]
        runs.append(Run(cell.row, cell.seed, cell.name, config, versions, records, read_start(folder)))
    return runs


def save(results: Results, path: Path) -> None:
    """Writes the results as compressed JSON. Equal results are equal bytes."""
    text = json.dumps(_packed(results), separators=(",", ":"), ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(text.encode(), 9, mtime=0))


def load(path: Path) -> Results:
    """Reads what `save` wrote.

    Raises:
      ValueError: there is no such file, or it is of another kind.
    """
    try:
        return _unpacked(json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        raise ValueError(f"no data in {path}: make the table first, or give --from-data=PATH") from None
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the data of a table: {error}") from error


def _of_today(record: Mapping[str, Any]) -> Record:
    """The record with today's names for metrics."""
    today: Record = {}
    for key, value in record.items():
        name, factor = _RENAMED.get(key, (key, 1))
        today[name] = value if key == name or value is None else factor * value
    return today


def _of_set(key: str) -> bool:
    return key.startswith("eval/") and key.count("/") > 1


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _packed(results: Results) -> dict[str, Any]:
    """JSON: what all configs share once, equal versions once, metrics by columns."""
    configs = [run.config for run in results.runs]
    common = {k: v for k, v in (configs[0] if configs else {}).items() if all(k in c and c[k] == v for c in configs)}
    versions: list[Mapping[str, Any]] = []
    runs = []
    for run in results.runs:
        if run.versions not in versions:
            versions.append(run.versions)
        own = {key: value for key, value in run.config.items() if key not in common}
        about = {"row": run.row, "seed": run.seed, "name": run.name, "versions": versions.index(run.versions)}
        about |= {"start": run.start} if run.start else {}
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
    runs = []
    for run in packed["runs"]:
        config, versions = {**packed["config"], **run["config"]}, packed["versions"][run["versions"]]
        about_run = run["row"], run["seed"], run["name"], config, versions
        runs.append(Run(*about_run, _records(run["metrics"]), run.get("start", "")))
    return Results(
        packed["name"],
        Table(**about),
        runs,
        packed["command"],
        packed["hardware"],
        tuple(packed["extra"]),
        _unpacked(packed["scan"]) if packed["scan"] else None,
    )


def _columns(records: Sequence[Record]) -> list[dict[str, list]]:
    """Metrics by columns; columns that have values at the same steps stand together with these steps."""
    keys = dict.fromkeys(key for record in records for key in record if key != "step")
    together: dict[tuple[int, ...], dict[str, list]] = {}
    for key in keys:
        steps = tuple(record["step"] for record in records if key in record)
        block = together.setdefault(steps, {"step": list(steps)})
        block[key] = [record[key] for record in records if key in record]
    return list(together.values())


def _records(blocks: Sequence[Mapping[str, list]]) -> list[Record]:
    by_step: dict[int, Record] = {}
    for block in blocks:
        for place, step in enumerate(block["step"]):
            record = by_step.setdefault(step, {"step": step})
            record |= {key: values[place] for key, values in block.items() if key != "step"}
    return [_of_today(by_step[step]) for step in sorted(by_step)]
