"""The server of a policy: its JetStream driver behind gRPC and HTTP."""

import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rpg_jax import models
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
            options["load"] = functools.partial(_load, experiment.layout, rollout, Path(weights_from).resolve())
        return Server(rollout, experiment.tokenizer, experiment.sampling(temperature), **options)


def _load(layout: Layout, rollout: JetStreamRollout, home: Path, folder: str) -> None:
    """Makes the weights of `folder` the rollout's. Raises ValueError if it is not in `home`, or of another model."""
    path = Path(folder).resolve()
    if not path.is_relative_to(home):
        raise ValueError(f"{folder} is not inside {home}, the folder of --weights_from")
    dtype = jnp.dtype(layout.config.model.param_dtype)
    with layout.activate():
        params = models.load(path, layout.model, param_dtype=dtype, shardings=layout.param_shardings)
        rollout.sync_weights(params, rollout.weights.version + 1)
