"""Collectives over the processes of a run, on host values, and checksums of sharded arrays, equal on every mesh.

Every process must call the collectives in the same order and from its main thread. The calls of an `Exchange` have an
order of their own. With one process, no collective communicates.

A process may wait for others for minutes. During the wait, the process asks the coordination service that
`jax.distributed` started. A device collective would not do: after five minutes of waiting, the runtime of TPU slices
reports a hang. Only large values go over the devices, in pieces, after every process has arrived.
"""

import contextlib
import itertools
import json
import socket
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

Tree = Any
T = TypeVar("T")
_PATIENCE_MS = 7 * 24 * 3600 * 1000  # a lost process ends the wait sooner, by its heartbeats; a stall by the watchdog
_SMALL = 1 << 20  # bytes of a value that go through the service; its messages may have four times as many
PIECE = 1 << 26  # bytes of each process that a device holds at once of a larger value
_FAILURE = "rpg_jax/failure"  # the key of the first failure
_calls = itertools.count()  # equal in all processes, as they call collectives in the same order


def is_first() -> bool:
    """Whether this is process 0, which writes files and talks to people. True with a single process."""
    return jax.process_index() == 0


def _service() -> Any:
    """Returns the client of the coordination service. JAX does not export it; Orbax takes it from the same place."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed.initialize has not run"
    return client


def has_service() -> bool:
    """Whether this process serves the coordination service, through which processes meet. Process 0 of several does."""
    return distributed.global_state.service is not None


class Failure(NamedTuple):
    """A run's first failure: the number of the process, its host name, a line that says why, and the exit code."""

    process: int
    machine: str
    reason: str
    code: int


def publish_failure(reason: str, code: int) -> None:
    """Tells all processes that this process ends with exit code `code` for the reason in the line `reason`. A run keeps
    only the first failure: a later call does nothing, nor does a call after the coordination service has ended. The
    process must have joined the others by `jax.distributed`."""
    failure = Failure(distributed.global_state.process_id, socket.gethostname(), reason, code)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the key exists, or the service has gone
        _service().key_value_set(_FAILURE, json.dumps(failure))


def published_failure() -> Failure | None:
    """Returns the first failure that a process has published; None if there is none yet. Waits for no process. Raises
    jax.errors.JaxRuntimeError if the coordination service does not answer. The process must have joined the others."""
    try:
        return Failure(*json.loads(_service().key_value_try_get(_FAILURE)))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def barrier(name: str, patience_ms: int = _PATIENCE_MS) -> None:
    """Waits until every process has called `barrier`, a collective; a single process does not wait. Errors show `name`.
    Raises jax.errors.JaxRuntimeError if a process is missing for `patience_ms` milliseconds (default: a week)."""
    if jax.process_count() > 1:
        _service().wait_at_barrier(f"rpg_jax/{next(_calls)}/{name}", patience_ms)


@contextlib.contextmanager
def first_alone(name: str) -> Iterator[None]:
    """Runs the block in process 0 first, then in all other processes: a collective context. Messages show `name`. If
    the block raises in process 0, the others keep waiting."""
    if not is_first():
        barrier(name)
    yield
    if is_first():
        barrier(name)


def all_gather_bytes(value: bytes) -> list[bytes]:
    """Returns the `value` of every process, in the order of the processes. Lengths may differ. A collective; it waits
    for all processes. The values go through the coordination service, or over the devices if one is above 1 MiB."""
    if jax.process_count() == 1:
        return [value]
    small = len(value) <= _SMALL
    said = _main.all_gather_bytes(b"v" + value if small else b"s%d" % len(value))  # the value, or only its size
    if all(one.startswith(b"v") for one in said):
        return [one[1:] for one in said]
    return _over_devices(value, [len(one) - 1 if one.startswith(b"v") else int(one[1:]) for one in said])


class SharedCounter:
    """A counter of the whole run: each `draw`, by any thread of any process, returns another number of 0, 1, 2, …

    All processes make a counter together, in the order of their collectives, but making a counter waits for nobody. The
    coordination service stores the number, a few bytes, to the end of the run.
    """

    def __init__(self):
        self._key, self._alone = f"rpg_jax/{next(_calls)}/drawn", itertools.count()

    def draw(self) -> int:
        """Returns the lowest number, from 0 on, that nobody has drawn from this counter. It waits for no process."""
        if jax.process_count() == 1:
            return next(self._alone)
        return _service().key_value_increment(self._key, 1) - 1


def pmax(value: int) -> int:
    """Returns the largest `value` of any process. A collective; it waits for all processes."""
    return max(map(int, _main.all_gather_bytes(b"%d" % value)))


class Exchange:
    """All-gathers through the coordination service alone. No program runs on a device. Therefore one thread of each
    process may call `all_gather_bytes` at any time, also while the main thread launches programs. All processes must
    make their exchanges in the same order. In one exchange, all processes must make their calls in the same order."""

    def __init__(self) -> None:
        self._keys, self._rounds = f"rpg_jax/exchange {next(_exchanges)}", itertools.count()
        self._spent: list[str] = []  # keys of this process that other processes may still read

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Returns every process's `value`, in the order of the processes, when all have called. Lengths may differ."""
        if jax.process_count() == 1:
            return [value]
        client, own, keys = _service(), jax.process_index(), f"{self._keys}/{next(self._rounds)}"
        pieces = [value[start : start + _SMALL] for start in range(0, len(value), _SMALL)] or [b""]
        mine = [f"{keys}/{own}/{number}" for number in range(len(pieces))]
        for number, (key, piece) in enumerate(zip(mine, pieces, strict=True)):
            last = number == len(pieces) - 1
            client.key_value_set_bytes(key, (b"." if last else b"+") + piece)
        found = [value if other == own else _read(client, f"{keys}/{other}") for other in range(jax.process_count())]
        # This process has a value of this call from every process. So every process has ended the call before.
        for key in self._spent:
            client.key_value_delete(key)
        self._spent = mine
        return found


_exchanges = itertools.count()
_main = Exchange()  # the exchange of the main threads


def _read(client: Any, prefix: str) -> bytes:
    """Returns the value stored in pieces under `prefix`. The last piece begins with `.`, each other piece with `+`."""
    pieces = list[bytes]()
    for number in itertools.count():
        piece = client.blocking_key_value_get_bytes(f"{prefix}/{number}", _PATIENCE_MS)
        pieces.append(piece[1:])
        if piece[:1] == b".":
            break
    return b"".join(pieces)


def _over_devices(value: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Returns the `value` of every process, of lengths `sizes`. A device collective takes `PIECE` bytes a process."""
    pieces: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), PIECE):
        mine = np.frombuffer(value[start : start + PIECE], np.uint8)
        width = min(PIECE, max(sizes) - start)
        padded = np.zeros(1 << max(width - 1, 0).bit_length(), np.uint8)  # few shapes, few compilations
        padded[: len(mine)] = mine
        rows = multihost_utils.process_allgather(padded)
        for own, row, size in zip(pieces, rows, sizes, strict=True):
            own.append(row[: max(size - start, 0)][:width].tobytes())
    return [b"".join(own) for own in pieces]


def share(items: Sequence[T]) -> list[T]:
    """Returns this process's part of `items`: process p of n takes items p, p + n, p + 2n, … Neighbours are often
    alike, for example long prompts. This order spreads neighbours over the processes. Not a collective."""
    return list(items[jax.process_index() :: jax.process_count()])


def placed(rows: Tree, sharding: jax.sharding.Sharding) -> Tree:
    """Makes global arrays of a tree of arrays that every host holds as a whole. Each leaf gets `sharding`, over devices
    of any process. Each process uploads only the shards of its own devices, and waits for no other process."""
    if jax.process_count() == 1:
        return jax.device_put(rows, sharding)

    def place(x: Any) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, rows)


def gathered(x: jax.Array) -> np.ndarray:
    """Returns the whole of `x` as a NumPy array on every host. It waits until `x` is computed. A collective over the
    devices if `x` is also on devices of other processes."""
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)


def local_copies(tree: Tree, shardings: Tree) -> Tree:
    """Returns a whole copy of a tree of arrays on each host, on its own devices. A collective over the devices.

    Args:
      tree: arrays that are sharded over the devices of all hosts.
      shardings: the same tree with the NamedSharding of each copy. Its mesh has all devices of this host, in the order
        of their ids. The meshes of all hosts have one shape.
    """

    def wide(sharding: NamedSharding) -> NamedSharding:
        local = sharding.mesh
        devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
        names = ("hosts", *local.axis_names)
        mesh = Mesh(
            devices.reshape(jax.process_count(), *local.devices.shape), names, axis_types=(AxisType.Auto,) * len(names)
        )
        return NamedSharding(mesh, sharding.spec)

    def rebuilt(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        pieces = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    return jax.tree.map(rebuilt, jax.device_put(tree, jax.tree.map(wide, shardings)), shardings)


@jax.jit
def checksum_of_tree(tree: Tree) -> jax.Array:
    """Returns a checksum u32[2] of 64 bits over the bit patterns, places and names of all leaves of a tree of arrays.
    The checksum is equal under every sharding. A change of one element of at most 4 bytes always changes it. Another
    change goes unnoticed with a probability of about 2^-64. Raises ValueError for a tree without a leaf."""
    return checksums_of_leaves(tree).sum(axis=0, dtype=jnp.uint32)


@jax.jit
def checksums_of_leaves(tree: Tree) -> jax.Array:
    """Returns the 64-bit checksums u32[L, 2] of the L arrays of a tree, in the order of `jax.tree.leaves`: of bit
    patterns, places and the array's path in the tree. They are equal under every sharding."""
    tree = jax.device_put(tree, jax.memory.Space.Device)  # some leaves may wait in host memory
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return jnp.stack([_folded(x, jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))) for path, x in leaves])


@jax.jit  # leaves of one shape are traced once
def _folded(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Returns two sums u32[2] over the elements, each mixed with its place and `salt`; their order changes no sum."""
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.itemsize])
    place, stride = salt, 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    mixed = _mix(words.astype(jnp.uint32) ^ _mix(place))
    return jnp.stack([mixed.sum(dtype=jnp.uint32), _mix(mixed + jnp.uint32(0x9E3779B9)).sum(dtype=jnp.uint32)])


def _mix(h: jax.Array) -> jax.Array:
    """Returns `h` after the finaliser of MurmurHash3, a bijection of u32."""
    h = (h ^ h >> 16) * jnp.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * jnp.uint32(0xC2B2AE35)
    return h ^ h >> 16
