"""Times the update: forward, backward, clip and optimizer of one micro-batch, from random weights.

`seconds` is the median of --repeats updates after the first, `seconds_min` the least. `first_step_seconds` counts from
the start of the process to the end of the first update, with imports and compilation. `model_flops_per_s` counts the
mathematics without recomputation; `share_of_peak` is its share of the bf16 peak of the GPUs or TPUs.

--against=PYTHON runs the same model and update in PyTorch, in a process of that interpreter, which needs torch. The
process starts after our first update. Its updates alternate with ours: a busy machine slows both alike. `ratio` is our
median over theirs.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from rpg_jax.benchmarks import subject
from rpg_jax.benchmarks.opponent import Opponent
from rpg_jax.benchmarks.subject import DIMENSIONS, Subject, progress
from rpg_jax.models import parameter_count
from rpg_jax.runs.cli import Parser


def arguments(parser: Parser) -> None:
    subject.arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed updates (default 7)")
    parser.add_argument("--against", metavar="PYTHON", help="an interpreter that has torch, or `torch` for this one")


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be >= 1, got {arguments.repeats}")
    yield bench_step(subject.chosen(arguments), arguments.repeats, arguments.against)


def bench_step(one: Subject, repeats: int, against: str | None) -> dict[str, Any]:
    with one.layout.activate():
        progress(f"{one.name}: {one.layout.model.num_layers} layers, {one.tokens} tokens per step; weights, compiling")
        batch = one.batch()
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(one.programs.fused.lower(one.learner.like, batch).compile)
            base, state = one.base(), one.state()
            update = compiling.result()
        state, _ = jax.block_until_ready(update(base, state, batch))
        first = subject.since_start()
        opponent = _opponent(against, one) if against else None
        ours: list[float] = []
        theirs: list[dict[str, Any]] = []
        for repeat in range(repeats):
            began = time.perf_counter()
            state, metrics = jax.block_until_ready(update(base, state, batch))
            ours.append(time.perf_counter() - began)
            if opponent:
                theirs.append(opponent.work())
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
    if opponent:
        opponent.close()
        theirs_seconds = [answer["seconds"] for answer in theirs]
        result |= {
            "torch_seconds": statistics.median(theirs_seconds),
            "torch_seconds_min": min(theirs_seconds),
            "torch_first_step_seconds": opponent.first["first_step_seconds"],
            "torch_peak_bytes": theirs[-1]["peak_bytes"],
        }
        result["ratio"] = seconds / result["torch_seconds"]
    return result


def _opponent(python: str, one: Subject) -> Opponent:
    layout, shape, model = one.layout, one.shape, one.layout.model
    if model.experts:
        raise ValueError("--against knows dense models only")
    names = ("vocab_size", "num_layers", *DIMENSIONS, "tie_embeddings", "rms_norm_eps")
    kinds = {"attention_bias": model.qkv_bias, "qk_norm": model.qk_norm, "rope_theta": model.rope.theta}
    sizes = {
        "model": kinds | {name: getattr(model, name) for name in names},
        "rows": shape.rows,
        "length": shape.length,
        "completion": min(shape.completion_length, shape.length - 1),
        "dtype": layout.config.model.compute_dtype,
        "learning_rate": layout.config.optimizer.learning_rate,
    }
    progress(f"PyTorch in {python}: first step")
    return Opponent(python, "torch_step.py", sizes)
