"""Says on a page where its numbers come from: command, code, packages, machine, time."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rpg_jax.report import markdown
from rpg_jax.report.progress import duration
from rpg_jax.report.run_files import series
from rpg_jax.reproduction.results import Results, Run


def command(given: Sequence[str]) -> str:
    """What a page names as its origin: `given` without its folder, which is of one machine."""
    pairs = zip(["", *given], given, strict=False)
    kept = [word for before, word in pairs if before != "--out" and word.partition("=")[0] != "--out"]
    return shlex.join(["python", "-m", "rpg_jax.reproduce", *kept])


def line(results: Results) -> str:
    """The command, its runs, their code, their machine and their time."""
    runs = results.all_runs()
    seconds = sum(sum(series(run.records, "seconds")[1]) for run in runs)
    steps = sorted({run.config["train.steps"] for run in results.runs})
    ks = sorted({run.config["evaluation.k"] for run in results.runs})
    devices = sorted({run.versions.get("devices", "unknown device") for run in runs})
    counts = f"{len(results.runs)} runs of {' or '.join(map(str, steps))} steps"
    if results.scan:
        counts += f" and {len(results.scan.runs)} that choose learning rates"
    codes = list(_codes(runs).values())
    return " · ".join(
        (
            f"`{results.command}`",
            f"`{results.table.config}`",
            counts,
            f"k = {' or '.join(map(str, ks))}",
            code_name(codes[0][0].versions) if len(codes) == 1 else f"**{len(codes)} versions of the code, see below**",
            f"{' and '.join(devices)}, {results.hardware}",
            f"{duration(seconds)} in training steps, summed over runs",
            f"numbers of every step: `{results.name}.json.gz`; `--from-data` makes this page from it",
        )
    )


def code_of_rows(results: Results) -> list[str]:
    """A paragraph and a table of the rows by commit and packages, if the runs do not share them; else nothing."""
    codes = list(_codes(results.all_runs()).values())
    if len(codes) < 2:
        return []
    reported = {id(run) for run in results.runs}
    lines = []
    for runs in codes:
        own = [run for run in runs if id(run) in reported]
        names = [_seeds(row, own, results.runs) for row in dict.fromkeys(run.row for run in own)]
        names += [f"{len(runs) - len(own)} runs that chose learning rates"] if len(runs) > len(own) else []
        lines.append([code_name(runs[0].versions), _packages(runs, codes), ", ".join(names)])
    return [
        "## Versions of the code",
        "**The runs of this page were not made with one version of code and packages.** A difference between rows of "
        "two versions can come from the versions.",
        markdown.table(["code", "what differs else", "rows"], lines),
    ]


def changed_rows(results: Results, today: Mapping[str, Sequence[str]]) -> list[str]:
    """A paragraph on the rows that have other settings today, or are no row of the table any more; else nothing."""
    rows = [row for row, overrides in results.table.rows.items() if tuple(today.get(row, ())) != tuple(overrides)]
    if not rows:
        return []
    return [f"**Rows of their date**: the command has other settings today for {', '.join(rows)}."]


def _codes(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by commit, packages, Python and device."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.versions, sort_keys=True), []).append(run)
    return found


def code_name(versions: Mapping[str, Any]) -> str:
    """Commit, uncommitted changes and JAX."""
    changed = " with uncommitted changes" if versions.get("uncommitted_changes") else ""
    packages = versions.get("packages", {})
    made_with = f", jax {packages['jax']}" if packages.get("jax") else ""
    return f"commit {versions.get('commit', '')[:7] or 'unknown'}{changed}{made_with}"


def _packages(runs: Sequence[Run], codes: Sequence[Sequence[Run]]) -> str:
    """Packages, Python and devices of these runs, if they are not those of all."""
    flat = [_facts(code[0].versions) for code in codes]
    own = _facts(runs[0].versions)
    names = sorted({name for facts in flat for name in facts} - {"jax"})
    told = [f"{name} {own.get(name, '–')}" for name in names if len({facts.get(name) for facts in flat}) > 1]
    return ", ".join(told) or "–"


def _facts(versions: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(versions.get(name, "")) for name in ("python", "devices")} | dict(versions.get("packages", {}))


def _seeds(row: str, own: Sequence[Run], runs: Sequence[Run]) -> str:
    """A row's name, with seeds if not all of its runs are among `own`."""
    seeds = sorted(run.seed for run in own if run.row == row)
    whole = len(seeds) == sum(run.row == row for run in runs)
    return row if whole else f"{row} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})"
