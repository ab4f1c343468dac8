"""Times the update: forward, backward, clip and optimizer of one micro-batch, from random weights.

`seconds` is the median of --repeats updates after the first, `seconds_min` the least. `first_step_seconds` counts from
the start of the process to the end of the first update, with imports and compilation. `model_flops_per_s` counts the
mathematics without recomputation; `share_of_peak` is its share of the bf16 peak of the GPUs or TPUs.

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
from rpg_jax.benchmarks.subject import Peer, Subject, progress
from rpg_jax.models import parameter_count
from rpg_jax.runs.cli import Parser


def arguments(parser: Parser) -> None:
    subject.arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed updates (default 7)")


def run(arguments: argparse.Namespace, start_peer: Callable[[Subject], Peer] | None = None) -> Iterator[dict[str, Any]]:
    """The measurement; `start_peer` starts another library on a subject, beside ours."""
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be >= 1, got {arguments.repeats}")
    yield bench_step(subject.chosen(arguments), arguments.repeats, start_peer)


def bench_step(one: Subject, repeats: int, start_peer: Callable[[Subject], Peer] | None) -> dict[str, Any]:
    """The measurement of one subject.

    `start_peer` starts another library after our first update. Its updates alternate with ours: a busy machine slows
    both alike. `ratio` is our median over the peer's.
    """
    with one.layout.activate():
        progress(f"{one.name}: {one.layout.model.num_layers} layers, {one.tokens} tokens per step; weights, compiling")
        batch = one.batch()
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(one.programs.fused.lower(one.learner.like, batch).compile)
            base, state = one.base(), one.state()
            update = compiling.result()
        state, _ = jax.block_until_ready(update(base, state, batch))
        first = subject.since_start()
        peer = start_peer(one) if start_peer else None
        ours: list[float] = []
        theirs: list[Mapping[str, Any]] = []
        for repeat in range(repeats):
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(update(base, state, batch))
            ours.append(time.perf_counter() - began)
            if peer:
                theirs.append(peer.work())
            versus = f", torch {theirs[-1]['seconds']:.3f} s" if theirs else ""
            progress(f"step {repeat + 1} of {repeats}: {ours[-1]:.3f} s{versus}")
    seconds, peak = statistics.median(ours), subject.peak_flops()
    result = {
        "bench": "step",
        "subject": one.name,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "parameters": parameter_count(one.layout.model),
        "trained": sum(x.size for x in jax.tree.leaves(state.params)),
        "tokens": one.tokens,
        "seconds": seconds,
        "seconds_min": min(ours),
        "tokens_per_s": one.tokens / seconds,
        "first_step_seconds": first,
        "model_flops": one.step_flops,
        "model_flops_per_s": one.step_flops / seconds,
        "peak_bytes": subject.measured_peak(),
        "loss": float(metrics["loss"][0] / metrics["loss"][1]),
    }
    if peak:
        result["share_of_peak"] = one.step_flops / seconds / peak
    if peer:
        peer.close()
        theirs_seconds = [answer["seconds"] for answer in theirs]
        result |= {
            "torch_seconds": statistics.median(theirs_seconds),
            "torch_seconds_min": min(theirs_seconds),
            "torch_first_step_seconds": peer.first["first_step_seconds"],
            "torch_peak_bytes": theirs[-1]["peak_bytes"],
        }
        result["ratio"] = seconds / result["torch_seconds"]
    return result
