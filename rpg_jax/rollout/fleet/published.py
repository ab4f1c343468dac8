"""The weights as a trainer publishes them and a worker reads them, to the bit.

Each process of the trainer holds a copy in host memory of the shards that it has, in the dtype that decodes. A shard
that several devices have is published once. A worker reads the parts of all processes, puts the arrays together, and
compares their checksum, computed on its own devices, with the trainer's.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from rpg_jax.models import Base
from rpg_jax.rollout.fleet.shelf import Item, Shelf
from rpg_jax.rollout.weights import Params, RolloutError, Weights, weights_checksum


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """This process's shards in host memory, and the checksum of all weights."""

    item: Item
    checksum: int


def name_of(checksum: int) -> str:
    """The name of the weights on every shelf."""
    return f"weights/{checksum:016x}"


class Published(Weights):
    """The trainer's weights on a shelf; nothing is decoded here, so there are no arrays to read.

    Args:
      params: of the trainer; version 0.
      dtype: in which workers decode; None for that of `params`.
      base: the frozen weights, if `params` are adapters; the shelf has the two merged.
    """

    def __init__(self, params: Params, shelf: Shelf, *, dtype: Any = None, base: Base | None = None):
        self._shelf, self._name = shelf, ""
        super().__init__(params, dtype=dtype, base=base, merge=True)

    def stage(self, params: Params) -> HostCopy:  # type: ignore[override]  # on no device
        """A copy in host memory. All processes of the trainer call it, from their main threads."""
        converted = self._converted(params)
        checksum = weights_checksum(converted)
        leaves = jax.tree_util.tree_flatten_with_path(converted)[0]
        shards = [
            (jax.tree_util.keystr(path), leaf, shard)
            for path, leaf in leaves
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        for _, _, shard in shards:
            shard.data.copy_to_host_async()
        pieces, held = [], []
        for name, leaf, shard in shards:
            start = [part.start or 0 for part in shard.index]
            piece = np.array(shard.data, order="C")  # a copy: the trainer donates its arrays
            pieces.append({"leaf": name, "start": start, "shape": piece.shape, "dtype": str(leaf.dtype)})
            held.append(memoryview(piece.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        return HostCopy(Item({"pieces": pieces}, held), checksum)

    def sync(self, params: Params | HostCopy, version: int) -> None:  # type: ignore[override]
        """Puts the weights on the shelf, and takes the last ones off."""
        copy = params if isinstance(params, HostCopy) else self.stage(params)
        name, before = name_of(copy.checksum), self._name
        self._shelf.put(name, copy.item)
        with self.lock:
            self._version, self._checksum, self._name = version, copy.checksum, name
        if before not in ("", name):
            self._shelf.drop(before)

    def checksum(self) -> int:
        """Of the weights on the shelf."""
        assert self._checksum is not None, "a sync sets it"
        return self._checksum

    def verify(self, params: Params | HostCopy) -> None:  # type: ignore[override]
        """Raises RolloutError if other weights are on the shelf. Every worker compares what it has read itself."""
        own = params.checksum if isinstance(params, HostCopy) else weights_checksum(self._converted(params))
        if own != self.checksum():
            raise RolloutError(f"the fleet has weights {self.checksum():016x}, and the trainer {own:016x}")

    def pinned(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("the weights of a fleet are on its workers' devices")


def assembled(shapes: Params, parts: Iterable[tuple[Mapping[str, Any], bytearray]]) -> Params:
    """The weights as host arrays, from the parts of all processes of a trainer; `shapes` says what they must be.

    Raises:
      ValueError: a piece that does not fit, or an element that no piece has.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    arrays = {jax.tree_util.keystr(path): np.empty(x.shape, x.dtype) for path, x in paths}
    missing = {name: array.size for name, array in arrays.items()}
    for head, held in parts:
        at = 0
        for piece in head["pieces"]:
            name, start, shape = piece["leaf"], piece["start"], piece["shape"]
            array = arrays.get(name)
            if array is None or piece["dtype"] != str(array.dtype) or len(shape) != array.ndim:
                raise ValueError(f"the trainer's weights have {piece}, which the model has not")
            end = [a + n for a, n in zip(start, shape, strict=True)]
            if min(start, default=0) < 0 or any(b > n for b, n in zip(end, array.shape, strict=True)):
                raise ValueError(f"the trainer's weights have {piece}, and the model's {name} is {array.shape}")
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(held, array.dtype, count, at).reshape(shape)
            if values.size == array.size:
                arrays[name] = values  # no second copy in memory
            else:
                array[tuple(map(slice, start, end))] = values
            at, missing[name] = at + values.nbytes, missing[name] - count
    if wrong := [name for name, count in missing.items() if count]:
        raise ValueError(f"the trainer's weights do not cover {wrong[0]} exactly once")
    return jax.tree.unflatten(tree, list(arrays.values()))
