"""Measures the update, forward, backward, clip and optimizer of one micro-batch, from random weights: time and memory.

  python -m rpg_jax.bench step --preset=w1
  python -m rpg_jax.bench step --preset=w1 --beside=model.lora.rank=4 --beside=model.lora.rank=16

The config as given has a column, and so has every --beside. All settings are on the devices together. Their updates
take turns, and each round begins with another setting: a busy machine slows all alike. `seconds` is the median of
--repeats updates after the first, with the least and the most; `of_first` is its ratio to the first column's.
`cpu_seconds` is the median CPU time of this process, over its threads: what other processes take from a machine changes
it less. `first_step_seconds` ends with the first update, imports and compilation included; it begins with the process,
or with the setting if that is not the first.

`model_flops` are the mathematics on all devices, without the adapters' own products and without recomputation, except
for the logits', and `share_of_peak` is their share of the bf16 peak of GPUs or TPUs. `program_flops` and
`program_bytes` are of one device, counted in the compiled update, with what is computed again. XLA's own cost analysis
counts a loop over layers once; here it counts once for each layer. Programs for GPUs hide their products in calls of
libraries, so a GPU does not have these two fields.

All bytes are of one device. `arguments_bytes` to `in_place_bytes` are the compiler's. `peak_bytes` is measured, of all
settings so far; on CPU it is the process's. `base_bytes` are frozen weights, `trained_bytes` weights or adapters,
`slots_bytes` the optimizer's state. `sync_bytes` are what a weight sync brings to the rollout in its dtype. Where the
dtype is the trainer's and all weights are trained, one device has them once, and a sync copies nothing.

`python -m experiments.peers step` puts the same update in PyTorch beside it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from rpg_jax.benchmarks import subject
from rpg_jax.benchmarks.subject import Peer, Subject
from rpg_jax.models import parameter_count
from rpg_jax.planning.hlo import count
from rpg_jax.runs import cli, memory
from rpg_jax.runs.memory import bytes_on_a_device, make_decoding
from rpg_jax.storage.errors import say
from rpg_jax.training.step import Frozen


def arguments(parser: cli.Parser) -> None:
    """Adds the options of this command to its parser."""
    subject.arguments(parser)
    parser.add_argument("--repeats", type=cli.number(int, 1), default=7, help="timed updates of a setting (default 7)")
    parser.add_beside("another setting, as model.lora.rank=16 or model.lora.rank=4,model.remat=full; may be repeated")


def run(
    arguments: argparse.Namespace, start_peer: Callable[[Subject], Peer] | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Yields one list with the measurement of each setting, a dict of fields. Progress goes to stderr. `start_peer`
    starts another library on the first setting. The library's updates take turns with ours, and it ends after them. The
    field `ratio` is the first setting's median over the library's. Raises ValueError if a setting is wrong."""
    settings = cli.settings(arguments.beside).items()
    subjects = {name: subject.chosen(arguments, changes=changes) for name, changes in settings}
    contenders: list[Contender] = []
    for number, (name, one) in enumerate(subjects.items(), 1):
        say(f"{one.name}, {name}: setting {number} of {len(subjects)}; {one.tokens} tokens; weights, compiling")
        contenders.append(Contender(one, name, number == 1))
    peer = start_peer(contenders[0].one) if start_peer else None
    theirs: list[Mapping[str, Any]] = []
    for repeat in range(arguments.repeats):
        for turn in range(len(contenders)):
            contenders[(repeat + turn) % len(contenders)].update()
        if peer:
            theirs.append(peer.work())
        versus = f", torch {theirs[-1]['seconds']:.3f} s" if theirs else ""
        ours = ", ".join(f"{contender.times[-1][0]:.3f} s" for contender in contenders)
        say(f"round {repeat + 1} of {arguments.repeats}: {ours}{versus}")
    first = contenders[0].result()
    results = [first, *(contender.result(first["seconds"]) for contender in contenders[1:])]
    if peer:
        peer.close()
        seconds = [answer["seconds"] for answer in theirs]
        first |= {
            "torch_seconds": statistics.median(seconds),
            "torch_seconds_min": min(seconds),
            "torch_first_step_seconds": peer.first["first_step_seconds"],
            "torch_peak_bytes": theirs[-1]["peak_bytes"],
            "ratio": first["seconds"] / statistics.median(seconds),
        }
    yield results


class Contender:
    """The compiled update of one setting, with its arrays. The constructor compiles the update and runs it once. `one`
    has the programs, and `name` is the setting, as --beside has it. With `first_of_process`, the seconds of the first
    update count from the start of this process."""

    def __init__(self, one: Subject, name: str, first_of_process: bool):
        self.one, self.name, began = one, name, time.perf_counter()
        self.times: list[tuple[float, float]] = []
        with one.layout.activate():
            self.batch = one.batch()
            with ThreadPoolExecutor(1) as pool:
                compiling = pool.submit(one.programs.fused.lower(one.learner.like, self.batch).compile)
                self.frozen, self.state = Frozen(one.base()), one.state()
                self.compiled = compiling.result()
        self.update()
        self.first = subject.since_start() if first_of_process else time.perf_counter() - began
        self.times.clear()

    def update(self) -> None:
        """Makes an update and waits for it; appends its seconds, and this process's seconds of CPU time, to `times`."""
        began, used = time.perf_counter(), time.process_time()
        with self.one.layout.activate():
            self.state, self.metrics = jax.block_until_ready(self.compiled(self.frozen, self.state, self.batch))
        self.times.append((time.perf_counter() - began, time.process_time() - used))

    def result(self, of: float | None = None) -> dict[str, Any]:
        """Returns the measurement of all `update` calls, a dict. `of_first` in it: median seconds / `of` (None: 1)."""
        one, (ours, used) = self.one, zip(*self.times, strict=True)
        layout, seconds = one.layout, statistics.median(ours)
        asked: Any = self.compiled.memory_analysis()
        trained, peak = bytes_on_a_device(one.learner.like.params), subject.peak_flops()
        found: dict[str, Any] = {
            "bench": "step",
            "setting": self.name,
            "subject": one.name,
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "parameters": parameter_count(layout.model),
            "trained": sum(x.size for x in jax.tree.leaves(one.learner.like.params)),
            "tokens": one.tokens,
            "seconds": seconds,
            "seconds_min": min(ours),
            "seconds_max": max(ours),
            "cpu_seconds": statistics.median(used),
            "of_first": seconds / (of or seconds),
            "tokens_per_s": one.tokens / seconds,
            "first_step_seconds": self.first,
            "model_flops": one.step_flops,
            "model_flops_per_s": one.step_flops / seconds,
        }
        if peak:
            found["share_of_peak"] = one.step_flops / seconds / peak
        if jax.devices()[0].platform != "gpu":
            costs = count(self.compiled.as_text() or "")
            found |= {"program_flops": costs.flops, "program_bytes": costs.bytes}
        return {
            **found,
            "arguments_bytes": asked.argument_size_in_bytes,
            "temporaries_bytes": asked.temp_size_in_bytes,
            "outputs_bytes": asked.output_size_in_bytes,
            "in_place_bytes": asked.alias_size_in_bytes,
            "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use") or subject.peak_bytes(),
            "base_bytes": int(bytes_on_a_device(layout.base)),
            "trained_bytes": int(trained),
            "slots_bytes": int(bytes_on_a_device(one.learner.like) - trained),
            "sync_bytes": int(bytes_on_a_device(memory.synced_params(layout, make_decoding(layout)))),
            "loss": float(self.metrics["loss"][0] / self.metrics["loss"][1]),
        }
