"""Times completions of exactly `max_tokens` tokens from random weights, by each driver.

The drivers take turns within one run: a busy machine slows all of them alike.
`python -m experiments.peers rollout` puts Hugging Face's `generate` and Tunix's sampler beside them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from rpg_jax import models, rollout
from rpg_jax.benchmarks.subject import PRESETS, Peer, Work, peak_bytes
from rpg_jax.rollout import Request, Rollout
from rpg_jax.runs import cli
from rpg_jax.types import Sampling


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command to its parser."""
    parser.add_argument("--preset", choices=PRESETS, default="w1")
    parser.add_argument("--repeats", type=cli.number(int, 1), default=5, help="timed rollouts per driver (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="that decode (default 1)")


def run(arguments: argparse.Namespace, peers: Mapping[str, Peer] = MappingProxyType({})) -> Iterator[dict[str, Any]]:
    """Yields one measurement, a dict: for each driver its medians of seconds and tokens/s over --repeats, its means of
    decode seconds and of other seconds, and its slot occupancy. The fields of the first driver have no prefix. Fields
    of lockstep beside JetStream begin with "lockstep_". `peers`, by name, make as many completions in turn, and are
    closed before the result. `peak_bytes` is this process's. If a peer made another number, raises ValueError."""
    work = PRESETS[arguments.preset]
    if jax.default_backend() == "cpu":
        cli.keep_buffers()  # as a run does
    drivers, parameters = _drivers(work, arguments.threads)
    first = {name: _seconds(driver, work, 0) for name, driver in drivers.items()}
    usage = {name: dataclasses.replace(driver.usage) for name, driver in drivers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in (*drivers, *peers)}
    for repeat in range(arguments.repeats):
        for name, driver in drivers.items():
            seconds[name].append(_seconds(driver, work, repeat + 1))
        for name, peer in peers.items():
            answer = peer.work()
            if answer["tokens"] != work.tokens:
                raise ValueError(f"a peer made {answer['tokens']} tokens instead of {work.tokens}")
            seconds[name].append(answer["seconds"])
    others = {name: statistics.median(seconds[name]) for name in peers}
    result: dict[str, Any] = {
        "preset": arguments.preset,
        "device": jax.devices()[0].device_kind,
        "parameters": parameters,
        "tokens": work.tokens,
        "threads": arguments.threads,
    }
    for name in drivers:
        before, after, median = usage[name], drivers[name].usage, statistics.median(seconds[name])
        decode = (after.decode_s - before.decode_s) / arguments.repeats
        figures = {
            "seconds": median,
            "tokens_per_s": work.tokens / median,
            "first_seconds": first[name],
            "decode_seconds": decode,
            "prefill_and_host_seconds": statistics.mean(seconds[name]) - decode,
            "occupancy": (after.tokens - before.tokens) / ((after.steps - before.steps) * work.slots),
            **{f"of_{peer}": other / median for peer, other in others.items()},
        }
        prefix = "" if name == next(iter(drivers)) else f"{name}_"
        result |= {f"{prefix}{field}": value for field, value in figures.items()}
    result["peak_bytes"] = peak_bytes()
    for name, other in others.items():
        result |= {f"{name}_seconds": other, f"{name}_tokens_per_s": work.tokens / other}
        peers[name].close()
    for driver in drivers.values():
        driver.close()
    yield result


def _drivers(work: Work, threads: int) -> tuple[dict[str, Any], int]:
    """Makes every installed driver on one set of random weights; returns them by name, and the number of weights."""
    graphdef, params = models.init(work.model, param_dtype=work.dtype, compute_dtype=work.dtype)
    capacity = rollout.capacity(work.prompt_tokens, work.new_tokens)
    how = rollout.Decoding(slots=work.slots, capacity=capacity, threads=threads)
    there = [name for name in rollout.LOCAL_DRIVERS if rollout.find_driver(name) is rollout.DRIVERS[name]]
    drivers = {name: rollout.make_rollout(name, work.model, graphdef, params, how) for name in there}
    return drivers, sum(x.size for x in jax.tree.leaves(params))


def _seconds(driver: Rollout, work: Work, step: int) -> float:
    prompts = [
        np.random.default_rng(i).integers(0, work.model.vocab_size, work.prompt_tokens).astype(np.int32)
        for i in range(work.prompts)
    ]
    sampling = Sampling(max_tokens=work.new_tokens)
    request = Request(prompts, range(work.prompts), work.group_size, sampling, 0, step)
    began = time.perf_counter()
    driver.generate(request)
    return time.perf_counter() - began
