"""The drivers of a rollout, each declared once."""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from flax import nnx

from rpg_jax.models import Base, QwenConfig
from rpg_jax.rollout.decoding import Decoding
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.interface import Rollout
from rpg_jax.rollout.lockstep import LockstepRollout
from rpg_jax.rollout.simple import SimpleRollout
from rpg_jax.rollout.weights import Params, Weights


@dataclasses.dataclass(frozen=True)
class Driver:
    """One way to run a rollout. Code that treats drivers differently asks this declaration, not the name.

    Attributes:
      make: makes its `Rollout` from the model's config and graphdef, `Weights` and `Decoding`.
      spans_hosts: one rollout decodes all prompts on a mesh over all hosts. Otherwise each host decodes its share of
        the prompts, on its own devices.
      single_process: it cannot run in several processes.
      needs: a package that need not be installed; without it lockstep takes over.
      remote: other processes sample for a trainer, workers or servers; nothing is made here.
      turns: it continues a completion after an environment's observation.
    """

    make: Callable[[QwenConfig, nnx.GraphDef, Weights, Decoding], Rollout] | None
    spans_hosts: bool = False
    single_process: bool = False
    needs: str = ""
    remote: bool = False
    turns: bool = False


def _orchestrator(*model: Any) -> Rollout:
    """JetStream's threads. JetStream is imported here, so that the other drivers work without it."""
    try:
        from rpg_jax.rollout.jetstream.orchestrator import JetStreamRollout
    except ModuleNotFoundError as error:
        fix = "pip install 'rpg_jax[jetstream]' brings what JetStream needs; or choose rollout.driver=lockstep"
        raise ValueError(f"rollout.driver=orchestrator: {error}; {fix}") from error
    return JetStreamRollout(QwenEngine(*model))


DRIVERS = {
    "orchestrator": Driver(_orchestrator, needs="jetstream", turns=True),
    "lockstep": Driver(lambda *model: LockstepRollout(QwenEngine(*model)), spans_hosts=True, turns=True),
    "simple": Driver(SimpleRollout, single_process=True),
    "servers": Driver(None, remote=True, turns=True),
}
"""By the value of the config field `rollout.driver`."""

LOCAL_DRIVERS = [name for name, driver in DRIVERS.items() if not driver.remote]
"""The drivers that `make_rollout` makes."""


def find_driver(name: str) -> Driver:
    """The driver of that name, or lockstep where its package is not installed. Raises ValueError if there is none."""
    if name not in DRIVERS:
        raise ValueError(f"unknown rollout driver {name!r}; known: {', '.join(DRIVERS)}")
    found = DRIVERS[name]
    if found.needs and importlib.util.find_spec(found.needs) is None:
        _say_that_lockstep_takes_over(name)
        return DRIVERS["lockstep"]
    return found


@functools.cache  # once a process
def _say_that_lockstep_takes_over(name: str) -> None:
    from rpg_jax.rollout.jetstream import INSTALL

    print(f"rollout.driver=lockstep takes over: {name} needs JetStream ({INSTALL})", file=sys.stderr)


def make_rollout(
    driver: str,
    config: QwenConfig,
    graphdef: nnx.GraphDef,
    params: Params,
    decoding: Decoding,
    *,
    base: Base | None = None,
    merge: bool = False,
) -> Rollout:
    """The rollout of a driver, over a model of `config` and `graphdef` with the trainer's `params` as version 0.

    If `params` are adapters, `base` are the frozen weights; see `Weights`, which has `merge` too.

    Raises:
      ValueError: the driver is unknown or remote, or lacks a package that its own package needs.
    """
    make = find_driver(driver).make
    if make is None:
        raise ValueError(f"rollout.driver={driver} needs a trainer; choose orchestrator or lockstep")
    how = {"dtype": decoding.dtype, "shardings": decoding.shardings, "int8": decoding.int8}
    weights = Weights(params, **how, base=base, merge=merge)
    return make(config, graphdef, weights, decoding)
