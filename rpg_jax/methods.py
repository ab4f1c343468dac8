"""A config with every field that its method decides filled in, and checked before anything is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import losses


def resolve(config: ConfigDict) -> ConfigDict:
    """Fills every field that was left to the method from its row of `losses.METHODS`.

    Raises:
      ValueError: the method is unknown, or its loss does not take a hyperparameter that was set; the message lists the
        known ones.
    """
    method = losses.get_method(config.method)
    row = {
        "loss.name": method.loss,
        "loss.advantage": method.advantage,
        "loss.aggregate": method.aggregate,
        "reference.rule": method.reference,
        "dynamic_sampling.enabled": method.dynamic_sampling,
        "rewards.overlong_shaping": method.overlong_shaping,
        **{f"loss.{name}": value for name, value in method.hyperparameters.items()},
    }
    resolved = config.copy_and_resolve_references()
    with resolved.unlocked():
        if resolved.loss.constant_length is None:
            row["loss.constant_length"] = resolved.rollout.max_tokens if method.aggregate == "constant" else None
        for path, value in row.items():
            section, name = path.split(".")
            if resolved[section][name] is None:
                resolved[section][name] = value
    prompts, updates = resolved.rollout.prompts_per_step, resolved.train.updates_per_step
    if prompts % updates:
        raise ValueError(f"rollout.prompts_per_step={prompts} must be a multiple of train.updates_per_step={updates}")
    losses.advantages(resolved.loss.advantage, np.zeros((2, 2)), lengths=np.ones((2, 2), np.int32))
    if not 0 <= resolved.loss.entropy_coef < float("inf"):
        raise ValueError(f"loss.entropy_coef must be finite and >= 0, got {resolved.loss.entropy_coef}")
    name, hyperparameters = loss_arguments(resolved)
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    tokens = ("logprobs", "behaviour_logprobs", "advantages", "mask", "ref_logprobs", "sampler_logprobs")
    jax.eval_shape(lambda **arrays: losses.policy_loss(name, **arrays, **hyperparameters), **dict.fromkeys(tokens, one))
    return resolved.lock()


def loss_arguments(config: ConfigDict) -> tuple[str, dict[str, Any]]:
    """The name and the hyperparameters of `losses.policy_loss`."""
    others = ("advantage", "entropy_coef")
    fields = {k: v for k, v in config.loss.to_dict().items() if v is not None and k not in others}
    return fields.pop("name"), fields
