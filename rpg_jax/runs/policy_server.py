"""The server of a policy: its JetStream driver behind gRPC and HTTP."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rpg_jax import models, storage
from rpg_jax.rollout.jetstream.compat import JetstreamMetricsCollector
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.server import Server
from rpg_jax.runs.experiment import make_rollout
from rpg_jax.runs.layout import Layout
from rpg_jax.runs.policy import Policy


def make_policy_server(policy: Policy, *, temperature: float, weights_from: str | None, **options: Any) -> Server:
    """The running server of `policy`, whose config must name the driver "orchestrator".

    Requests that name no temperature have `temperature`. HTTP clients may have weights loaded from folders inside
    `weights_from`; None: they may not. `options` are further arguments of `Server`.
    """
    experiment = policy.experiment
    with experiment.layout.activate():
        made = make_rollout(experiment.layout, policy.params)
        assert isinstance(made, JetStreamRollout), "the driver is the orchestrator"
        rollout = JetStreamRollout(made.engine, keep_state=True, metrics_collector=JetstreamMetricsCollector())
        chat, thinking = experiment.tokenizer.chat, experiment.config.task.thinking
        options["render"] = None if chat is None else functools.partial(chat, thinking=thinking)
        if weights_from is not None:
            options["disk"] = _Disk(experiment.layout, rollout, storage.local(weights_from).resolve())
        return Server(rollout, experiment.tokenizer, experiment.sampling(temperature), **options)


class _Disk:
    """The folders inside `home`, for the weights of a rollout."""

    def __init__(self, layout: Layout, rollout: JetStreamRollout, home: Path):
        self._layout, self._rollout, self._home = layout, rollout, home

    def read(self, folder: str) -> models.InHostMemory:
        """Raises ValueError if the folder is not in `home`, is not complete, or is of another model."""
        path = Path(folder).resolve()
        if not path.is_relative_to(self._home):
            raise ValueError(f"{folder} is not inside {self._home}, the folder of --weights_from")
        if not (path / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json, which is written last: it is not there, or not complete")
        return models.read(path, self._layout.model)

    def swap(self, weights: models.InHostMemory) -> int:
        with self._layout.activate():
            dtype = jnp.dtype(self._layout.config.model.compute_dtype)  # that of decoding, to which a sync casts
            params = weights.placed(dtype, self._layout.param_shardings)
            self._rollout.sync_weights(params, self._rollout.weights.version + 1)
            return self._rollout.weights_checksum()
