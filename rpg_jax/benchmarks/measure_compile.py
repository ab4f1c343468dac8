"""Times tracing, lowering and compiling the update at several depths. Layers are scanned: depth should cost nothing.

One object for each depth. `seconds` is the sum of the three times; `of_first` is its ratio to the first depth's. The
compilation cache is off, and no array is made. --topology=v6e:2x4 compiles for TPUs that are not there, as
`python -m rpg_jax.plan` does.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax

from rpg_jax import models, parallel, planning
from rpg_jax.benchmarks import subject
from rpg_jax.benchmarks.subject import Subject, progress
from rpg_jax.runs.cli import Parser
from rpg_jax.runs.layout import Layout, abstract_model, with_adapters


def arguments(parser: Parser) -> None:
    subject.arguments(parser)
    parser.add_argument("--layers", default="4,36", help="depths, separated by commas (default 4,36)")
    parser.add_argument("--topology", help="a TPU slice to compile for, e.g. v6e:2x4 (default: this machine's devices)")


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    depths = [int(depth) for depth in arguments.layers.split(",")]
    devices = planning.parse(arguments.topology).devices() if arguments.topology else None
    one = subject.chosen(arguments, devices)
    jax.config.update("jax_enable_compilation_cache", False)
    first = 0.0
    for depth in depths:
        progress(f"{one.name}: {depth} layers")
        result = bench_compile(one, depth)
        first = first or result["seconds"]
        yield {
            **result,
            "device": arguments.topology or jax.devices()[0].device_kind,
            "of_first": result["seconds"] / first,
        }


def bench_compile(one: Subject, depth: int) -> dict[str, Any]:
    deep = Subject.of(one.name, _with_layers(one.layout, depth))
    state, batch = deep.learner.like, deep.batch_shapes()
    with deep.layout.activate():
        times = [time.perf_counter()]
        traced = deep.programs.fused.trace(state, batch)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        compiled = lowered.compile()
        times.append(time.perf_counter())
    seconds = times[-1] - times[0]
    trace, lower, compile_ = (b - a for a, b in zip(times, times[1:], strict=False))
    return {
        "bench": "compile",
        "subject": one.name,
        "layers": depth,
        "tokens": deep.tokens,
        "seconds": seconds,
        "tokens_per_s": deep.tokens / seconds,
        "trace_seconds": trace,
        "lower_seconds": lower,
        "compile_seconds": compile_,
        "temporaries_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "peak_bytes": subject.measured_peak(),
    }


def _with_layers(layout: Layout, depth: int) -> Layout:
    model = dataclasses.replace(layout.model, num_layers=depth)
    graphdef, shapes = abstract_model(layout.config, model)
    shardings = parallel.shardings(models.logical_axes(model), shapes, layout.mesh, layout.rules)
    own = {"model": model, "graphdef": graphdef, "param_shapes": shapes, "param_shardings": shardings}
    return with_adapters(dataclasses.replace(layout, **own))
