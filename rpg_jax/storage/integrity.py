"""Compares data from disk with the data that was written: checksums of arrays, digests of records."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.parallel import hosts
from rpg_jax.storage import errors
from rpg_jax.storage.errors import Kind, StorageFailure

Tree = Any
T = TypeVar("T")
LEFT_OUT = ocp.PLACEHOLDER  # a leaf of `like` that is not read
_RESTORE_GB = 96  # a restore holds at most this much in a host's memory at once


class Refused(ValueError):
    """A file or folder that must not be used, with its `path` and the `reason`, both texts."""

    def __init__(self, path: Any, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class Damaged(Refused):
    """A file or folder that is not what was written, or that is incomplete; an older one may be used instead."""


def signed(tree: Tree) -> dict[str, Tree]:
    """Returns {"tree": `tree`, "checksums": u32[L, 2], a checksum of each of the L leaves, on devices}. Collective."""
    return {"tree": tree, "checksums": hosts.checksums_of_leaves(tree)}


def restored(path: Any, like: Tree) -> Tree:
    """Returns the tree that was saved as `signed(tree)` at `path`, with its bits checked. Collective.

    Orbax's handler is called directly, without a checkpointer of Orbax. A checkpointer ends in a barrier, and hosts
    that have read their shards would wait there for ever for a host that failed.

    Args:
      like: shapes, types and shardings of the arrays to return. A leaf may be `LEFT_OUT` and stays so; not all may.

    Raises:
      Damaged: on any host, the tree is missing or has other bits than were written.
      Refused: the saved tree has other arrays than `like`.
      StorageFailure: a host could not read the tree, after retries.
    """
    leaves = jax.tree.leaves(like)
    where = next(leaf for leaf in leaves if leaf is not LEFT_OUT).sharding
    everywhere = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where
    wanted = {"tree": like, "checksums": jax.ShapeDtypeStruct((len(leaves), 2), jnp.uint32, sharding=everywhere)}

    def read() -> Any:
        with judged(path):
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_RESTORE_GB)
            return errors.retried(lambda: handler.restore(path, args=ocp.args.PyTreeRestore(wanted, how)), path)

    arrays = by_all(read)
    if wrong := differing(arrays):
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Damaged(path, f"{', '.join(wrong[:3])}{more} came back with other bits than were written")
    return arrays["tree"]


def differing(restored: Mapping[str, Tree]) -> list[str]:
    """The leaves of a restored `signed(tree)` that differ from their checksums, by name; `LEFT_OUT` is not compared."""
    tree = restored["tree"]
    read = np.array([leaf is not LEFT_OUT for leaf in jax.tree.leaves(tree)])
    present = jax.tree.map(lambda leaf: None if leaf is LEFT_OUT else leaf, tree)
    expected, found = jax.device_get((restored["checksums"], hosts.checksums_of_leaves(present)))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(present)]
    return [name for name, differs in zip(names, np.any(expected[read] != found, axis=1), strict=True) if differs]


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"value": `value`, "sha256": the digest of its JSON}, which JSON can hold if it can hold `value`."""
    return {"sha256": _digest(value), "value": value}


def unsealed(path: Any, value: Any) -> dict[str, Any]:
    """The value in `value`, which `sealed` returned and `path` has kept. Raises Damaged if `value` has changed."""
    if not isinstance(value, Mapping) or set(value) != {"sha256", "value"}:
        raise Damaged(path, "it was not written by this version of the program")
    if _digest(value["value"]) != value["sha256"]:
        raise Damaged(path, "its text is not the one that was written")
    return dict(value["value"])


def by_all(read: Callable[[], T]) -> T:
    """The result of `read` in this process, if `read` succeeds in every process. Each host may read other bytes.

    Collective. `read` must not wait for other processes, which would wait for ever if it raised any other error.

    Raises:
      Refused, StorageFailure: `read` raised the error in a process. Then every process raises the error; if several
        processes have an error, the error of the first of these processes.
    """
    value: T | None = None
    own: Exception | None = None
    told: list[str] = []
    try:
        value = read()
    except Refused as error:
        own, told = error, [type(error).__name__, error.path, error.reason]
    except StorageFailure as error:
        own, told = error, [error.kind.value, error.what, error.reason]
    for said in hosts.all_gather_bytes(json.dumps(told).encode() if told else b""):
        if said:
            kind, path, reason = json.loads(said)
            refusals: dict[str, type[Refused]] = {"Refused": Refused, "Damaged": Damaged}
            raise (
                refusals[kind](path, reason) if kind in refusals else StorageFailure(path, reason, Kind(kind))
            ) from own
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def judged(path: Any) -> Iterator[None]:
    """Names `path` in errors of the block: damage becomes `Damaged`, a store that does not answer `StorageFailure`. A
    ValueError of no known kind becomes `Refused`: Orbax raises it where a checkpoint has other arrays than were asked
    for. A `Refused` stays as it is. Every other error becomes a StorageFailure."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        kind = errors.kind_of(error)
        if kind is Kind.DAMAGE:
            raise Damaged(path, errors.one_line(error)) from error
        if kind is Kind.UNKNOWN and isinstance(error, ValueError):
            raise Refused(path, errors.one_line(error)) from error
        raise errors.failure(path, error) from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
