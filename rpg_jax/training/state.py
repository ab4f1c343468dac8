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


def shardings_of(tree: Any) -> Any:
    """The sharding of each array of `tree`: of arrays, or of `ShapeDtypeStruct`s with shardings."""
    return jax.tree.map(lambda x: x.sharding, tree)


def for_evaluation(like: TrainState, optimizer: Optimizer) -> TrainState:
    """Returns `like`, an `abstract` state, with `LEFT_OUT` for the critic and for slots of the optimizer that
    `evaluation_params` does not read: a restore leaves them on disk."""

    def slot(path: tuple[Any, ...], leaf: Any) -> Any:
        return leaf if jax.tree_util.keystr(path[:1], simple=True) in optimizer.evaluation_slots else LEFT_OUT

    slots = jax.tree_util.tree_map_with_path(slot, like.opt_state)
    return like.replace(opt_state=slots, critic=jax.tree.map(lambda _: LEFT_OUT, like.critic))  # type: ignore[attr-defined]


def create_state(params: Any, optimizer: Optimizer, like: TrainState, critic: Critic | None = None) -> TrainState:
    """Returns the state before the first update, laid out as `like`, which `abstract_state` returns.
    Every leaf is a fresh buffer. Slots that start as a copy of a parameter would otherwise alias it, and an aliased
    buffer cannot be donated twice."""
    how: dict[str, Any] = {"static_argnums": (1, 2), "out_shardings": shardings_of(like)}
    return jax.jit(_first_state, **how)(params, optimizer, critic)


def _first_state(params: Any, optimizer: Optimizer, critic: Critic | None) -> TrainState:
    slots = optimizer.init(jax.tree.map(jnp.copy, params))
    counts = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    own = None if critic is None else CriticState(critic.init(params), critic.optimizer.init(critic.init(params)))
    return TrainState(params, slots, *counts, own)


def abstract_state(
    params: Any,
    optimizer: Optimizer,
    replicated: jax.sharding.Sharding,
    critic: Critic | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """Returns a `ShapeDtypeStruct` with its sharding for every array of `create_state`, without making an array. A slot
    of a parameter's shape has the parameter's shards; with `offload`, in the memory of each device's host. Counts and
    other slots are `replicated`, and so is the critic's head; its trunk has the policy's shards. `params` are the
    policy's `ShapeDtypeStruct`s with shardings."""

    def slots(optimizer: Optimizer, params: Any, where: Any) -> Any:
        return optax.tree.map_params(
            optimizer.init,
            lambda _, sharding: in_host_memory(sharding) if offload else sharding,
            jax.eval_shape(optimizer.init, params),
            where,
            transform_non_params=lambda _: replicated,
        )

    own, where = None, shardings_of(params)
    if critic is not None:
        of_critic = critic.like(where, replicated)
        own = CriticState(of_critic, slots(critic.optimizer, jax.eval_shape(critic.init, params), of_critic))
    shapes = jax.eval_shape(lambda params: _first_state(params, optimizer, critic), params)
    return abstract(shapes, TrainState(where, slots(optimizer, params, where), replicated, replicated, own))
