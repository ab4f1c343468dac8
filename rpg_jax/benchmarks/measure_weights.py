"""Measures how weights get from a trainer to its servers, by a folder, between processes of this host.

The weights are random, in bfloat16, split over the processes. `copy` is from the devices to host memory, whole tensors
gathered; training stands still meanwhile. `write` lasts until every process has written its part. `read` is a server's,
into host memory, while it draws completions. `swap` is on the way to its devices, with the checksum, while it draws
none. Each is in seconds for 1e9 bytes of weights. The first version is written for practice: its programs compile.
Put --folder on the disk that trainer and servers share, or on /dev/shm where they are one machine.
"""

import argparse
import itertools
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import models, parallel
from rpg_jax.parallel import hosts
from rpg_jax.rollout.servers.balance import Loadable
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.rollout.weights import weights_checksum


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", default=tempfile.gettempdir(), help="the weights go below it (default: %(default)s)"
    )
    parser.add_argument("--trainers", default="1,2,4", metavar="N,N,…", help="processes that write (default 1,2,4)")
    parser.add_argument("--layers", type=int, default=12, help="of 25 MB each, beside 67 MB (default 12)")
    parser.add_argument("--versions", type=int, default=5, help="that are timed; the median counts (default 5)")


def run(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    numbers = [int(number) for number in arguments.trainers.split(",")]
    if min(*numbers, arguments.layers, arguments.versions, 2) < 1:
        raise ValueError("--trainers, --layers and --versions must be positive")
    context = multiprocessing.get_context("spawn")  # each process has a JAX of its own
    found = []
    for number in numbers:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as home, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port, answers = free.getsockname()[1], context.SimpleQueue()
            free.close()
            work = (home, port, number, arguments.layers, arguments.versions, answers)
            trainers = [context.Process(target=_trainer, args=(process, *work)) for process in range(number)]
            for trainer in trainers:
                trainer.start()
            for trainer in trainers:
                trainer.join()
            if any(trainer.exitcode for trainer in trainers):
                raise RuntimeError("a trainer has failed; its message is above")
            found.append(answers.get())
    yield found


def _trainer(process: int, home: str, port: int, number: int, layers: int, versions: int, answers: Any) -> None:
    """One process of the trainer. The first one is the server too, when all have written."""
    if number > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", number, process)
    config = models.DecoderConfig(vocab_size=2**15, num_layers=layers, embed_dim=1024, num_heads=16, num_kv_heads=8,
                               head_dim=128, hidden_dim=3072)  # fmt: skip
    shapes = models.abstract(config)[1]
    mesh = parallel.make_mesh({"fsdp": number})
    where = parallel.shardings(models.logical_axes(config), shapes, mesh)
    dice = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x, sharding: hosts.placed(dice.random(x.shape, np.float32), sharding).astype(jnp.bfloat16), shapes, where
    )
    used: list[Loadable] = []
    deployed = WeightFolders(params, Path(home), models.Saving(config, jnp.bfloat16, max_file_bytes=2**27), used.append)
    counts: list[dict[str, float]] = []
    change = jax.jit(lambda params: jax.tree.map(lambda x: x + jnp.bfloat16(1), params), donate_argnums=0)
    for version in range(versions + 1):
        params = change(params)
        deployed.sync(params, version)
        counts.append(deployed.take_counts())
    if process:
        return
    size = counts[0]["servers/weights_bytes"]
    copy, write = (
        float(np.median([one[f"servers/weights_{name}_seconds"] for one in counts[1:]])) for name in ("copy", "write")
    )
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    laps: list[list[float]] = []
    for _ in range(versions + 1):
        laps.append([time.perf_counter()])
        held = models.read(used[-1].folder, config)
        laps[-1].append(time.perf_counter())
        placed = held.placed(jnp.bfloat16, jax.tree.map(lambda _: one_device, shapes))
        assert weights_checksum(placed) == used[-1].checksum
        laps[-1].append(time.perf_counter())
    read, swap = np.median([[b - a for a, b in itertools.pairwise(lap)] for lap in laps[1:]], axis=0).tolist()
    seconds = {"copy": copy, "write": write, "read": read, "swap": swap}
    answers.put(
        {
            "bench": "weights",
            "device": jax.devices()[0].device_kind,
            "folder": str(Path(home).parent),
            "trainers": number,
            "bytes": int(size),
            "bytes_of_a_process": int(counts[0]["servers/weights_bytes_of_a_process"]),
            "seconds": sum(seconds.values()),
            **{f"{name}_s_per_gb": value / size * 1e9 for name, value in seconds.items()},
        }
    )
