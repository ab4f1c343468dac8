"""The processes of one run: they join each other, and the run stops where they differ.

On TPU slices the launcher sets JAX_COORDINATOR_ADDRESS and JAX finds the rest. Elsewhere JAX_NUM_PROCESSES and
JAX_PROCESS_ID give the number of processes and the rank.
"""

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax.parallel import hosts
from rpg_jax.rollout import find_driver
from rpg_jax.runs import run_folder

PORT = 8476  # Google's automatic firewall rule does not open jax's own default, 8482 (jax#35905)
_INITIALIZATION_SECONDS = 1800  # slices of one run may become ready minutes apart
_GPUS = ("gpu", "cuda", "rocm")  # JAX calls all of them "gpu" once it has found them


def join(config: ConfigDict) -> None:
    """Joins the other processes of the run, if there are any, and finds the devices. Nothing may touch a device before.

    Raises:
      ValueError: the settings contradict each other, or there is no device of the kind that `run.platform` or
        JAX_PLATFORMS asks for. The message names the process that holds a TPU.
    """
    asked = config.run.platform
    if asked:  # JAX then raises where the device is missing, instead of taking the CPU
        jax.config.update("jax_platforms", "cuda" if asked == "gpu" else asked)
    if (arguments := settings(config)) is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(**arguments)
    found = platform()
    if asked and found != ("gpu" if asked in _GPUS else asked):
        raise ValueError(f"run.platform={asked!r}, but JAX found {found!r} on {socket.gethostname()}")


def platform() -> str:
    """The platform that JAX computes on: `cpu`, `gpu` or `tpu`. Raises ValueError if its device is absent or taken."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is one
        holders = "; ".join(f"process {pid} ({command})" for pid, command in device_holders().items())
        held = f" It is held by {holders}: stop that, then start again." if holders else ""
        asked = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = " ".join(str(error).split()) or f"JAX finds nothing of {asked!r}"
        raise ValueError(f"no accelerator on {socket.gethostname()}: {reason}.{held}") from error


def check(config: ConfigDict) -> None:
    """Checks this process against the config and against the other processes.

    Raises:
      ValueError: sampling ahead would share devices with training, or processes differ; the message names the host and
        the difference.
    """
    ahead, devices = config.rollout.max_staleness, jax.device_count()
    shared = not config.rollout.devices and not find_driver(config.rollout.driver).remote
    if ahead and jax.process_count() == 1 and devices > 1 and shared:
        raise ValueError(
            f"rollout.max_staleness={ahead} on {devices} devices needs some devices that only sample: two threads that "
            "launch programs on the same devices can block each other for ever. Set rollout.devices, "
            f"to {devices // 2} for instance, or rollout.max_staleness=0, or rollout.driver=servers"
        )
    gathered = hosts.all_gather_bytes(json.dumps(facts(config)).encode())
    if difference := differences([json.loads(text) for text in gathered]):
        raise ValueError(f"the hosts of this run are not alike: {difference}")


def settings(config: ConfigDict) -> dict[str, Any] | None:
    """The arguments of `jax.distributed.initialize`; None for a run of one process.

    Raises:
      ValueError: several processes without a coordinator, or a rank out of range.
    """
    c, env = config.distributed, os.environ
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    processes, process_id = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
    if not coordinator:
        if processes is not None and processes > 1:
            raise ValueError(
                f"{processes} processes need JAX_COORDINATOR_ADDRESS=HOST:{PORT}, the address of the first"
            )
        return None
    if processes is not None and (process_id is None or not 0 <= process_id < processes):
        raise ValueError(f"JAX_PROCESS_ID must be in 0..{processes - 1}, got {process_id}")
    host, _, port = coordinator.rpartition(":") if ":" in coordinator else (coordinator, "", str(PORT))
    return {
        "coordinator_address": f"{host}:{port}",
        "num_processes": processes,
        "process_id": process_id,
        "initialization_timeout": _INITIALIZATION_SECONDS,
        **({} if c.heartbeat_timeout is None else {"heartbeat_timeout_seconds": c.heartbeat_timeout}),
    }


def facts(config: ConfigDict) -> dict[str, Any]:
    """Facts that must be the same in all processes of a run; "host" is for the message."""
    made_with = run_folder.made_with()
    fields = run_folder.flat_fields(config)
    return {
        "host": socket.gethostname(),
        "platform": made_with["platform"],
        "local devices": f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
        "commit": made_with["commit"],
        "python": made_with["python"],
        **{f"version of {name}": version for name, version in made_with["packages"].items()},
        "config hash": hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12],
        **{f"config.{name}": value for name, value in fields.items()},
    }


def differences(all_facts: list[dict[str, Any]]) -> str:
    """The differences of each process from the first, in words; "" if there are none."""
    first, named = all_facts[0], []
    for process, other in enumerate(all_facts[1:], start=1):
        named += [
            f"process {process} on {other['host']} has {name} {other.get(name)!r}, process 0 on {first['host']} "
            f"{first.get(name)!r}"
            for name in sorted({*first, *other} - {"host"})
            if first.get(name) != other.get(name)
        ]
    return "; ".join(named)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text and not text.isdigit():
        raise ValueError(f"{variable}={text!r} must be a whole number")
    return int(text) if text else None


def device_holders(proc: Path = Path("/proc")) -> dict[int, str]:
    """The command lines of other processes of this host that have a TPU's device file open, by process id."""
    holders = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            files = [os.readlink(file) for file in (folder / "fd").iterdir()]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # the process has ended, or belongs to another user
        if any(file.startswith(("/dev/accel", "/dev/vfio/")) and file != "/dev/vfio/vfio" for file in files):
            holders[int(folder.name)] = command
    return holders
