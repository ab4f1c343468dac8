"""Makes the rollout of a training run whose completions come from servers."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import models, rollout, storage
from rpg_jax.rollout.served.balance import Balance
from rpg_jax.rollout.served.calls import Caller
from rpg_jax.rollout.served.deployed import Deployed
from rpg_jax.rollout.served.kinds import KINDS
from rpg_jax.rollout.served.served_rollout import ServedRollout
from rpg_jax.rollout.serving.access import ApiKey
from rpg_jax.runs.experiment import Experiment


def make_served(experiment: Experiment, params: Any, base: models.Base | None = None) -> ServedRollout:
    """The trainer's end of its servers, none of which need be there yet.

    With a base, `params` are the adapters beside it, and servers get the two merged.

    Raises:
      ValueError: an address, the key, the folder or another field does not fit; or several processes train.
    """
    config, layout, tokenizer = experiment.config, experiment.layout, experiment.tokenizer
    c, m, kind = config.servers, config.model, KINDS[config.servers.kind]
    _check(config)
    kind.check(experiment.sampling(config.rollout.temperature), c.kind)
    how: dict[str, Any] = {"certificate": c.certificate, "timeout": c.timeout_seconds, "key": _key(c.key_variable)}
    callers = [Caller(url, **how) for url in _addresses(c.urls)]
    balance = Balance(callers, kind, parallel=c.parallel, patience=c.patience_seconds)
    original = {"base": models.local_folder(m.path, weights=False)} if m.path else {}
    ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    known: dict[str, Any] = original or {"fields": ids}
    weights = Deployed(
        params,
        _home(c.weights, config.run.name),
        lambda folder, params: models.save(folder, layout.model, params, **known),
        balance.use,
        dtype=None if m.compute_dtype == m.param_dtype else jnp.dtype(m.compute_dtype),
        base=base,
    )
    return ServedRollout(
        balance,
        weights,
        model=c.model,
        counters=kind.counters,
        capacity=rollout.capacity(config.task.max_prompt_tokens, config.rollout.max_tokens),
        vocab_size=layout.model.vocab_size,
    )


def _check(config: ConfigDict) -> None:
    r = config.rollout
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout.driver=servers trains in one process, not {jax.process_count()}: choose rollout.driver=fleet"
        )
    if r.devices or r.swap == "midway":
        raise ValueError("rollout.driver=servers needs rollout.devices=0 and rollout.swap=between: servers sample")
    if r.int8 or r.int8_kv:
        raise ValueError("rollout.driver=servers: rollout.int8 and int8_kv are the servers' own choice; leave them out")


def _addresses(text: str) -> list[str]:
    urls = [url.strip() for url in text.split(",") if url.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"rollout.driver=servers needs different addresses in servers.urls, got {text!r}")
    return urls


def _key(variable: str) -> ApiKey | None:
    text = os.environ.get(variable, "").strip()
    try:
        return ApiKey(text) if text else None
    except ValueError as error:
        raise ValueError(f"servers.key_variable={variable}: {error}") from None


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
