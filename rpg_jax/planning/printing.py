"""Shows a plan: tables for people, JSON for programs."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rpg_jax.planning import efficiency
from rpg_jax.planning.compiling import Program
from rpg_jax.planning.estimates import Estimate
from rpg_jax.planning.topologies import Topology
from rpg_jax.report import screen

_GIB = 2**30
Programs = Mapping[str, Program]


def show(topology: Topology, programs: Programs, figures: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the result of `run_plan.plan`: memory, speed, step and verdict. docs/plan.md explains the columns."""
    console = console or screen.console()
    console.print(_memory(topology, programs), _speed(topology, programs))
    if figures:
        console.print(_step(topology, figures))
    misfits = [name for name, p in programs.items() if not p.fits(topology.chip)]
    if not misfits:
        console.print(f"[green]fits[/green] {topology.name}", markup=True)
        if figures:
            console.print(f"binds: {figures['binds']}", markup=False, soft_wrap=True)
        return
    console.print(f"[red]does not fit[/red] {topology.name}: {', '.join(misfits)}", markup=True)
    for name in misfits:
        if programs[name].refused:
            console.print(f"  {name}: {programs[name].refused}", markup=False)


def show_settings(topology: Topology, found: Mapping[str, Estimate]) -> None:
    """Prints a row for each of at most eight settings: trained numbers, bytes on a chip, and the expected step."""
    console, shown = screen.console(), list(found.items())[:8]
    table = []
    for number, (_, one) in enumerate(shown, 1):
        memory = [*one.sizes.values(), one.peak(sampling=False), one.peak(sampling=True)][1:]
        trained = one.sizes["trained"]
        expected = _figure(one.step["expected"]["seconds"]) if one.fits(topology) else "no room"
        slots = f"{one.step['slots_of_a_chip']:g}" if one.fits(topology) else ""
        millions = f"{trained / 1e6:,.1f} M" if trained < 1e9 else f"{trained / 1e9:,.2f} B"
        table.append((str(number), millions, *(f"{size / _GIB:.2f}" for size in memory), slots, expected))
    title = f"{topology.name}, by arithmetic: GiB on a chip, of {topology.chip.hbm / _GIB:.2f}"
    head = ("", "trained", "frozen", "state", "sync", "training", "rollout", "slots", "s a step")
    console.print(_table(title, head, table))
    console.print("state: what is trained, and the optimizer's; training, rollout: peaks; slots: of decoding")
    names = [f"{number}: {name}" for number, (name, _) in enumerate(shown, 1)]
    console.print(*names, sep="\n", markup=False, soft_wrap=True)


def as_json(
    topology: Topology, programs: Programs, figures: Mapping[str, Any], settings: Mapping[str, Estimate]
) -> dict[str, Any]:
    """The plan as one JSON object; `settings` are compared by arithmetic. Bytes and seconds are those of one chip."""
    chip = topology.chip
    return {
        "topology": topology.name,
        "chips": topology.chips,
        "hbm": chip.hbm,
        "fits": all(p.fits(chip) for p in programs.values()) if programs else None,
        "programs": {
            name: {
                "fits": p.fits(chip),
                "hbm": p.hbm,
                **dataclasses.asdict(p),
                "seconds_by_limit": p.limits(chip),
                "limit": p.bound(chip)[0],
                "seconds": p.bound(chip)[1],
            }
            for name, p in programs.items()
        },
        "step": dict(figures),
        "settings": {name: one.as_dict(topology) for name, one in settings.items()},
    }


def _memory(topology: Topology, programs: Programs) -> Table:
    rows = []
    for name, p in programs.items():
        parts = (p.arguments, p.temporaries, p.outputs, p.alias, p.resident, p.hbm, p.host)
        rows.append((name, *(f"{part / _GIB:.2f}" for part in parts), f"{p.compile_seconds:.0f} s"))
    title = f"{topology.name}: GiB on each of {topology.chips} chips, of {topology.chip.hbm / _GIB:.2f}"
    return _table(title, ("program", "args", "temp", "out", "in place", "others", "peak", "host", "compile"), rows)


def _speed(topology: Topology, programs: Programs) -> Table:
    rows = []
    for name, p in programs.items():
        limit, seconds = p.bound(topology.chip)
        network = sum(p.costs.collectives.values())
        counts = (p.costs.flops / 1e12, p.model_flops / 1e12, p.costs.bytes / 1e9, network / 1e9)
        rows.append((name, *map(_figure, counts), limit, _figure(seconds)))
    title = "one run of each program, on each chip, at the peak of its limit"
    return _table(title, ("program", "TFLOP", "model's", "HBM GB", "network GB", "limit", "seconds"), rows)


def _step(topology: Topology, figures: Mapping[str, Any]) -> Table:
    """A row for each phase of a step, and rows for the step and the run."""
    steps, names = f"{figures['steps']:,.0f} steps", ("bound", "fastest", "expected", "slowest")
    sides = [figures[name] for name in names]
    rows = [(f"{name}, s", *(_figure(side["phases"][name]) for side in sides)) for name in sides[0]["phases"]]
    for title, key in (
        ("a step, s", "seconds"),
        ("beside servers of as many chips, s", "seconds_beside_servers"),
        (f"{steps}, days", "days"),
        ("a step, dollars (list price)", "step_dollars"),
        (f"{steps}, dollars (list price)", "dollars"),
    ):
        rows.append((title, *("?" if side[key] is None else _figure(side[key]) for side in sides)))
    title = f"an RL step on {topology.chips} chips, and the run"
    table = _table(title, ("phase", "at the peaks", *names[1:]), rows)
    table.caption = (
        f"{figures['prompts']:,.0f} prompts of {figures['prompt_tokens']:,.0f} tokens; {figures['completions']:,.0f} "
        f"completions of {figures['mean_tokens']:,.0f} in {figures['slots']:,.0f} slots "
        f"({figures['slots_of_a_chip']:,.1f} a chip); {figures['micro_batches']:,.0f} micro-batches; "
        f"{figures['evaluations']:,.0f} evaluations of {figures['evaluated']:,.0f} completions; without compilation; "
        f"HBM at {efficiency.EXPECTED.hbm:g} of its bandwidth ({efficiency.HBM_BAND[1]:g}, {efficiency.HBM_BAND[0]:g})"
    )
    return table


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in head:
        table.add_column(column, justify="left" if column in ("program", "limit", "phase") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _figure(x: float) -> str:
    """A number with three digits."""
    return f"{x:,.0f}" if x >= 100 or x == 0 else f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"
