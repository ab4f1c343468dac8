"""The optimizers of the paper's runs: AdamW and Schedule-Free AdamW, warm-up then constant."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rpg_jax.types import Count

NAMES = ("adamw", "schedule_free_adamw")


class Optimizer(NamedTuple):
    """An optax transformation, the global norm to clip gradients to before it, and the weights that evaluation uses.

    `update` treats every element by itself (`training.layerwise` runs it layer by layer), so the caller clips.
    `evaluation_params(opt_state, params)` returns `params` for AdamW. Schedule-Free trains and samples with the
    interpolation y and is evaluated at the average x, which it computes from the slots `evaluation_slots` alone.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    evaluation_params: Callable[[Any, Any], Any]
    evaluation_slots: tuple[str, ...]
    max_grad_norm: float


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
) -> Optimizer:
    """Returns the optimizer `name`: the same for equal arguments, so that programs with it are traced once.

    The learning rate rises over the warm-up and then stays. A warm-up of N steps is a stair: all updates of step
    s = 0, 1, … have s/N of the rate, so the first step's have none (complex-reasoning/RPG at ec8e30b,
    verl/workers/fsdp_workers.py: `lr_scheduler.step()` once a rollout batch). A warm-up of N updates is a slope: update
    u = 1, 2, … has u/N of the rate. Schedule-Free is optax's, after Defazio et al., arXiv:2405.15682; its slope begins
    at 0.

    Args:
      updates_per_step: of every step, for a warm-up in steps. An update that is skipped does not count.

    Raises:
      ValueError: `name` is unknown, or a number is out of its range.
    """
    if name not in NAMES:
        raise ValueError(f"unknown optimizer {name!r}; known: {', '.join(NAMES)}")
    if learning_rate < 0 or max_grad_norm <= 0:
        raise ValueError(
            f"an optimizer needs learning_rate >= 0 and max_grad_norm > 0, got {learning_rate=}, {max_grad_norm=}"
        )
    adam = dict(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    slope = warmup.number if warmup.unit == "updates" else 0
    rate: optax.ScalarOrSchedule = learning_rate
    if warmup.number and not slope:
        rate = _stair(learning_rate, warmup.number, updates_per_step)
    if name == "adamw":
        if slope > 1:
            rate = optax.linear_schedule(learning_rate / slope, learning_rate, slope - 1)
        adamw = optax.adamw(rate, **adam)
        return Optimizer(adamw.init, adamw.update, lambda opt_state, params: params, (), max_grad_norm)
    slots = ("b1", "z")
    free = optax.contrib.schedule_free_adamw(rate, warmup_steps=slope or None, **adam)

    def average(opt_state, params):
        moved = jax.device_put({name: getattr(opt_state, name) for name in slots}, jax.memory.Space.Device)
        return optax.contrib.schedule_free_eval_params(opt_state._replace(**moved), params)

    return Optimizer(free.init, free.update, average, slots, max_grad_norm)


def _stair(learning_rate: float, steps: int, updates_per_step: int) -> optax.Schedule:
    """The learning rate of update 0, 1, …: s/steps of it in step s, and all of it after `steps` steps."""
    return lambda update: learning_rate * jnp.minimum(1.0, (update // updates_per_step) / steps)
