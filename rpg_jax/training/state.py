"""The state that an update changes, and the place of each part of it: its shards, on devices or on their hosts."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rpg_jax.storage.integrity import LEFT_OUT
from rpg_jax.training.critic import Critic, CriticState
from rpg_jax.training.optimizer import Optimizer


@flax.struct.dataclass
class TrainState:
    """Master weights, optimizer slots, and counts of updates.

    Attributes:
      params: the policy's weights.
      opt_state: the optimizer's slots.
      updates: i32[], updates applied.
      skipped: i32[], updates left out because the loss or the gradient was not finite.
      critic: the state of a learned baseline, or None.
    """

    params: Any
    opt_state: Any
    updates: Any
    skipped: Any
    critic: CriticState | None = None

    @property
    def weights(self) -> tuple[Any, Any]:
        """Everything that has a gradient: (the policy's parameters, the critic's parameters or None)."""
        return self.params, None if self.critic is None else self.critic.params


def in_host_memory(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding with the same shards, each in the (pinned) memory of its device's host."""
    return sharding.with_memory_kind("pinned_host")


def in_device_memory(tree: Any) -> Any:
    """Returns `tree` with the leaves that lie in host memory moved to their devices; inside a program or outside."""
    return jax.device_put(tree, jax.memory.Space.Device)


def abstract(tree: Any, shardings: Any) -> Any:
    """Returns `ShapeDtypeStruct`s of the arrays of `tree`, with `shardings`. A checkpoint is restored into them."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def for_evaluation(like: TrainState, optimizer: Optimizer) -> TrainState:
    """Returns `like`, an `abstract` state, with `LEFT_OUT` for the critic and for slots of the optimizer that
    `evaluation_params` does not read: a restore leaves them on disk."""

    def slot(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if jax.tree_util.keystr(path[:1], simple=True) in optimizer.evaluation_slots else LEFT_OUT

    slots = jax.tree_util.tree_map_with_path(slot, like.opt_state)
    return like.replace(opt_state=slots, critic=jax.tree.map(lambda _: LEFT_OUT, like.critic))  # type: ignore[attr-defined]


def create_state(params: Any, optimizer: Optimizer, where: TrainState, critic: Critic | None = None) -> TrainState:
    """Returns the state before the first update, laid out as `where`, a state of shardings (see `state_shardings`).
    Every leaf is a fresh buffer. Slots that start as a copy of a parameter would otherwise alias it, and an aliased
    buffer cannot be donated twice."""
    return jax.jit(_first_state, static_argnums=(1, 2), out_shardings=where)(params, optimizer, critic)


def state_shapes(params: Any, optimizer: Optimizer, critic: Critic | None = None) -> TrainState:
    """Returns the `ShapeDtypeStruct`s of `create_state` for weights like `params`, without making an array."""
    return jax.eval_shape(lambda params: _first_state(params, optimizer, critic), params)


def _first_state(params: Any, optimizer: Optimizer, critic: Critic | None) -> TrainState:
    slots = optimizer.init(jax.tree.map(jnp.copy, params))
    counts = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    own = None if critic is None else CriticState(critic.init(params), critic.optimizer.init(critic.init(params)))
    return TrainState(params, slots, *counts, own)


def state_shardings(
    params: Any,
    param_shardings: Any,
    optimizer: Optimizer,
    replicated: jax.sharding.Sharding,
    critic: Critic | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """Returns the sharding of every leaf of the state, as a `TrainState`. A slot of a parameter's shape has the
    parameter's shards; with `offload`, in the memory of each device's host. Counts and other slots are `replicated`,
    and so is the critic's head; its trunk has the policy's shards. `params` are the policy's arrays or shapes."""

    def slots(optimizer: Optimizer, params: Any, param_shardings: Any) -> Any:
        return optax.tree.map_params(
            optimizer.init,
            lambda _, sharding: in_host_memory(sharding) if offload else sharding,
            jax.eval_shape(optimizer.init, params),
            param_shardings,
            transform_non_params=lambda _: replicated,
        )

    own = None
    if critic is not None:
        where, own_shapes = critic.like(param_shardings, replicated), jax.eval_shape(critic.init, params)
        own = CriticState(where, slots(critic.optimizer, own_shapes, where))
    return TrainState(param_shardings, slots(optimizer, params, param_shardings), replicated, replicated, own)
