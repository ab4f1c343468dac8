"""Makes the rollout of a training run whose completions come from servers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import models, rollout, storage
from rpg_jax.parallel import hosts
from rpg_jax.rollout.servers.balance import Balance
from rpg_jax.rollout.servers.client import Client, Look, source
from rpg_jax.rollout.servers.protocol import Probe, prober
from rpg_jax.rollout.servers.rollout import ServersRollout
from rpg_jax.rollout.servers.server import KINDS
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.rollout.serving.access import CERTIFICATE, ApiKey, pem_file
from rpg_jax.runs.experiment import Experiment

KEY_VARIABLE = "RPG_JAX_SERVERS_KEY"
"""The environment variable with the servers' API key, if they have one."""

_FILE_BYTES = 512 * 2**20  # a process writes several files at once


def make_served(experiment: Experiment, params: Any, base: models.Base | None = None) -> ServersRollout:
    """The rollout that takes completions from servers. The servers need not run yet.

    If there is a `base`, `params` are its adapters, and servers get base and adapters merged.

    Raises:
      ValueError: an address, the key, the folder or another field does not fit.
    """
    config, layout, tokenizer = experiment.config, experiment.layout, experiment.tokenizer
    c, m, kind = config.servers, config.model, KINDS[config.servers.kind]
    _check(config)
    client = Client(
        key=_key(),
        certificate=pem_file(c.certificate, CERTIFICATE),
        certificate_name=c.certificate_name,
        timeout=c.timeout_seconds,
    )
    addresses = _addresses(c.urls, client, shared=kind.counters)
    balance = Balance(addresses, client, kind, parallel=c.parallel, patience=c.patience_seconds)
    original = {"base": models.local_folder(m.path, weights=False)} if m.path else {}
    ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    known: dict[str, Any] = original or {"fields": ids}
    weights = WeightFolders(
        params,
        _home(c.weights, config.run.name),
        models.Saving(layout.model, m.compute_dtype, head=kind.head, max_file_bytes=_FILE_BYTES, **known),
        balance.use,
        dtype=None if m.compute_dtype == m.param_dtype else jnp.dtype(m.compute_dtype),
        base=base,
        probe=None if kind.counters else _probe(experiment),
    )
    return ServersRollout(
        balance,
        weights,
        model=c.model,
        counters=kind.counters,
        capacity=rollout.capacity(config.task.max_prompt_tokens, config.rollout.max_tokens),
        vocab_size=layout.model.vocab_size,
    )


def _probe(experiment: Experiment) -> Callable[[Any], Probe]:
    config, layout = experiment.config, experiment.layout
    return prober(
        layout.graphdef,
        layout.model,
        config.model.compute_dtype,
        rows=layout.mesh.size,
        replicated=layout.replicated,
        prompt=config.task.max_prompt_tokens,
        tokens=config.rollout.max_tokens,
        known_ids=experiment.tokenizer.vocab_size,
        model=config.servers.model,
    )


def _check(config: ConfigDict) -> None:
    r = config.rollout
    if r.devices:
        raise ValueError("rollout.driver=servers needs rollout.devices=0: servers sample")
    if r.int8 or r.int8_kv:
        raise ValueError("rollout.driver=servers: rollout.int8 and int8_kv are the servers' own choice; leave them out")


def _addresses(text: str, client: Client, *, shared: bool) -> list[str] | Look:
    """The servers of this process: all servers if processes can share a server, else a part of them.

    If two processes ask one server, each makes the server load weights, which breaks off the completions for the other
    process. Only a server that names its weights in each answer can serve several processes.
    """
    found, processes = source(text, client.check), jax.process_count()
    if shared or processes == 1:
        return found
    if callable(found) or len(found) < processes:
        raise ValueError(
            f"servers.urls={text}: {processes} processes train, and each needs a server of its own in a list of "
            "addresses; only servers of servers.kind=rpg_jax are shared, and may come and go"
        )
    return hosts.share(found)


def _key() -> ApiKey | None:
    text = os.environ.get(KEY_VARIABLE, "").strip()
    try:
        return ApiKey(text) if text else None
    except ValueError as error:
        raise ValueError(f"the variable {KEY_VARIABLE}: {error}") from None


def _home(folder: str | None, run: str) -> Path:
    """The folder of this run's weights."""
    if not folder:
        raise ValueError(
            "rollout.driver=servers needs servers.weights, a folder that the servers see too: weights that never "
            "reach them are those of another policy after the first update"
        )
    home = Path(storage.local(folder)).resolve() / run
    home.mkdir(parents=True, exist_ok=True)
    return home
