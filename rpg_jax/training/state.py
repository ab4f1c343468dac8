"""What an update changes, and where each part of it lives."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rpg_jax.training.optimizer import Optimizer


@flax.struct.dataclass
class TrainState:
    """Master weights, optimizer slots, and counts of updates.

    Attributes:
      params: the policy's weights.
      opt_state: of the optimizer.
      updates: i32[], updates applied.
      skipped: i32[], updates left out because the loss or the gradient was not finite.
    """

    params: Any
    opt_state: Any
    updates: Any
    skipped: Any


def create(params: Any, optimizer: Optimizer, where: TrainState) -> TrainState:
    """Returns the state before the first update, laid out as `where` (see `shardings`) says.

    Every leaf is a fresh buffer: slots that start as a copy of a parameter would otherwise alias it, and an aliased
    buffer cannot be donated twice.
    """

    def init(params):
        copies = jax.tree.map(jnp.copy, params)
        return TrainState(
            params=params,
            opt_state=optimizer.init(copies),
            updates=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
        )

    return jax.jit(init, out_shardings=where)(params)


def shardings(params: Any, param_shardings: Any, optimizer: Optimizer, replicated: jax.sharding.Sharding) -> TrainState:
    """Returns the sharding of every leaf of the state: slots shaped like a parameter lie where it lies."""
    opt_state = jax.eval_shape(optimizer.init, params)
    slots = optax.tree.map_params(
        optimizer.init,
        lambda _, sharding: sharding,
        opt_state,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(params=param_shardings, opt_state=slots, updates=replicated, skipped=replicated)


def shapes(params: Any, optimizer: Optimizer) -> TrainState:
    """Returns the state for weights of these `ShapeDtypeStruct`s, without making an array."""
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(params=params, opt_state=jax.eval_shape(optimizer.init, params), updates=count, skipped=count)
