"""The sampler's weights: a locked reference that is swapped between decode steps, and a checksum that proves a sync."""

from __future__ import annotations

import contextlib
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


class Weights:
    """The weights that the rollout engine reads, dereferenced outside jit, so that a swap never recompiles.

    With neither `dtype` nor `shardings` the trainer's own arrays are used, without a copy. A trainer that donates them
    while completions are being decoded does so under `lock`; `pinned` holds it from dereference to dispatch.

    Args:
      params: pytree of arrays.
      version: what completions carry as their `weight_version`.
      dtype: cast floating-point weights to this once per sync (decoding reads every weight at every step).
      shardings: pytree of shardings like `params`: the decoding layout, reached by one jitted reshard per sync.
      int8: round the layers' matrices to eight bits; see `models.quantized`.
    """

    def __init__(
        self, params: Params, version: int = 0, *, dtype=None, shardings: Params | None = None, int8: bool = False
    ):
        self.lock = threading.RLock()
        self._layout = None
        if int8:
            shardings = None if shardings is None else quantized_shardings(shardings, params)
            self._layout = _layout(lambda tree: quantized(_cast(tree, dtype)), params, shardings)
        elif dtype is not None or shardings is not None:
            self._layout = _layout(lambda tree: _cast(tree, dtype), params, shardings)
        self.sync(params, version)

    @property
    def version(self) -> int:
        return self._version

    def sync(self, params: Params, version: int) -> None:
        """Swaps the weights in; takes effect at the next dispatch."""
        with self.lock:
            self._params = params if self._layout is None else self._layout(params)
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

    def verify(self, params: Params) -> None:
        """Compares the engine's weights with `params` brought into the engine's dtype and layout.

        Raises:
          RolloutError: they differ in any bit.
        """
        with self.pinned() as mine:
            theirs = params if self._layout is None else self._layout(params)
            if (sampler := weights_checksum(mine)) != (trainer := weights_checksum(theirs)):
                raise RolloutError(
                    f"the sampler's weights (version {self._version}, checksum {sampler:016x}) are not the trainer's "
                    f"(checksum {trainer:016x}): completions would come from another policy than the one trained; "
                    "call sync_weights after every update"
                )


def weights_checksum(params: Params) -> int:
    """64-bit checksum of the bit patterns, places and names of all weights; the same under every sharding (see
    `parallel.checksums`)."""
    with _where(params):
        high, low = jax.device_get(checksums.of_tree(params))
    return int(high) << 32 | int(low)


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
