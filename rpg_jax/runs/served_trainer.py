"""Makes what a training run has of servers: the rollout of its completions, or the log-probs of its teacher."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import models, rollout, storage
from rpg_jax.parallel import hosts
from rpg_jax.rollout.servers.balance import Balance
from rpg_jax.rollout.servers.client import Client, Look, source
from rpg_jax.rollout.servers.protocol import Probe, prober
from rpg_jax.rollout.servers.rollout import ServedTeacher, ServersRollout
from rpg_jax.rollout.servers.server import KINDS, TEACHER
from rpg_jax.rollout.servers.weight_folders import WeightFolders
from rpg_jax.rollout.serving.access import CERTIFICATE, ApiKey, pem_file
from rpg_jax.runs.experiment import Experiment

KEY_VARIABLE = "RPG_JAX_SERVERS_KEY"
"""The environment variable with the servers' API key, if they have one."""

_FILE_BYTES = 512 * 2**20  # a process writes several files at once


def make_served(experiment: Experiment, params: Any, base: models.Base | None = None) -> ServersRollout:
    """The rollout that takes completions from the servers of `servers.urls`, which need not run yet. It starts threads,
    which its `close` ends. `params` are all weights, or the adapters of `base`; servers then get both merged. Makes the
    run's folder in `servers.weights`. Raises ValueError if an address, the key, the folder or a field is wrong."""
    config, layout, tokenizer = experiment.config, experiment.layout, experiment.tokenizer
    c, m, kind = config.servers, config.model, KINDS[config.servers.kind]
    client = _client(c)
    addresses = _addresses(c.urls, client, shared=kind.counters)
    balance = Balance(addresses, client, kind, parallel=c.parallel, patience=c.patience_seconds)
    original = {"base": models.local_folder(m.path, weights=False)} if m.path else {}
    ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    known: dict[str, Any] = original or {"fields": ids}
    weights = WeightFolders(
        params,
        _home(c.weights, config.run),
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


def make_served_teacher(experiment: Experiment) -> ServedTeacher:
    """The teacher at the addresses of `reference.path`, which computes log-probs. Waits until a server answers; `close`
    ends its threads. Raises ValueError if an address or the key does not fit, the loss needs more than the log-probs of
    sampled tokens at temperature 1, or the servers have other texts for the tokens of the first problem's prompt than
    the policy's tokenizer; ServerError, a ValueError, if no server answers for `servers.patience_seconds`."""
    config, tokenizer = experiment.config, experiment.tokenizer
    c, client, url = config.servers, _client(config.servers), config.reference.path
    if config.loss.estimator == "exact" or config.rollout.temperature != 1:
        raise ValueError(
            f"reference.path={url} with loss.estimator={config.loss.estimator} and rollout.temperature="
            f"{config.rollout.temperature:g}: servers give the log-probs of sampled tokens at temperature 1, and "
            "nothing else; choose another method and rollout.temperature=1, or give the teacher's folder"
        )
    how = {"parallel": c.parallel, "patience": c.patience_seconds}
    balance = Balance(source(url, client.check, "reference.path"), client, TEACHER, **how)
    name = None if config.rollout.driver == "servers" else c.model  # there it is the policy's
    teacher = ServedTeacher(balance, model=name, drawn=KINDS[c.kind].drawn)
    first = experiment.task.train[0]
    tokens = np.array(tokenizer.encode(first.prompt or first.messages[-1]["content"]), np.int32)
    with contextlib.ExitStack() as failing:
        failing.callback(teacher.close)
        for token, name in zip(tokens.tolist(), teacher.names(tokens), strict=True):
            if _letters(name) != _letters(own := tokenizer.decode([token])):
                raise ValueError(
                    f"reference.path={url} has another tokenizer than the policy: token {token} is {name!r} there and "
                    f"{own!r} here, and a teacher scores the tokens of the policy. Choose a teacher with its tokenizer"
                )
        failing.pop_all()
    return teacher


def _letters(text: str) -> str:
    """The ASCII characters of the text without blanks: servers write blanks and parts of characters differently."""
    return "".join(letter for letter in text if letter.isascii() and not letter.isspace())


def _client(c: ConfigDict) -> Client:
    certificate, name = pem_file(c.certificate, CERTIFICATE), c.certificate_name
    return Client(key=_key(), certificate=certificate, certificate_name=name, timeout=c.timeout_seconds)


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


def _addresses(text: str, client: Client, *, shared: bool) -> list[str] | Look:
    """The servers at the addresses `text` that this process asks: all if processes can share a server (`shared`), else
    its share. Two processes that asked one other server would each make it load weights, and break off the completions
    of the other process. Raises ValueError if there are too few servers for all processes."""
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


def _home(folder: str, run: ConfigDict) -> Path:
    """Makes the folder of this run's weights in `folder`. Raises ValueError if it is another run's."""
    home = Path(storage.local(folder)).resolve() / run.name
    home.mkdir(parents=True, exist_ok=True)
    file, own = home / "run.txt", str(storage.absolute(run.dir) / run.name)
    if (found := file.read_text(encoding="utf-8") if file.exists() else "") not in ("", own):
        raise ValueError(f"{home} belongs to the run {found}: choose another servers.weights or run.name")
    file.write_text(own, encoding="utf-8")  # by every process: "" is a file that another is writing
    return home
