"""The engine of a worker: one of the drivers of this package, made from what the trainer says."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from rpg_jax import models, parallel
from rpg_jax.rollout.decoding import Decoding
from rpg_jax.rollout.driver import find_driver, make_rollout
from rpg_jax.rollout.footprint import bytes_on_a_device, placed, slots_beside
from rpg_jax.rollout.interface import Rollout
from rpg_jax.rollout.weights import Params, RolloutError, weights_checksum


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the one who starts a worker chooses; None takes the trainer's field.

    `driver`: of the engine. `slots`: on each device. `tensor`, `expert`: devices of a copy of the weights.
    """

    driver: str = "orchestrator"
    slots: int | None = None
    tensor: int | None = None
    expert: int | None = None


class WorkerEngine:
    """Holds one policy at a time, and samples with it.

    Args:
      spec: the trainer's, see `runs.fleet_trainer`.

    Raises:
      ValueError: the devices or the driver do not fit.
    """

    def __init__(self, spec: Mapping[str, Any], choices: Choices):
        if find_driver(choices.driver).remote:
            raise ValueError(f"--driver={choices.driver}: a worker samples by itself; choose orchestrator or lockstep")
        self._driver = choices.driver
        self._model = model_from(spec["model"])
        dtype, compute = jnp.dtype(spec["weights_dtype"]), jnp.dtype(spec["compute_dtype"])
        self._graphdef, self.shapes = models.abstract(self._model, dtype, compute_dtype=compute)
        self._decoding, self._shardings = _decoding(spec, choices, self._model, self.shapes)
        self._turn = threading.Condition()
        self._users, self._loads = 0, 0
        self._checksum: int | None = None
        self._rollout: Any = None

    @property
    def slots(self) -> int:
        """Completions that are decoded together."""
        return self._decoding.slots

    @property
    def progress(self) -> int:
        """A number that grows while the engine decodes."""
        return self._loads + (self._rollout.usage.dispatches if self._rollout is not None else 0)

    @contextlib.contextmanager
    def holding(self, checksum: int, fetch: Callable[[], Params]) -> Iterator[Rollout]:
        """The rollout with the weights of this checksum, which `fetch` reads if it has others. They stay for the block.

        Raises RolloutError if what was read has another checksum.
        """
        with self._turn:
            while self._users and self._checksum != checksum:
                self._turn.wait()
            if self._checksum != checksum:
                self._checksum = None  # until they are proven
                self._load(checksum, fetch())
                self._checksum = checksum
            self._users += 1
        try:
            assert self._rollout is not None
            yield self._rollout
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()

    def _load(self, checksum: int, arrays: Params) -> None:
        params = jax.device_put(arrays, self._shardings)
        if (found := weights_checksum(params)) != checksum:
            raise RolloutError(f"the weights have checksum {found:016x} on this worker's devices, not {checksum:016x}")
        self._loads += 1
        if self._rollout is None:
            self._rollout = make_rollout(self._driver, self._model, self._graphdef, params, self._decoding)
        else:
            self._rollout.sync_weights(params, self._loads)


def model_from(fields: Mapping[str, Any]) -> models.QwenConfig:
    """The model of `dataclasses.asdict`, after JSON. Raises ValueError for fields that are none."""
    rope, experts = dict(fields["rope"]), fields["experts"]
    rope["scaling"] = None if rope["scaling"] is None else models.Yarn(**rope["scaling"])
    nested = {"rope": models.Rope(**rope), "experts": None if experts is None else models.Experts(**experts)}
    try:
        return models.QwenConfig(**{**fields, **nested})
    except TypeError as error:
        raise ValueError(f"the trainer's model: {error}") from None


def _decoding(
    spec: Mapping[str, Any], choices: Choices, model: models.QwenConfig, shapes: Params
) -> tuple[Decoding, Params]:
    """How this worker decodes, and the shardings of its weights: copies of `tensor` × `expert` devices each.

    Unset slots are those that fit beside two copies of the weights: during a sync the next ones are there too.
    """
    tensor = choices.tensor or spec["tensor"] or 1
    expert = choices.expert or spec["expert"] or 1
    devices = jax.local_devices()
    copies, rest = divmod(len(devices), tensor * expert)
    if rest:
        raise ValueError(f"--tensor={tensor} times --expert={expert} does not divide {len(devices)} devices")
    sizes = {"replica": copies, "expert": expert, "tensor": tensor}
    shape = [sizes.get(axis, 1) for axis in parallel.MESH_AXES]
    mesh = Mesh(np.array(devices).reshape(shape), parallel.MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
    rules = parallel.parse_rules(spec["sharding"])
    if model.num_kv_heads % tensor:
        rules = parallel.override({"kv_heads": None}, rules)
    decoding = Decoding(
        slots=mesh.size, capacity=spec["capacity"], int8=spec["int8"], int8_kv=spec["int8_kv"], mesh=mesh, rules=rules
    )
    shardings = parallel.shardings(models.logical_axes(model), shapes, mesh, rules)
    each = choices.slots or spec["slots"]
    if each is None:
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
        held, cached = 2 * bytes_on_a_device(placed(shapes, shardings)), replace(decoding, dtype=spec["compute_dtype"])
        each = slots_beside(held, memory, model, cached, needed=-(-spec["needed"] // mesh.size))
    return replace(decoding, slots=each * mesh.size), shardings
