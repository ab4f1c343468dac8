"""The server of a policy: its JetStream driver behind gRPC and HTTP."""

import functools
from typing import Any

from rpg_jax.rollout.jetstream.compat import JetstreamMetricsCollector
from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
from rpg_jax.rollout.serving.server import Server
from rpg_jax.runs.experiment import make_rollout
from rpg_jax.runs.policy import Policy


def make_policy_server(policy: Policy, *, temperature: float, **options: Any) -> Server:
    """The running server of `policy`, whose config must name the driver "orchestrator".

    Requests that name no temperature have `temperature`. `options` are further arguments of `Server`.
    """
    experiment = policy.experiment
    with experiment.layout.activate():
        made = make_rollout(experiment.layout, policy.params)
        assert isinstance(made, JetStreamRollout), "the driver is the orchestrator"
        rollout = JetStreamRollout(made.engine, keep_state=True, metrics_collector=JetstreamMetricsCollector())
        chat, thinking = experiment.tokenizer.chat, experiment.config.task.thinking
        options["render"] = None if chat is None else functools.partial(chat, thinking=thinking)
        return Server(rollout, experiment.tokenizer, experiment.sampling(temperature), **options)
