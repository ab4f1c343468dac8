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
    """Prints tables of memory, speed and the step, and the verdict.

    "others" are arrays in HBM that belong to other programs. "model's" are the operations of the mathematics. "of peak"
    is the rate of these operations in the time that the limit allows, as a share of the chip's peak.
    """
    console = console or screen.console()
    console.print(_memory(topology, programs), _speed(topology, programs))
    if figures:
        console.print(_step(topology, figures))
    misfits = [name for name, p in programs.items() if not p.fits(topology.chip)]
    if not misfits:
        console.print(f"[green]fits[/green] {topology.name}", markup=True)
        if figures:
            console.print(*_closing(figures), sep="\n", markup=False, soft_wrap=True)
        return
    console.print(f"[red]does not fit[/red] {topology.name}: {', '.join(misfits)}", markup=True)
    for name in misfits:
        if programs[name].refused:
            console.print(f"  {name}: {programs[name].refused}", markup=False)


def show_settings(
    topology: Topology, found: Mapping[str, Estimate], console: Console | None = None, rows: int = 8
) -> None:
    """Prints a row for each of at most `rows` settings: trained numbers, bytes on a chip, and the expected step."""
    console, shown = console or screen.console(), list(found.items())[:rows]
    table = []
    for number, (_, one) in enumerate(shown, 1):
        memory = (one.base, one.state, one.synced, one.peak(sampling=False), one.peak(sampling=True))
        step = (f"{one.step['slots_of_a_chip']:g}", _figure(one.seconds)) if one.fits(topology) else ("", "no room")
        trained = f"{one.trained / 1e6:,.1f} M" if one.trained < 1e9 else f"{one.trained / 1e9:,.2f} B"
        table.append((str(number), trained, *(f"{size / _GIB:.2f}" for size in memory), *step))
    title = f"{topology.name}, by arithmetic: GiB on a chip, of {topology.chip.hbm / _GIB:.2f}"
    head = ("", "trained", "frozen", "state", "sync", "training", "rollout", "slots", "s a step")
    console.print(_table(title, head, table))
    console.print("state: what is trained, and the optimizer's; training, rollout: peaks; slots: of decoding")
    names = [f"{number}: {name}" for number, (name, _) in enumerate(shown, 1)]
    console.print(*names, sep="\n", markup=False, soft_wrap=True)


def show_fitting(topology: Topology, found: Mapping[str, Estimate], larger: Topology | None) -> None:
    """Prints what would fit by arithmetic in place of a config that does not: settings, or else a larger slice."""
    if found:
        show_settings(topology, found)
    elif larger is not None:
        print(f"the config fits {larger.name}, by arithmetic; no settings that fit {topology.name} were found")
    else:
        print("no settings and no larger slice that fit were found")


def as_json(
    topology: Topology,
    programs: Programs,
    figures: Mapping[str, Any],
    settings: Mapping[str, Estimate],
    larger: Topology | None = None,
) -> dict[str, Any]:
    """The plan as one JSON object. Bytes and seconds are those of one chip.

    `settings` are compared by arithmetic, and `larger` is a slice that fits by arithmetic.
    """
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
        "larger": larger and larger.name,
    }


def _memory(topology: Topology, programs: Programs) -> Table:
    rows = []
    for name, p in programs.items():
        parts = (f"{part / _GIB:.2f}" for part in (p.arguments, p.temporaries, p.outputs, p.alias, p.resident))
        style = "green" if p.fits(topology.chip) else "red"
        peak, host = f"[{style}]{p.hbm / _GIB:.2f}[/{style}]", f"{p.host / _GIB:.2f}"
        rows.append((name, *parts, peak, host, f"{p.compile_seconds:.0f} s"))
    title = f"{topology.name}: GiB on each of {topology.chips} chips, of {topology.chip.hbm / _GIB:.2f}"
    return _table(title, ("program", "args", "temp", "out", "alias", "others", "peak", "host", "compile"), rows)


def _speed(topology: Topology, programs: Programs) -> Table:
    rows = []
    for name, p in programs.items():
        limit, seconds = p.bound(topology.chip)
        network = sum(p.costs.collectives.values())
        counts = (p.costs.flops / 1e12, p.model_flops / 1e12, p.costs.bytes / 1e9, network / 1e9)
        share = f"{p.model_flops / seconds / topology.chip.flops:.0%}" if seconds else ""
        rows.append((name, *map(_figure, counts), limit, _figure(seconds * 1e3), share))
    title = "one run of each program, on each chip, at the peak of its limit"
    return _table(title, ("program", "TFLOP", "model's", "HBM GB", "ICI GB", "limit", "ms", "of peak"), rows)


def _step(topology: Topology, figures: Mapping[str, Any]) -> Table:
    """A table with the columns bound, expected and slowest. A cell is empty if its column does not have the phase."""
    table = Table(title=f"an RL step on {topology.chips} chips, and the run", show_header=True)
    for column in ("", "bound", "expected", "slowest"):
        table.add_column(column, justify="left" if column == "" else "right")
    sides = [figures[side] for side in ("bound", "expected", "slowest")]
    for name in dict.fromkeys(name for side in sides for name in side["phases"]):
        table.add_row(
            f"{name}, s", *(_figure(side["phases"][name]) if name in side["phases"] else "" for side in sides)
        )
    table.add_section()
    steps = f"{figures['steps']:,.0f} steps"
    for title, key in (
        ("a step, s", "seconds"),
        ("beside servers of as many chips, s", "seconds_beside_servers"),
        (f"{steps}, days", "days"),
        (f"{steps}, chip-hours", "chip_hours"),
        ("a step, dollars (list price)", "step_dollars"),
        (f"{steps}, dollars (list price)", "dollars"),
    ):
        table.add_row(title, *("?" if side[key] is None else _figure(side[key]) for side in sides))
    table.caption = _assumed(figures)
    return table


def _assumed(figures: Mapping[str, Any]) -> str:
    """The assumptions behind the figures of a step."""
    return (
        f"{figures['prompts']:,.0f} prompts of {figures['prompt_tokens']:,.0f} tokens; {figures['completions']:,.0f} "
        f"completions of {figures['mean_tokens']:,.0f} in {figures['slots']:,.0f} slots "
        f"({figures['slots_of_a_chip']:,.1f} a chip); {figures['micro_batches']:,.0f} micro-batches; "
        f"without evaluations and compilation; decoding at {efficiency.HBM:g} of HBM's bandwidth, slowest "
        f"{efficiency.HBM_BAND[0]:g}"
    )


def _closing(figures: Mapping[str, Any]) -> list[str]:
    """The last lines of a plan that fits: what binds, days and dollars."""

    def cost(side: Mapping[str, Any]) -> str:
        dollars = "" if side["dollars"] is None else f", ${side['dollars']:,.0f}"
        return f"{_figure(side['days'])} days{dollars}"

    ends = " to ".join(cost(figures[side]) for side in ("fastest", "slowest"))
    costs = f"{cost(figures['expected'])} expected ({ends}); {cost(figures['bound'])} at the bound"
    return [f"binds: {figures['binds']}", f"{figures['steps']:,.0f} steps: {costs}"]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in head:
        table.add_column(column, justify="left" if column in ("program", "limit") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _figure(x: float) -> str:
    """A number with three digits."""
    return f"{x:,.0f}" if x >= 100 or x == 0 else f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"
