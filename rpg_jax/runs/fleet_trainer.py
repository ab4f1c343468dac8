"""Makes the rollout of a training run whose workers are processes of their own. It needs grpc."""

import dataclasses
import json
import socket
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import models, rollout
from rpg_jax.rollout.fleet.fleet_rollout import FleetRollout
from rpg_jax.rollout.fleet.hub import Hub
from rpg_jax.rollout.fleet.link import Link
from rpg_jax.rollout.fleet.published import Published
from rpg_jax.rollout.fleet.service import Service
from rpg_jax.rollout.fleet.shelf import Shelf
from rpg_jax.rollout.serving.access import CERTIFICATE, PRIVATE_KEY, Access, ApiKey, is_loopback, pem_file
from rpg_jax.runs import memory, processes
from rpg_jax.runs.experiment import Experiment


def make_fleet(
    experiment: Experiment, params: Any, waiting: Callable[[], None], base: models.Base | None = None
) -> FleetRollout:
    """The trainer's end of a fleet, which listens for workers; `waiting` is called while there is none.

    With a base, `params` are the adapters beside it, and workers get the two merged.

    Raises:
      ValueError: the fleet's address is open without TLS and a key, or its port is taken; or fields contradict it.
    """
    config = experiment.config
    c = config.fleet
    if config.rollout.devices or config.rollout.swap == "midway":
        raise ValueError("rollout.driver=fleet needs rollout.devices=0 and rollout.swap=between: workers sample")
    access = _access(config)
    shelf = Shelf()
    hub = Hub(spec_of(experiment), lost_seconds=c.lost_seconds, stall_seconds=c.stall_seconds)
    service = Service(hub, shelf, access, c.port and c.port + jax.process_index())
    m = config.model
    dtype = None if m.compute_dtype == m.param_dtype else jnp.dtype(m.compute_dtype)
    return FleetRollout(
        hub,
        shelf,
        service,
        Published(params, shelf, dtype=dtype, base=base),
        advertised=f"{_own_address(config)}:{service.port}",
        connect=lambda address: Link(address, key=access.key, certificate=access.certificate),
        waiting=waiting,
    )


def spec_of(experiment: Experiment) -> dict[str, Any]:
    """What the engine of a worker is made of, and the name of the run, JSON-able."""
    c, layout = experiment.config, experiment.layout
    spec = {
        "run": c.run.name,
        "model": dataclasses.asdict(layout.model),
        "vocab_size": layout.model.vocab_size,
        "weights_dtype": c.model.compute_dtype,
        "compute_dtype": c.model.compute_dtype,
        "capacity": rollout.capacity(c.task.max_prompt_tokens, c.rollout.max_tokens),
        "slots": c.rollout.slots,
        "needed": memory.prompts_of_a_step(c) * c.rollout.group_size,
        "tensor": c.rollout.tensor,
        "expert": c.rollout.expert,
        "int8": c.rollout.int8,
        "int8_kv": c.rollout.int8_kv,
        "sharding": c.sharding,
    }
    return json.loads(json.dumps(spec))


def _access(config: ConfigDict) -> Access:
    c = config.fleet
    try:
        files = pem_file(c.certificate, CERTIFICATE), pem_file(c.private_key, PRIVATE_KEY)
        access = Access(c.host, *files, ApiKey.find(c.key_file))
        access.tls()
    except ValueError as error:
        names = "the fields are fleet.host, fleet.certificate, fleet.private_key and fleet.key_file"
        raise ValueError(f"rollout.driver=fleet: {error} ({names})") from None
    return access


def _own_address(config: ConfigDict) -> str:
    """The address at which others reach this process."""
    c = config.fleet
    if c.advertise:
        return c.advertise
    arguments = processes.settings(config)
    if is_loopback(c.host) or c.host not in ("0.0.0.0", "::", "[::]"):
        return c.host
    if arguments is None:
        return socket.gethostname()
    host, _, port = arguments["coordinator_address"].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, int(port)))
        return probe.getsockname()[0]
