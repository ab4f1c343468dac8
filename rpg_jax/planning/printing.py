"""Shows a plan: tables for people, JSON for programs."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rpg_jax.planning.compiling import Program
from rpg_jax.planning.estimates import Estimate, Found
from rpg_jax.planning.hlo import COLLECTIVES
from rpg_jax.planning.topologies import Topology

_GIB = 2**30
Programs = Mapping[str, Program]
Change = Mapping[str, Any] | None  # {field: value} of the smallest change that fits
_MEMORY = ("hbm", "arguments", "temporaries", "outputs", "alias", "peak", "resident", "host")


def show(
    topology: Topology, programs: Programs, figures: Mapping[str, Any], change: Change, console: Console | None = None
) -> None:
    """Prints tables of memory, speed, network and the step, and the verdict.

    "others" are arrays in HBM that belong to other programs. "model's" are the operations of the mathematics. "of peak"
    is the rate of these operations in the time that the limit allows, as a share of the chip's peak.
    """
    console = console or Console()
    console.print(_memory(topology, programs), _speed(topology, programs))
    if topology.chips > 1:
        console.print(_network(programs))
    if figures:
        console.print(_step(topology, figures))
    misfits = [name for name, p in programs.items() if not p.fits(topology.chip)]
    if not misfits:
        console.print(f"[green]fits[/green] {topology.name}")
        console.print(*_closing(figures), sep="\n", markup=False, soft_wrap=True)
        return
    console.print(f"[red]does not fit[/red] {topology.name}: {', '.join(misfits)}")
    for name in misfits:
        if programs[name].refused:
            console.print(f"  {name}: {programs[name].refused}", markup=False)
    if change:
        flags = (f"--{'' if field == 'topology' else 'config.'}{field}={value}" for field, value in change.items())
        console.print("this change fits: " + " ".join(flags), markup=False)
    else:
        console.print("no change that fits was found")


def show_search(topology: Topology, found: Sequence[Found], console: Console | None = None, rows: int = 8) -> None:
    """Prints the fastest settings of a search, each as the flags that set it, and how many there are."""
    shown = []
    for one in found[:rows]:
        flags = (f"--config.{field}={value}" for field, value in one.change.items() if value is not None)
        shown.append((_figure(one.seconds), _figure(one.days), f"{one.slots_of_a_chip:g}", "\n".join(flags)))
    title = f"{len(found)} settings fit {topology.name} by arithmetic; the first is compiled"
    head = ("expected s a step", "days", "slots a chip", "settings")
    (console or Console()).print(_table(title, head, shown))


def show_beside(
    topology: Topology, found: Mapping[str, Estimate], console: Console | None = None, *, as_json: bool = False
) -> None:
    """Prints a column for each setting, or one JSON object: what is trained, what a chip holds, the expected step."""
    if as_json:
        own = {name: one.as_dict(topology) for name, one in found.items()}
        print(json.dumps({"topology": topology.name, "hbm": topology.chip.hbm, "settings": own}))
        return
    columns: list[Sequence[str]] = []
    for one in found.values():
        (training, program), (sampling, _) = one.peak(sampling=False), one.peak(sampling=True)
        sizes = (f"{size / _GIB:.2f}" for size in (one.base, one.state, one.synced, training))
        fits = one.fits(topology)
        slots, seconds = one.step["slots_of_a_chip"], one.step["expected"]["seconds"]
        sampled = (f"{slots:g}", f"{sampling / _GIB:.2f}", _figure(seconds)) if fits else ("", "", "does not fit")
        columns.append((_counted(one.trained), *sizes, program, *sampled))
    names = ["weights trained", "frozen base", "trained and slots", "a weight sync", "peak of training", "in program"]
    names += ["decode slots a chip", "peak of the rollout", "expected step, s"]
    title = f"{topology.name}, by arithmetic: GiB on a chip, of {topology.chip.hbm / _GIB:.2f}"
    table = _table(
        title,
        ("", *(name.replace(",", ",\n").replace("=", "\n=") for name in found)),
        zip(names, *columns, strict=True),
    )
    table.columns[0].justify, table.columns[0].no_wrap = "left", True
    for column in table.columns:
        column.overflow = "fold"
    table.caption = "no program was compiled"
    (console or Console()).print(table)


def _counted(number: int) -> str:
    return f"{number / 1e6:,.1f} M" if number < 1e9 else f"{number / 1e9:,.2f} B"


def as_json(topology: Topology, programs: Programs, figures: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The plan as one object; bytes and seconds are of one chip."""
    chip = topology.chip
    return {
        "topology": topology.name,
        "chips": topology.chips,
        "hbm": chip.hbm,
        "fits": all(p.fits(chip) for p in programs.values()),
        "smallest_change": dict(change) if change else None,
        "programs": {
            name: {
                "fits": p.fits(chip),
                **{part: getattr(p, part) for part in _MEMORY},
                "flops": p.costs.flops,
                "model_flops": p.model_flops,
                "bytes": p.costs.bytes,
                "collective_bytes": dict(p.costs.collectives),
                "collectives": p.costs.launches,
                "seconds_by_limit": p.limits(chip),
                "limit": p.bound(chip)[0],
                "seconds": p.bound(chip)[1],
                "compile_seconds": p.seconds,
                "refused": p.refused,
            }
            for name, p in programs.items()
        },
        "step": dict(figures),
    }


def _memory(topology: Topology, programs: Programs) -> Table:
    rows = []
    for name, p in programs.items():
        parts = (f"{part / _GIB:.2f}" for part in (p.arguments, p.temporaries, p.outputs, p.alias, p.resident))
        style = "green" if p.fits(topology.chip) else "red"
        peak, host = f"[{style}]{p.hbm / _GIB:.2f}[/{style}]", f"{p.host / _GIB:.2f}"
        rows.append((name, *parts, peak, host, f"{p.seconds:.0f} s"))
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


def _network(programs: Programs) -> Table:
    received = {name: p.costs.collectives for name, p in programs.items()}
    kinds = [kind for kind in COLLECTIVES if any(own.get(kind) for own in received.values())]
    rows = [(name, *(_figure(own.get(kind, 0.0) / 1e9) for kind in kinds)) for name, own in received.items()]
    return _table("GB that reach a chip over the network, by kind", ("program", *kinds), rows)


def _step(topology: Topology, figures: Mapping[str, Any]) -> Table:
    """Bound and expected side by side; a phase that only one of them has leaves the other's cell empty."""
    table = Table(title=f"an RL step on {topology.chips} chips, and the run", show_header=True)
    for column in ("", "bound", "expected"):
        table.add_column(column, justify="left" if column == "" else "right")
    sides = [figures[side] for side in ("bound", "expected")]
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
        "without evaluations and compilation"
    )


def _closing(figures: Mapping[str, Any]) -> list[str]:
    """The last lines of a plan that fits: what binds, days and dollars, and what to try next, the best change first."""
    if not figures:
        return []
    expected, bound = figures["expected"], figures["bound"]

    def cost(side: Mapping[str, Any]) -> str:
        dollars = "" if side["dollars"] is None else f", ${side['dollars']:,.0f}"
        return f"{_figure(side['days'])} days{dollars}"

    now = expected["seconds"]
    faster = {change: seconds for change, seconds in figures["next"].items() if seconds < 0.98 * now}
    tries = [f"{change}: {_figure(seconds)} s a step in place of {_figure(now)}" for change, seconds in faster.items()]
    keep = f"{figures['servers'] or 'no number of'} servers of {figures['server_chips']} chips each"
    sync = ", ".join(f"{part} {_figure(seconds)} s" for part, seconds in expected["sync"].items())
    return [
        f"binds: {figures['binds']}",
        f"{figures['steps']:,.0f} steps: {cost(expected)} expected; {cost(bound)} at the bound",
        f"{keep} (rollout.driver=servers, max_staleness=1) sample as fast as these chips train",
        f"a sync brings them {figures['weights_bytes'] / 1e9:.2f} GB: {sync}; writing is beside training",
        "to try next: " + ("\n        then: ".join(tries) or "nothing that this plan knows makes a step 2 % faster"),
    ]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title)
    for column in head:
        table.add_column(column, justify="left" if column in ("program", "limit", "settings") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _figure(x: float) -> str:
    """A number with three digits."""
    return f"{x:,.0f}" if x >= 100 or x == 0 else f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"
