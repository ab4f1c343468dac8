"""Tells whether a run fits a TPU slice, and days and dollars of the run, before anyone pays for the slice.

  python -m rpg_jax.plan --config=configs/qwen3_4b_8k.py --topology=v5p:2x2x2
  python -m rpg_jax.plan --config=configs/qwen3_4b_8k.py --topology=v5p:4x4x4 --search --json
  python -m rpg_jax.plan --config=configs/qwen3_1p7b_gsm8k_lora.py --topology=v5e:1x1 --beside=model.lora.rank=0

Compiles the run's own programs with the compiler for TPUs, on any CPU machine (after --get_compiler, which leaves the
environment of the other commands as it is), and prints what each needs on a chip. A step is planned at the peaks of
the hardware, and as it is expected: with the efficiencies and latencies of rpg_jax/planning/chips.py, which are
assumptions.

If a program does not fit, the exit code is 1, and the command lists settings that fit by arithmetic. --search ranks
copies of the decoding weights, the cache's dtype and rematerialisation by arithmetic first, with the slots and the
micro-batch that fit, and compiles the fastest. --beside puts the config and other settings beside each other by
arithmetic, and compiles nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from rpg_jax.planning import topologies
from rpg_jax.planning.chips import EXPECTED, HBM_BAND
from rpg_jax.planning.topologies import Topology
from rpg_jax.report import screen
from rpg_jax.runs import cli, config_files

if TYPE_CHECKING:
    from rpg_jax.planning.compiling import Program

_GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line `argv` (None: `sys.argv`), plans, and returns the exit code: 1 if a run does not fit."""
    parser = cli.parser("plan", __doc__)
    parser.add_config("configs/qwen3_4b_2k.py")
    parser.add_argument(
        "--topology",
        default="v5p:2x2x2",
        help="as v6e:4x4, or v6e:4x4*2 for two of them; an unknown one lists the known ones (default: %(default)s)",
    )
    parser.add_switch("json", help="print one JSON object instead of tables")
    parser.add_switch("search", help="first look for the fastest settings that fit, by arithmetic")
    parser.add_beside("compare the config with this setting, by arithmetic, as model.lora.rank=0; may be repeated")
    parser.add_argument("--mean_tokens", type=int, default=0, help="of a completion; default: half of the limit")
    parser.add_argument("--prompt_tokens", type=int, default=0, help="of a prompt; default: 300, or half of the limit")
    parser.add_argument(
        "--programs",
        type=lambda text: [name.strip() for name in text.split(",") if name],
        default=[],
        help="compile these only: log-probs, baseline, update, start, add, apply, prefill, decode",
    )
    parser.add_switch("get_compiler", help="put the compiler for TPUs into a folder of its own, and end")
    return cli.run(plan, parser, argv)


def plan(options: argparse.Namespace) -> int:
    """Compiles or estimates by `options`, the flags, and prints the plan; with --get_compiler only gets the compiler.
    Returns 0 if the config fits (with --search the fastest settings that were found), else 1. Raises ValueError for an
    unknown slice, flags that do not go together, a config that cannot run, a missing compiler, and if --search finds
    nothing by arithmetic."""
    if options.get_compiler:
        print(topologies.get_compiler())
        return 0
    if options.beside and (options.search or options.programs):
        raise ValueError("--beside compares by arithmetic alone: leave out --search and --programs")
    settings, given = cli.settings(options.beside), options.overrides
    loaded = {name: config_files.load(options.config, [*given, *own]).config for name, own in settings.items()}
    from rpg_jax.planning import estimates, run_plan  # load JAX: wrong flags need not wait
    from rpg_jax.runs.resolve import resolve

    topology = topologies.parse(options.topology)
    configs = {name: run_plan.with_known_shapes(resolve(config)) for name, config in loaded.items()}
    lengths = functools.partial(run_plan.lengths_of, mean=options.mean_tokens, prompt=options.prompt_tokens)
    found: dict[str, dict[str, Any]] = {}
    programs: dict[str, Program] = {}
    step, config = dict[str, Any](), configs["as given"]
    if options.beside:
        found = {name: estimates.estimate(one, topology, lengths(one)) for name, one in configs.items()}
        fits = found["as given"]["fits"]
    else:
        if options.search:
            found, config = estimates.search(config, topology, lengths(config))
            if not found:
                raise ValueError(f"no settings that fit {topology.name} by arithmetic; take a larger slice")
            if not options.json:
                show_settings(topology, found)
        programs, step = run_plan.plan(config, topology, options.programs, lengths=lengths(config))
        fits = all(program.fits(topology.chip) for program in programs.values())
        if not fits and not options.search:
            found, _ = estimates.search(config, topology, lengths(config))
    if options.json:
        print(json.dumps(as_json(topology, programs, step, found)))
        return 0 if fits else 1
    if topology.slices > 1:
        print("no byte between slices (DCN) is counted: a real step takes longer")
    if programs:
        show(topology, programs, step)
    if found and not options.search:
        show_settings(topology, found, None if options.beside else 8)
    if not (fits or found):
        print("no settings that fit by arithmetic were found; take a larger slice")
    return 0 if fits else 1


def show(topology: Topology, programs: Mapping[str, Program], figures: Mapping[str, Any]) -> None:
    """Prints tables of the programs' memory and speed and of the step, and whether all programs fit. docs/plan.md
    explains the columns. `programs` are {name: program}; `figures` is the result of `run_plan.step_figures`, or {} for
    no table of the step."""
    console = screen.console()
    console.print(*_programs(topology, programs))
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


def show_settings(topology: Topology, found: Mapping[str, Mapping[str, Any]], most: int | None = 8) -> None:
    """Prints a row for each of the first `most` settings (None: all) in `found`, {name: estimate}: the count of trained
    numbers, GiB on a chip, and the seconds of the expected step, or "no room" if the setting does not fit."""
    console, table, found = screen.console(), [], dict(list(found.items())[:most])
    for number, one in enumerate(found.values(), 1):
        trained, memory = one["trained"], [size for name, size in one.items() if name.endswith("_bytes")]
        expected = _figure(one["step"]["expected"]["seconds"]) if one["fits"] else "no room"
        slots = f"{one['step']['slots_of_a_chip']:g}" if one["fits"] else ""
        millions = f"{trained / 1e6:,.1f} M" if trained < 1e9 else f"{trained / 1e9:,.2f} B"
        table.append((str(number), millions, *(f"{size / _GIB:.2f}" for size in memory), slots, expected))
    title = f"{topology.name}, by arithmetic: GiB on a chip, of {topology.chip.hbm / _GIB:.2f}"
    head = ("", "trained", "frozen", "state", "sync", "training", "rollout", "slots", "s a step")
    console.print(_table(title, head, table))
    console.print("state: what is trained, and the optimizer's; training, rollout: peaks; slots: of decoding")
    console.print(*(f"{i}: {name}" for i, name in enumerate(found, 1)), sep="\n", markup=False, soft_wrap=True)


def as_json(
    topology: Topology, programs: Mapping[str, Program], figures: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The plan as a dict for JSON: the slice; "fits", whether all programs fit, None without programs; the programs by
    name; "step", the `figures` of `run_plan.step_figures`; and the `settings`, estimates by name. Bytes
    and seconds are of one chip."""
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
                "name": name,
                **dataclasses.asdict(p),
                "seconds_by_limit": p.limits(chip),
                "limit": p.bound(chip)[0],
                "seconds": p.bound(chip)[1],
            }
            for name, p in programs.items()
        },
        "step": figures,
        "settings": settings,
    }


def _programs(topology: Topology, programs: Mapping[str, Program]) -> tuple[Table, Table]:
    """The tables of the programs' memory, and of their speed."""
    memory, speed = [], []
    for name, p in programs.items():
        parts = (p.arguments, p.temporaries, p.outputs, p.alias, p.resident, p.hbm, p.host)
        memory.append((name, *(f"{part / _GIB:.2f}" for part in parts), f"{p.compile_seconds:.0f} s"))
        limit, seconds = p.bound(topology.chip)
        network = sum(p.costs.collectives.values())
        counts = (p.costs.flops / 1e12, p.model_flops / 1e12, p.costs.bytes / 1e9, network / 1e9)
        speed.append((name, *map(_figure, counts), limit, _figure(seconds)))
    sizes = ("program", "args", "temp", "out", "in place", "others", "peak", "host", "compile")
    rates = ("program", "TFLOP", "model's", "HBM GB", "network GB", "limit", "seconds")
    title = f"{topology.name}: GiB on each of {topology.chips} chips, of {topology.chip.hbm / _GIB:.2f}"
    one_run = "one run of each program, on each chip, at the peak of its limit"
    return _table(title, sizes, memory), _table(one_run, rates, speed)


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
        f"HBM at {EXPECTED.hbm:g} of its bandwidth ({HBM_BAND[1]:g}, {HBM_BAND[0]:g})"
    )
    return table


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    left = ("program", "limit", "phase")
    table = Table(*(Column(name, justify="left" if name in left else "right") for name in head), title=title)
    for row in rows:
        table.add_row(*row)
    return table


def _figure(x: float) -> str:
    """A number x ≥ 0 with three digits, or all digits before the point."""
    return f"{x:,.0f}" if x >= 100 or x == 0 else f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


if __name__ == "__main__":
    sys.exit(main())
