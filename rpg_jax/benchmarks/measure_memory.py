"""Measures the memory of a step: the log-prob pass and one update.

`peak_bytes` is the measured peak: of a device on GPU and TPU, of the process on CPU. `update_…` and `logprobs_…` are
the compiler's figures: bytes of arguments, of temporaries, of outputs, and of arguments that outputs overwrite.
`state_bytes` counts the weights, frozen ones too, and the optimizer's state.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import jax

from rpg_jax.benchmarks import subject
from rpg_jax.benchmarks.subject import Subject, progress

arguments = subject.arguments


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield bench_memory(subject.chosen(arguments))


def bench_memory(one: Subject) -> dict[str, Any]:
    with one.layout.activate():
        progress(f"{one.name}: weights, compiling")
        base, state, batch = one.base(), one.state(), one.batch()
        logprobs = one.programs.logprobs.lower(state.params, batch.rows).compile()
        update = one.programs.fused.lower(state, batch).compile()
        began = time.perf_counter()
        jax.block_until_ready(logprobs(base, state.params, batch.rows))
        state, _ = jax.block_until_ready(update(base, state, batch))
        seconds = time.perf_counter() - began
    result = {
        "bench": "memory",
        "subject": one.name,
        "device": jax.devices()[0].device_kind,
        "tokens": one.tokens,
        "seconds": seconds,
        "tokens_per_s": one.tokens / seconds,
        "peak_bytes": subject.measured_peak(),
        "state_bytes": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((base, state))),
    }
    for name, program in (("update", update), ("logprobs", logprobs)):
        result |= {f"{name}_{part}": size for part, size in subject.asked_bytes(program).items()}
    return result
