"""Puts other libraries beside ours on the same work; their turns alternate, so that a busy machine slows all alike.

  python -m experiments.peers step --preset=w1 --against=PYTHON
  python -m experiments.peers rollout --preset=w1 --threads=2 --against=PYTHON --against-tunix=PYTHON

Both commands have the options of `python -m rpg_jax.bench`. README.md of this folder has the packages that each
interpreter needs.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.peers.opponent import Opponent
from rpg_jax import bench
from rpg_jax.benchmarks import measure_rollout, measure_step
from rpg_jax.benchmarks.subject import PRESETS, Subject, Work
from rpg_jax.runs import cli

GENERATORS = {"hf": "hf_generate.py", "tunix": "tunix_generate.py"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("experiments.peers", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    step = commands.add_parser("step", help="the update, in PyTorch", description=measure_step.__doc__)
    measure_step.arguments(step)
    step.add_argument("--against", metavar="PYTHON", required=True, help="has torch; `torch` is this interpreter")
    step.set_defaults(measure=_step)
    rollout = commands.add_parser("rollout", help="completions, by `generate`", description=measure_rollout.__doc__)
    measure_rollout.arguments(rollout)
    rollout.add_argument("--against", dest="hf", metavar="PYTHON", help="has torch and transformers")
    rollout.add_argument("--against-tunix", dest="tunix", metavar="PYTHON", help="has google-tunix")
    rollout.set_defaults(measure=_rollout)
    for command in (step, rollout):
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    return cli.run(bench.bench, parser, argv)


def _step(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    return measure_step.run(options, functools.partial(_torch_step, options.against))


def _rollout(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    asked = {name: python for name in GENERATORS if (python := getattr(options, name))}
    if not asked:
        raise ValueError("no peer: give --against=PYTHON or --against-tunix=PYTHON; rpg_jax.bench measures ours alone")
    work = PRESETS[options.preset]
    return measure_rollout.run(options, {name: _generator(name, python, work) for name, python in asked.items()})


def _torch_step(python: str, one: Subject) -> Opponent:
    layout, shape, model = one.layout, one.shape, one.layout.model
    if model.experts:
        raise ValueError("--against knows dense models only")
    sizes = {
        "model": dataclasses.asdict(model),
        "rows": shape.rows,
        "length": shape.length,
        "completion": min(shape.completion_length, shape.length - 1),
        "dtype": layout.config.model.compute_dtype,
        "learning_rate": layout.config.optimizer.learning_rate,
    }
    print(f"PyTorch in {python}: first step", file=sys.stderr, flush=True)
    return Opponent(python, "torch_step.py", sizes)


def _generator(peer: str, python: str, work: Work) -> Opponent:
    if work.model.experts or work.model.qkv_bias or not work.model.qk_norm:
        raise ValueError("--against and --against-tunix know dense Qwen3 models only")
    sizes = {name: getattr(work, name) for name in ("prompts", "group_size", "prompt_tokens", "new_tokens", "dtype")}
    return Opponent(python, GENERATORS[peer], {"model": dataclasses.asdict(work.model), **sizes})


if __name__ == "__main__":
    sys.exit(main())
