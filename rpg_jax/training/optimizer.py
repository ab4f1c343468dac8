"""Optimizers by optax's names, with a learning rate that warms up, and then stays or falls."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from rpg_jax.losses.declaration import unknown
from rpg_jax.types import Count

SCHEDULE_FREE = "schedule_free_adamw"
# Each from (b1, b2, eps); weight decay and learning rate follow. All treat every element by itself.
_DIRECTIONS: dict[str, Callable[[float, float, float], optax.GradientTransformation]] = {
    "adamw": lambda b1, b2, eps: optax.scale_by_adam(b1, b2, eps),
    "nadamw": lambda b1, b2, eps: optax.scale_by_adam(b1, b2, eps, nesterov=True),
    "lion": lambda b1, b2, eps: optax.scale_by_lion(b1, b2),
    "rmsprop": lambda b1, b2, eps: optax.scale_by_rms(b2, eps),
    "sgd": lambda b1, b2, eps: optax.trace(b1),
    SCHEDULE_FREE: lambda b1, b2, eps: optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
}
NAMES = tuple(_DIRECTIONS)
SCHEDULES = ("constant", "linear", "cosine")
DECAYED = ("all", "matrices")
_LEAST_B1 = 0.1  # the smallest b1 of Schedule-Free
_NO_LENGTH = Count(0, "updates")  # of a constant schedule


class Optimizer(NamedTuple):
    """An optax transformation, whose `update` treats every element by itself: `apply_update` may run it layer by layer.

    Attributes:
      init: params -> the optimizer's state.
      update: (grads, opt_state, params) -> (updates, opt_state), after the caller has clipped the gradients.
      evaluation_params: (opt_state, params) -> the weights to evaluate. These are `params`, except for Schedule-Free:
        it trains and samples with an interpolation y, and is evaluated at an average x.
      evaluation_slots: the names of the entries of the state that `evaluation_params` reads; () where it reads none.
      max_grad_norm: the global norm to which the caller clips gradients.
      learning_rate: update u = 0, 1, … -> the learning rate.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    evaluation_params: Callable[[Any, Any], Any]
    evaluation_slots: tuple[str, ...]
    max_grad_norm: float
    learning_rate: Callable[[Any], Any]


@functools.lru_cache(maxsize=128, typed=True)
def make_optimizer(
    name: str,
    *,
    learning_rate: float,
    warmup: Count,
    updates_per_step: int = 1,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    decayed: str = "all",
    schedule: str = "constant",
    decay_until: Count = _NO_LENGTH,
    final_rate: float = 0.0,
) -> Optimizer:
    """Returns the optimizer `name`. Equal arguments give the same object, so that programs are traced once.

    The names are those of optax: adamw, nadamw, lion, sgd (b1 is its momentum), rmsprop (b2 is its decay), all with
    decoupled weight decay, and schedule_free_adamw (Defazio et al., arXiv:2405.15682).

    The learning rate rises over the warm-up. A warm-up of N steps is a stair: all updates of step s = 0, 1, … have s/N
    of the rate, so step 0 has rate 0 (complex-reasoning/RPG at ec8e30b, verl/workers/fsdp_workers.py:
    `lr_scheduler.step()` once a rollout batch). A warm-up of N updates is a slope: update u = 1, 2, … has u/N of the
    rate. Then the rate is constant, or falls by update to `final_rate` of it at `decay_until`: a line or half a cosine.

    Args:
      warmup: N, in steps or in updates.
      updates_per_step: the updates of a step, for counts in steps. An update that is skipped does not count.
      decayed: the weights that weight decay shrinks: all, or matrices only (not norms, not biases).
      schedule: a name of `SCHEDULES`: constant, linear (the line) or cosine.
      decay_until: the length of the schedule, warm-up included; a constant schedule does not read it.

    Raises ValueError for an unknown `name`, `schedule` or `decayed`, if the schedule does not end after the warm-up, or
    if Schedule-Free has another `schedule` than constant, other `decayed` than all, or a b1 below 0.1.
    """
    for field, own, known in (("name", name, NAMES), ("schedule", schedule, SCHEDULES), ("decayed", decayed, DECAYED)):
        if own not in known:
            raise unknown(f"optimizer.{field}", own, known)
    if name == SCHEDULE_FREE and (schedule, decayed) != ("constant", "all"):
        raise ValueError(f"{name} takes optimizer.schedule=constant and optimizer.decayed=all: it averages instead")
    rate: optax.ScalarOrSchedule = learning_rate
    if warmup.number and warmup.unit == "steps":
        rate = _stair(learning_rate, warmup.number, updates_per_step)
    elif warmup.number > 1:
        rate = optax.linear_schedule(learning_rate / warmup.number, learning_rate, warmup.number - 1)
    if schedule != "constant":
        per_unit = {"steps": updates_per_step, "updates": 1}
        warm, last = (count.number * per_unit[count.unit] for count in (warmup, decay_until))
        rate = _falling(rate, schedule, warm, last, final_rate)
    shown = rate if callable(rate) else lambda update: learning_rate
    decay = optax.add_decayed_weights(weight_decay, matrices if decayed == "matrices" else None)
    whole = optax.chain(_DIRECTIONS[name](b1, b2, eps), decay, optax.scale_by_learning_rate(rate))
    if name == SCHEDULE_FREE:
        return _schedule_free(whole, shown, b1, max_grad_norm)
    return Optimizer(whole.init, whole.update, lambda opt_state, params: params, (), max_grad_norm, shown)


def matrices(params: Any) -> Any:
    """Returns a tree like `params` of bools: True for every weight whose path has neither "norm" nor "bias"."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _schedule_free(
    whole: optax.GradientTransformation, rate: Callable[[Any], Any], b1: float, max_grad_norm: float
) -> Optimizer:
    """Schedule-Free over Adam without momentum; γ_u is the rate of update u = 0, 1, … and m_u = max(γ_0, …, γ_u).

    c_u = m_u² / Σ_{i ≤ u} m_i²,   z ← z − γ_u d,   x ← (1 − c_u) x + c_u z,   y ← (1 − b1) z + b1 x

    d is Adam's direction at y, with weight decay. Source: facebookresearch/schedule_free, `adamw_schedulefree.py`. Only
    y and z are stored; x = (y − (1 − b1) z) / b1 has 1/b1 of their rounding error. Raises ValueError if b1 < 0.1."""
    if b1 < _LEAST_B1:
        raise ValueError(
            f"optimizer.b1={b1:g} must be at least {_LEAST_B1} for {SCHEDULE_FREE}: it divides by b1 to compute its "
            "average, which loses its digits; 0.9 is its own default"
        )
    slots = ("b1", "z")
    # optax counts from 1 when it asks for the rate in the weight m_u², and from 0 for the rate of the step.
    free = optax.contrib.schedule_free(whole, lambda count: rate(count - 1), b1)

    def average(opt_state, params):
        moved = jax.device_put({name: getattr(opt_state, name) for name in slots}, jax.memory.Space.Device)
        return optax.contrib.schedule_free_eval_params(opt_state._replace(**moved), params)

    return Optimizer(free.init, free.update, average, slots, max_grad_norm, rate)


def _stair(learning_rate: float, steps: int, updates_per_step: int) -> optax.Schedule:
    """The schedule whose rate is s/steps of `learning_rate` in step s = 0, 1, … below `steps`, then `learning_rate`."""
    return lambda update: learning_rate * jnp.minimum(1.0, (update // updates_per_step) / steps)


def _falling(rate: optax.ScalarOrSchedule, schedule: str, warm: int, last: int, final: float) -> optax.Schedule:
    """Returns the schedule of `rate` times a factor: 1 up to update `warm`, falling by `schedule` ("linear" or
    "cosine") to `final` at update `last`, and `final` after `last`. Raises ValueError unless `last` is after `warm`."""
    if last <= warm:
        raise ValueError(
            f"optimizer.decay_until: update {last} is inside the warm-up of {warm} updates; make the schedule longer"
        )

    def factor(update):
        done = jnp.clip((update - warm) / (last - warm), 0.0, 1.0)
        left = 1 - done if schedule == "linear" else (1 + jnp.cos(jnp.pi * done)) / 2
        return final + (1 - final) * left

    return lambda update: (rate(update) if callable(rate) else rate) * factor(update)


Update = Callable[..., tuple[Any, Any]]

_STACK = "layers"  # the entry of a tree whose arrays are [L, ...]


def apply_update(
    update: Update, grads: Any, opt_state: Any, params: Any, *, scale: jax.Array, where: jax.Array
) -> tuple[Any, Any]:
    """Weights and optimizer state after `update` with the gradient scale · grads, each leaf in its own dtype. Stacked
    layers take turns, so that f32 temporaries are of one layer. On CPUs they do not: each turn would copy every stack.

    Args:
      update: of an optax transformation that treats every element by itself; the caller computes norms.
      grads, params: trees; arrays under the entry "layers", if there is one, are stacked: [L, ...].
      opt_state: of the transformation.
      scale: f32[].
      where: bool[]; false leaves weights and state unchanged.
    """

    def updated(grads, opt_state, params):
        grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)) * scale, grads)
        updates, new_state = update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return jax.tree.map(lambda x, old: jnp.where(where, x, old).astype(old.dtype), new, (params, opt_state))

    if not _is_stacked(params):
        return updated(grads, opt_state, params)
    by_layer = functools.partial(_by_layer, updated)
    return lax.platform_dependent(grads, opt_state, params, cpu=updated, default=by_layer)


def _by_layer(updated: Update, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Calls `updated` with one layer of the stacks after another, then with the rest. Returns (weights, slots)."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(opt_state, is_leaf=_is_stacked)
    slots = [leaf[_STACK] for leaf in leaves if _is_stacked(leaf)]

    def view(parts):
        """The optimizer state with `parts` in place of its trees of slots."""
        parts = iter(parts)
        return treedef.unflatten([next(parts) if _is_stacked(leaf) else leaf for leaf in leaves])

    def slots_of(state):
        return [new for new, old in zip(treedef.flatten_up_to(state), leaves, strict=True) if _is_stacked(old)]

    def layer(i, carry):
        layers, slots = carry
        new, state = updated(_at(grads[_STACK], i), view(_at(slots, i)), _at(layers, i))
        return _put(layers, new, i), _put(slots, slots_of(state), i)

    depth = jax.tree.leaves(params[_STACK])[0].shape[0]
    layers, slots = lax.fori_loop(0, depth, layer, (params[_STACK], slots))
    rest, state = updated(_rest(grads), view([_rest(leaf) for leaf in leaves if _is_stacked(leaf)]), _rest(params))
    stacks, pairs = iter(slots), zip(treedef.flatten_up_to(state), leaves, strict=True)
    leaves = [{**new, _STACK: next(stacks)} if _is_stacked(old) else new for new, old in pairs]
    return {**rest, _STACK: layers}, treedef.unflatten(leaves)


def _is_stacked(tree: Any) -> bool:
    return isinstance(tree, dict) and _STACK in tree


def _rest(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != _STACK}


def _at(tree: Any, i: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(tree: Any, new: Any, i: jax.Array) -> Any:
    new = lax.optimization_barrier(new)  # without it, XLA:TPU fuses `new` and writes several stacks out of place
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), tree, new)
