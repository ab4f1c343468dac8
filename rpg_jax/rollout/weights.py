"""The sampler's weights: a locked reference that is swapped between decode steps, and a checksum that proves a sync.

Two programs with collectives, enqueued in another order on one device than on the next, wait for each other for ever.
So whatever decoding runs is launched under `Weights.lock`. Where the sampler has devices of its own, `stage`, called by
the trainer's thread, is all that a sync runs on the trainer's; the rest of the sync is a transfer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax.models.quantized import quantized, quantized_shardings
from rpg_jax.parallel import checksums, hosts

Params = Any


class RolloutError(RuntimeError):
    """A rollout failed; `__cause__` holds the fault that made it fail, where there is one."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """Weights ready for a sync by any thread, at any time: no array is one that the trainer goes on with.

    Attributes:
      params: in the sampler's dtype; where it has devices of its own, still on the trainer's.
      checksum: u32[2], from the devices that `params` are on.
    """

    params: Params
    checksum: jax.Array


class Weights:
    """The weights that the rollout engine reads, dereferenced outside jit, so that a swap never recompiles.

    With neither `dtype` nor `shardings` the trainer's own arrays are used, without a copy. A trainer that donates them
    while completions are being decoded does so under `lock`; `pinned` holds it from dereference to dispatch.

    Args:
      params: pytree of arrays.
      version: what completions carry as their `weight_version`.
      dtype: cast floating-point weights to this once per sync (decoding reads every weight at every step).
      shardings: pytree of shardings like `params`: the decoding layout, reached by one jitted reshard per sync, or
        by one transfer where it has none of the trainer's devices.
      int8: round the layers' matrices to eight bits; see `models.quantized`.
    """

    def __init__(
        self, params: Params, version: int = 0, *, dtype=None, shardings: Params | None = None, int8: bool = False
    ):
        self.lock = threading.RLock()
        self._layout, self._elsewhere = None, None
        if int8 and shardings is not None:
            shardings = quantized_shardings(shardings, params)
        if _apart(params, shardings):
            shardings, self._elsewhere = None, shardings
        if int8 or dtype is not None or shardings is not None:
            change = (lambda tree: quantized(_cast(tree, dtype))) if int8 else (lambda tree: _cast(tree, dtype))
            self._layout = _layout(change, params, shardings)
        self.sync(params, version)

    @property
    def version(self) -> int:
        return self._version

    def stage(self, params: Params) -> Staged:
        """A copy of `params` for a later sync: everything of it that runs on their devices."""
        converted = self._converted(snapshot(params))
        with _where(converted):
            return Staged(converted, checksums.of_tree(converted))

    def sync(self, params: Params | Staged, version: int) -> None:
        """Swaps the weights in; takes effect at the next dispatch."""
        moved = None
        if self._elsewhere is not None:  # before the lock: decoding goes on during the transfer
            moved = jax.device_put(self._converted(params), self._elsewhere)
        with self.lock:
            self._params = self._converted(params) if moved is None else moved
            self._version = version

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Params]:
        """The current weights, which no sync replaces until the block ends."""
        with self.lock:
            yield self._params

    def checksum(self) -> int:
        """Checksum of the weights as the engine reads them."""
        with self.pinned() as params:
            return weights_checksum(params)

    def verify(self, params: Params | Staged) -> None:
        """Compares the engine's weights with `params` brought into the engine's dtype and layout.

        Raises:
          RolloutError: they differ in any bit.
        """
        trainer = _number(params.checksum) if isinstance(params, Staged) else weights_checksum(self._converted(params))
        with self.pinned() as mine:
            if (sampler := weights_checksum(mine)) != trainer:
                raise RolloutError(
                    f"the sampler's weights (version {self._version}, checksum {sampler:016x}) are not the trainer's "
                    f"(checksum {trainer:016x}): completions would come from another policy than the one trained; "
                    "call sync_weights after every update"
                )

    def _converted(self, params: Params | Staged) -> Params:
        """In the sampler's dtype, and in its layout unless that is on other devices."""
        if isinstance(params, Staged):
            return params.params
        return params if self._layout is None else self._layout(params)


@jax.jit
def snapshot(params: Params) -> Params:
    """A copy, which stays when the trainer donates `params`."""
    return jax.tree.map(jnp.copy, params)


def weights_checksum(params: Params) -> int:
    """64-bit checksum of the bit patterns, places and names of all weights; the same under every sharding (see
    `parallel.checksums`)."""
    with _where(params):
        return _number(checksums.of_tree(params))


def _number(checksum: jax.Array) -> int:
    high, low = jax.device_get(checksum)
    return int(high) << 32 | int(low)


def _apart(params: Params, shardings: Params | None) -> bool:
    """Whether the two have no device in common."""
    leaf, where = jax.tree.leaves(params)[0], jax.tree.leaves(shardings)
    return bool(where) and isinstance(leaf, jax.Array) and leaf.sharding.device_set.isdisjoint(where[0].device_set)


def _where(params: Params) -> contextlib.AbstractContextManager:
    """While entered, programs run on the mesh of `params`, which may be this host's alone."""
    sharding = jax.tree.leaves(params)[0].sharding
    return jax.set_mesh(sharding.mesh) if isinstance(sharding, jax.NamedSharding) else contextlib.nullcontext()


def _layout(change: Callable[[Params], Params], params: Params, shardings: Params | None) -> Callable[[Params], Params]:
    """Weights into the decoding dtype and layout; each host's own copy where `shardings` are of its devices alone."""
    leaf = jax.tree.leaves(params)[0]
    if shardings is None or not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return jax.jit(change, out_shardings=shardings)
    if not jax.tree.leaves(shardings)[0].is_fully_addressable:
        return jax.jit(change, out_shardings=shardings)
    changed = jax.jit(change)
    return lambda tree: hosts.local_copies(changed(tree), shardings)


def _cast(params: Params, dtype) -> Params:
    if dtype is None:
        return params
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
