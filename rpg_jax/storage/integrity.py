"""Checks that data from disk is what was written: checksums of arrays, digests of records, errors with paths."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.parallel import checksums, hosts

Tree = Any
T = TypeVar("T")
LEFT_OUT = ocp.PLACEHOLDER  # a leaf of `like` that is not read
_RESTORE_GB = 96  # a restore holds at most this much in a host's memory at once


class Refused(ValueError):
    """A file or folder that must not be used, with its path and the reason."""

    def __init__(self, path: Any, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


def signed(tree: Tree) -> dict[str, Tree]:
    """`tree` with u32[L, 2] `checksums` of its leaves, computed on the devices that hold them."""
    return {"tree": tree, "checksums": checksums.of_leaves(tree)}


def signed_like(like: Tree) -> dict[str, Tree]:
    """The `ShapeDtypeStruct`s of `signed(tree)`, from those of `tree`."""
    leaves = jax.tree.leaves(like)
    where = next(leaf for leaf in leaves if leaf is not LEFT_OUT).sharding
    everywhere = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where
    return {"tree": like, "checksums": jax.ShapeDtypeStruct((len(leaves), 2), jnp.uint32, sharding=everywhere)}


def restored(path: Any, like: Tree) -> Tree:
    """The tree that was saved as `signed(tree)` at `path`, laid out as `like`, whose leaves may be `LEFT_OUT`.

    Collective. It calls Orbax's handler directly. Orbax's checkpointers end in a barrier, at which hosts that have read
    their shards would wait for ever for a host that failed.

    Raises:
      Refused: on any host, the tree is missing, damaged or of another shape.
    """

    def read() -> Any:
        with named(path):
            wanted = signed_like(like)
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_RESTORE_GB)
            return handler.restore(path, args=ocp.args.PyTreeRestore(wanted, how))

    arrays = by_all(read)
    with named(path):
        return verified(arrays)


def verified(restored: Mapping[str, Tree]) -> Tree:
    """The tree in a restored `signed(tree)`. Raises ValueError with the names of leaves that were read and differ."""
    tree = restored["tree"]
    read = np.array([leaf is not LEFT_OUT for leaf in jax.tree.leaves(tree)])
    present = jax.tree.map(lambda leaf: None if leaf is LEFT_OUT else leaf, tree)
    expected, found = jax.device_get((restored["checksums"], checksums.of_leaves(present)))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(present)]
    wrong = [name for name, differs in zip(names, np.any(expected[read] != found, axis=1), strict=True) if differs]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{', '.join(wrong[:3])}{more} came back with other bits than were written")
    return tree


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON-able object with the digest of its text."""
    return {"sha256": _digest(value), "value": value}


def unsealed(value: Any) -> dict[str, Any]:
    """The value that `sealed` received. Raises ValueError if its text has changed."""
    if not isinstance(value, Mapping) or set(value) != {"sha256", "value"}:
        raise ValueError("it was not written by this version of the program")
    if _digest(value["value"]) != value["sha256"]:
        raise ValueError("its text is not the one that was written")
    return dict(value["value"])


def by_all(read: Callable[[], T]) -> T:
    """The result of `read`, if it succeeds in every process: a host may find damage in what other hosts do not read.

    Collective. `read` must not wait for other processes.

    Raises:
      Refused: `read` raised it in at least one process. Every process raises the error of the first such process.
    """
    value, own = None, None
    try:
        value = read()
    except Refused as error:
        own = error
    for said in hosts.all_gather_bytes(json.dumps([own.path, own.reason]).encode() if own else b""):
        if said:
            raise Refused(*json.loads(said)) from own
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def named(path: Any) -> Iterator[None]:
    """Turns every error of the block into `Refused`: the libraries that read the formats raise errors of many kinds."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise Refused(path, lines[0][:300]) from error


@contextlib.contextmanager
def writing(path: Any) -> Iterator[None]:
    """Turns errors of a block that writes `path` into an `OSError`: TensorStore reports a full disk as a ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        code = re.search(r"\[OS error (\d+)", text)
        raise OSError(f"{path} could not be written: {os.strerror(int(code[1])) if code else text[:300]}") from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
