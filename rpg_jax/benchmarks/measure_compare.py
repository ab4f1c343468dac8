"""Compares the update under several settings: time, operations, memory, and what a weight sync brings to the rollout.

  python -m rpg_jax.bench compare --preset=w1 --beside=model.lora.rank=4 --beside=model.lora.rank=16

One column for the config as given, full training here, and one for every --beside. All settings are on the devices
together. Their updates take turns, and each round begins with another setting: a busy machine slows all alike.
`seconds` is the median of --repeats updates after the first, with the least and the most; `of_first` is its ratio to
the first column's. `cpu_seconds` is the median CPU time of this process, over its threads: what other processes take
from a machine changes it less.

`program_flops` and `program_bytes` are of one device, counted in the compiled update, with what is computed again.
XLA's own cost analysis counts a loop over layers once; here it counts once for each layer. Programs for GPUs hide their
products in calls of libraries, so these two fields are not for them. `model_flops` are the mathematics on all devices,
without recomputation and without the adapters' own products.

All bytes are of one device. `arguments_bytes` to `in_place_bytes` are the compiler's, of the update, and `peak_bytes`
is their sum without what outputs overwrite. `base_bytes` are frozen weights, `trained_bytes` weights or adapters,
`slots_bytes` the optimizer's state. `sync_bytes` are what a weight sync brings to the rollout in its dtype. Where the
dtype is the trainer's and all weights are trained, one device has them once, and a sync copies nothing.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rpg_jax.benchmarks import subject
from rpg_jax.benchmarks.subject import Subject, progress
from rpg_jax.models import parameter_count
from rpg_jax.planning import count
from rpg_jax.rollout.footprint import bytes_on_a_device
from rpg_jax.runs import cli, memory
from rpg_jax.runs.memory import make_decoding


def arguments(parser: cli.Parser) -> None:
    subject.arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed updates of each setting (default 7)")
    parser.add_beside("another setting, as model.lora.rank=16 or model.lora.rank=4,model.remat=full; may be repeated")


def run(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be >= 1, got {arguments.repeats}")
    settings = cli.settings(arguments.beside).items()
    yield bench_compare({name: subject.chosen(arguments, changes=own) for name, own in settings}, arguments.repeats)


class Contender:
    """The compiled update of one setting, with its arrays."""

    def __init__(self, one: Subject):
        self.one = one
        with one.layout.activate():
            self.batch, self._base, self._state = one.batch(), one.base(), one.state()
            self.compiled = one.programs.fused.lower(one.learner.like, self.batch).compile()
        self.update()

    def update(self) -> tuple[float, float]:
        """Seconds of an update, and seconds of CPU time that this process used for it."""
        began, used = time.perf_counter(), time.process_time()
        with self.one.layout.activate():
            self._state, _ = jax.block_until_ready(self.compiled(self._base, self._state, self.batch))
        return time.perf_counter() - began, time.process_time() - used


def bench_compare(subjects: Mapping[str, Subject], repeats: int) -> list[dict[str, Any]]:
    contenders = []
    for number, (name, one) in enumerate(subjects.items(), 1):
        progress(f"{one.name}, {name}: setting {number} of {len(subjects)}; weights, compiling")
        contenders.append(Contender(one))
    times: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for repeat in range(repeats):
        for turn in range(len(contenders)):
            place = (repeat + turn) % len(contenders)
            times[place].append(contenders[place].update())
        progress(f"round {repeat + 1} of {repeats}: " + ", ".join(f"{own[-1][0]:.3f} s" for own in times))
    measured = [_times(contender.one, own) for contender, own in zip(contenders, times, strict=True)]
    first = measured[0]["seconds"]
    return [
        {
            "bench": "compare",
            "setting": name,
            **own,
            "of_first": own["seconds"] / first,
            **_sizes(contender),
        }
        for name, contender, own in zip(subjects, contenders, measured, strict=True)
    ]


def _times(one: Subject, times: list[tuple[float, float]]) -> dict[str, Any]:
    seconds, used = zip(*times, strict=True)
    median = statistics.median(seconds)
    return {
        "subject": one.name,
        "device": jax.devices()[0].device_kind,
        "tokens": one.tokens,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds": statistics.median(used),
        "tokens_per_s": one.tokens / median,
    }


def _sizes(contender: Contender) -> dict[str, Any]:
    """Numbers and bytes of what is trained, held, asked for and synced."""
    one, asked = contender.one, subject.asked_bytes(contender.compiled)
    layout, state = one.layout, one.learner.like
    trained, base = bytes_on_a_device(state.params), layout.abstract_base
    found: dict[str, Any] = {
        "parameters": parameter_count(layout.model),
        "trained": sum(x.size for x in jax.tree.leaves(state.params)),
        "model_flops": one.step_flops,
    }
    if jax.devices()[0].platform != "gpu":
        costs = count(contender.compiled.as_text() or "")
        found |= {"program_flops": costs.flops, "program_bytes": costs.bytes}
    return {
        **found,
        **asked,
        "peak_bytes": sum(asked.values()) - 2 * asked["in_place_bytes"] if asked else 0,
        "base_bytes": 0 if base is None else int(bytes_on_a_device(base)),
        "trained_bytes": int(trained),
        "slots_bytes": int(bytes_on_a_device(state) - trained),
        "sync_bytes": int(bytes_on_a_device(memory.synced_params(layout, make_decoding(layout)))),
    }
