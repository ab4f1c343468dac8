"""Tells whether a run fits a TPU slice, and days and dollars of the run, before anyone pays for the slice.

  python -m rpg_jax.plan --config=configs/qwen3_4b_8k.py --topology=v5p:2x2x2
  python -m rpg_jax.plan --config=configs/qwen3_4b_8k.py --topology=v5p:4x4x4 --search --json
  python -m rpg_jax.plan --config=configs/qwen3_1p7b_gsm8k_lora.py --topology=v5e:1x1 --beside=model.lora.rank=0

Compiles the run's own programs with the compiler for TPUs, on any CPU machine (after --get_compiler, which leaves the
environment of the other commands as it is), and prints what each needs on a chip. A step is planned at the peaks of
the hardware, and as it is expected: with the efficiencies and latencies of rpg_jax/planning/efficiency.py, which are
assumptions.

If a program does not fit, the exit code is 1, and the command lists settings that fit by arithmetic. --search ranks
copies of the decoding weights, the cache's dtype and rematerialisation by arithmetic first, with the slots and the
micro-batch that fit, and compiles the fastest. --beside puts the config and other settings beside each other by
arithmetic, and compiles nothing.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from rpg_jax.runs import cli, config_files


def main(argv: Sequence[str] | None = None) -> int:
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
    """Compiles or estimates, prints, and returns 1 where the config does not fit."""
    if options.get_compiler:
        from rpg_jax.planning import tpu_compiler

        print(tpu_compiler.get())
        return 0
    settings, given = cli.settings(options.beside), options.overrides
    loaded = {name: config_files.load(options.config, [*given, *own]).config for name, own in settings.items()}
    from rpg_jax.planning import estimates, printing, run_plan, topologies  # load JAX: wrong flags need not wait
    from rpg_jax.runs.resolve import resolve

    topology = topologies.parse(options.topology)
    configs = {name: run_plan.with_known_shapes(resolve(config)) for name, config in loaded.items()}
    lengths = functools.partial(run_plan.lengths_of, mean=options.mean_tokens, prompt=options.prompt_tokens)
    found: dict[str, estimates.Estimate] = {}
    programs: printing.Programs = {}
    step, config = dict[str, Any](), configs["as given"]
    if options.beside:
        found = {name: estimates.estimate(one, topology, lengths(one)) for name, one in configs.items()}
        fits = found["as given"].fits(topology)
    else:
        if options.search:
            found = estimates.search(config, topology, lengths(config))
            if not found:
                raise ValueError(f"no settings that fit {topology.name} by arithmetic; take a larger slice")
            config = next(iter(found.values())).config
            if not options.json:
                printing.show_settings(topology, found)
        programs, step = run_plan.plan(config, topology, options.programs, lengths=lengths(config))
        fits = all(program.fits(topology.chip) for program in programs.values())
        if not fits and not options.search:
            found = estimates.search(config, topology, lengths(config))
    if options.json:
        print(json.dumps(printing.as_json(topology, programs, step, found)))
        return 0 if fits else 1
    if programs:
        printing.show(topology, programs, step)
    if found and not options.search:
        printing.show_settings(topology, found)
    if not (fits or found):
        print("no settings that fit by arithmetic were found; take a larger slice")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
