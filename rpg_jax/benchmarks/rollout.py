"""Times completions of exactly `max_tokens` tokens from random weights, by each driver and by a bare jitted decode loop
in the same run, interleaved so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rpg_jax import models, rollout
from rpg_jax.benchmarks.presets import PRESETS, Work, peak_bytes
from rpg_jax.rollout import Rollout
from rpg_jax.types import Sampling


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="w1")
    parser.add_argument("--repeats", type=int, default=5, help="timed rollouts per driver (default 5)")
    parser.add_argument("--steps-per-dispatch", type=int, default=16)


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.repeats < 1:
        raise ValueError(f"--repeats must be >= 1, got {arguments.repeats}")
    yield bench_rollout(arguments.preset, arguments.repeats, arguments.steps_per_dispatch)


def bench_rollout(preset: str, repeats: int, steps_per_dispatch: int) -> dict[str, Any]:
    """Medians over `repeats`: seconds, tokens/s, prefill and decode seconds, slot occupancy; per driver.

    The fields without a prefix are those of `orchestrator`, the default driver; `peak_bytes` is the process's.
    """
    work = PRESETS[preset]
    graphdef, params = models.build(work.model)
    size = {"max_prompt_tokens": work.prompt_tokens, "max_tokens": work.new_tokens, "config": work.model}
    drivers = {
        name: rollout.build(name, graphdef, params, slots=work.slots, steps_per_dispatch=steps_per_dispatch, **size)
        for name in ("simple", "lockstep", "orchestrator")
    }
    first = {name: _seconds(_call(driver, work, 0)) for name, driver in drivers.items()}
    usage = {name: dataclasses.replace(d.usage) for name, d in drivers.items() if name != "simple"}
    seconds: dict[str, list[float]] = {name: [] for name in drivers}
    for repeat in range(repeats):
        for name, driver in drivers.items():
            seconds[name].append(_seconds(_call(driver, work, repeat + 1)))
    tokens = work.prompts * work.group_size * work.new_tokens
    bare = statistics.median(seconds["simple"])
    parameters = sum(x.size for x in jax.tree.leaves(params))
    result: dict[str, Any] = {
        "preset": preset,
        "device": jax.devices()[0].device_kind,
        "parameters": parameters,
        "tokens": tokens,
        "bare_loop_seconds": bare,
        "bare_loop_tokens_per_s": tokens / bare,
        "bare_loop_first_seconds": first["simple"],
    }
    for name in ("orchestrator", "lockstep"):
        median, used, before = statistics.median(seconds[name]), drivers[name].usage, usage[name]
        prefix = "" if name == "orchestrator" else f"{name}_"
        decode = (used.decode_s - before.decode_s) / repeats
        result |= {
            f"{prefix}seconds": median,
            f"{prefix}tokens_per_s": tokens / median,
            f"{prefix}first_seconds": first[name],
            f"{prefix}of_bare_loop": bare / median,
            f"{prefix}decode_seconds": decode,
            f"{prefix}prefill_and_host_seconds": statistics.mean(seconds[name]) - decode,
            f"{prefix}occupancy": (used.tokens - before.tokens) / ((used.steps - before.steps) * work.slots),
        }
    step = result["decode_seconds"] * work.slots / tokens
    result |= {
        "decode_step_seconds": step,
        "decode_gflop_per_s": 2 * parameters * work.slots / step / 1e9,
        "peak_bytes": peak_bytes(),
    }
    for driver in drivers.values():
        driver.close()
    return result


def _call(driver: Rollout, work: Work, step: int) -> Callable[[], Any]:
    prompts = [
        np.random.default_rng(i).integers(0, work.model.vocab_size, work.prompt_tokens).astype(np.int32)
        for i in range(work.prompts)
    ]
    asked = {"prompt_ids": range(work.prompts), "group_size": work.group_size, "seed": 0, "step": step}
    return lambda: driver.generate(prompts, sampling=Sampling(max_tokens=work.new_tokens), **asked)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
