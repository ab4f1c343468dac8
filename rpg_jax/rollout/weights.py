"""The rollout's copy of the weights. A sync replaces the copy between dispatches, and a checksum proves the sync.

Suppose that two programs have collectives, and that two devices get the programs in different orders. Then each device
waits for the other for ever. So every decoding program is launched under `Weights.lock`. If the rollout has its own
devices, only `stage` runs programs on the trainer's devices, in the trainer's thread; the rest of a sync is a transfer.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax.models import Base
from rpg_jax.models.lora import attached, merged, scaled
from rpg_jax.models.weights import quantized, quantized_shardings
from rpg_jax.parallel import hosts

Params = Any


class RolloutError(RuntimeError):
    """A rollout failed, or its weights are not the trainer's. `__cause__` is the error behind the failure, if any."""


@dataclasses.dataclass(frozen=True)
class Staged:
    """Weights that any thread may sync at any time, because the trainer donates none of these arrays.

    Attributes:
      params: as the rollout needs them; but if the rollout has its own devices, still on the trainer's devices.
      checksum: u32[2], the two halves of `weights_checksum(params)`, the high half first.
    """

    params: Params
    checksum: jax.Array


class Weights:
    """The weights that the rollout reads. Programs get them as arguments, so a sync compiles nothing again.

    Without `dtype`, `shardings`, `int8` and `base`, the rollout reads the trainer's own arrays and has no copy. A
    trainer that donates its arrays while completions are decoded must hold `lock`. `pinned` holds `lock` while a
    dispatch reads the arrays. The attribute `version` is the version of the last sync.

    Args:
      params: pytree of arrays, the trainer's weights, which the constructor syncs.
      version: the `weight_version` of completions that these weights sample.
      dtype: each sync casts floating-point weights to it (None: to none), because a decode step reads every weight.
      shardings: the decoding layout, a pytree of shardings like `params`; None: the layout of `params`. A sync brings
        the weights there by one jitted reshard, or by one transfer if the layout has none of the trainer's devices.
      int8: whether each sync rounds the layers' matrices to eight bits, with one scale per output channel.
      base: the frozen weights, if `params` are adapters. Without `merge`, `base` is in the decoding layout and dtype,
        `shardings` are the shardings of the adapters, a sync moves adapters only, and `int8` does nothing.
      merge: whether each sync computes W + (alpha / rank) A B on the trainer's devices. Then `shardings` are the
        shardings of all weights.
    """

    def __init__(
        self,
        params: Params,
        version: int = 0,
        *,
        dtype=None,
        shardings: Params | None = None,
        int8: bool = False,
        base: Base | None = None,
        merge: bool = False,
    ):
        self.lock = threading.RLock()
        self._elsewhere: Params | None = None
        self._checksum: int | None = None
        self._beside = None if merge else base
        whole = base is None or merge
        if int8 and whole and shardings is not None:
            shapes = params if base is None else jax.eval_shape(lambda base: merged(base.policy(params)), base)
            shardings = quantized_shardings(shardings, shapes)
        if _apart(params, shardings):
            shardings, self._elsewhere = None, shardings

        def change(base: Base | None, tree: Params) -> Params:
            if base is not None:
                tree = merged(base.policy(tree)) if merge else scaled(tree, base.scale)
            return quantized(_cast(tree, dtype)) if int8 and whole else _cast(tree, dtype)

        self._layout: Callable[[Params], Params] | None = None
        if base is not None or int8 or dtype is not None or shardings is not None:
            self._layout = functools.partial(_layout(change, params, shardings), base)
        self.sync(params, version)

    def stage(self, params: Params) -> Staged:
        """Returns a copy of `params` for a later sync. The copy stays valid when the trainer donates `params`. All work
        that must run on the devices of `params` is launched here, without waiting. All hosts call this together."""
        converted = self._converted(snapshot(params))
        with _on_mesh_of(converted):
            return Staged(converted, hosts.checksum_of_tree(converted))

    def sync(self, params: Params | Staged, version: int) -> None:
        """Replaces the rollout's weights by `params`, number `version`, from the next dispatch on. Waits for `lock`."""
        moved = None
        if self._elsewhere is not None:  # before the lock: decoding goes on during the transfer
            moved = jax.device_put(self._converted(params), self._elsewhere)
        with self.lock:
            self._synced = self._converted(params) if moved is None else moved
            self._params = self._synced
            if self._beside is not None:
                self._params = attached(self._beside.weights, self._synced)
            self.version, self._checksum = version, None

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Params]:
        """A context with the current weights that holds `lock`: no sync replaces the weights until the block ends."""
        with self.lock:
            yield self._params

    def checksum(self) -> int:
        """`weights_checksum` of the weights that the last sync brought, in the rollout's dtype: of the adapters alone
        with `base` and without `merge`. The first call after a sync computes the checksum on the weights' devices."""
        with self.lock:
            if self._checksum is None:
                self._checksum = weights_checksum(self._synced)
            return self._checksum

    def verify(self, params: Params | Staged) -> None:
        """Raises RolloutError unless the weights of the last sync are `params` in the rollout's dtype, by checksums of
        64 bits. The checksum of the rollout's weights is computed anew, and that of `params` unless `params` are
        `Staged`. If the rollout reads the very tree `params`, nothing is computed."""
        if params is self._synced:
            return
        trainer = _number(params.checksum) if isinstance(params, Staged) else weights_checksum(self._converted(params))
        with self.lock:
            self._checksum = own = weights_checksum(self._synced)
            if own != trainer:
                raise RolloutError(
                    f"the rollout's weights (version {self.version}, checksum {own:016x}) are not the trainer's "
                    f"(checksum {trainer:016x}): completions would come from another policy than the one trained; "
                    "call sync_weights after every update"
                )

    def _converted(self, params: Params | Staged) -> Params:
        """`params` in the rollout's dtype, and in the rollout's layout unless this is on devices that do not train."""
        if isinstance(params, Staged):
            return params.params
        return params if self._layout is None else self._layout(params)


@jax.jit
def snapshot(params: Params) -> Params:
    """A copy of all arrays of `params`. The copy stays valid when the trainer donates `params`."""
    return jax.tree.map(jnp.copy, params)


def weights_checksum(params: Params) -> int:
    """Returns a checksum below 2^64 of the bit patterns, places and names of all weights. It is the same under every
    sharding. If the weights are spread over processes, all processes call this together."""
    with _on_mesh_of(params):
        return _number(hosts.checksum_of_tree(params))


def _number(checksum: jax.Array) -> int:
    high, low = jax.device_get(checksum)
    return int(high) << 32 | int(low)


def _apart(params: Params, shardings: Params | None) -> bool:
    """Whether `params` and `shardings` have no device in common; False if `shardings` is None."""
    leaf, where = jax.tree.leaves(params)[0], jax.tree.leaves(shardings)
    return bool(where) and isinstance(leaf, jax.Array) and leaf.sharding.device_set.isdisjoint(where[0].device_set)


def _on_mesh_of(params: Params) -> contextlib.AbstractContextManager:
    """A context in which programs run on the mesh of `params`, if their sharding has one."""
    sharding = jax.tree.leaves(params)[0].sharding
    mesh = getattr(sharding, "mesh", None)
    return jax.set_mesh(mesh) if isinstance(mesh, jax.sharding.Mesh) else contextlib.nullcontext()


def _layout(
    change: Callable[[Base | None, Params], Params], params: Params, shardings: Params | None
) -> Callable[[Base | None, Params], Params]:
    """Returns a function of (base, weights like `params`) that brings `change` of them into `shardings`. If these have
    devices of this host alone, and `params` also of others, this is the host's own copy, all hosts call together."""
    leaf, where = jax.tree.leaves(params)[0], jax.tree.leaves(shardings)
    spans_hosts = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if not (spans_hosts and where and where[0].is_fully_addressable):
        return jax.jit(change, out_shardings=shardings)
    changed = jax.jit(change)
    return lambda base, tree: hosts.local_copies(changed(base, tree), shardings)


def _cast(params: Params, dtype) -> Params:
    if dtype is None:
        return params
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
