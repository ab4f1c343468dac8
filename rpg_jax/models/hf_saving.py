"""Writes weights in Hugging Face layout: every process writes its own part in parallel, and config.json comes last."""

import collections
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import Params
from rpg_jax.models.hf_config import write_config
from rpg_jax.models.hf_layout import DTYPES, Stored, file_names, in_files, layout, write_index
from rpg_jax.parallel import hosts
from rpg_jax.storage.files import naming, read_object, write_atomically

_BLOCK_BYTES = 64 * 2**20
_WRITERS = 4  # threads
LAST = "config.json"  # a folder without this file is not complete


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of a parameter: `count` slices of its first axis from `start` on; all of it if it is not stacked."""

    entry: Stored
    start: int
    count: int

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the block's tensors, in the order in which the block has them."""
        if not self.entry.stacked:
            return [self.entry.name]
        shape = (self.count, *self.entry.shape[1 : self.entry.stacked])
        return [self.entry.name.format(self.start + first, *rest) for first, *rest in np.ndindex(*shape)]

    @property
    def size(self) -> int:
        return len(self.names) * math.prod(self.entry.tensor_shape)


class Saving:
    """Writes a model's weights, from all processes of a run, into a folder that transformers, vLLM and SGLang read.

    All processes call `fetch` and consume what it yields, then each calls `write`. When all have written, one process
    calls `complete`. The files are safetensors, an index if there are several, and config.json as the last.

    The weights are divided into blocks of at most 64 MiB, or one layer of one matrix where that is larger. Every
    process gets about equally many bytes of blocks. Every file and its tensors belong to one process.

    Args:
      config: the model.
      dtype: of the weights in the folder: float32, bfloat16 or float16.
      base: folder whose config.json has other fields to take over; None: no other fields.
      fields: further fields of config.json, such as token ids, which replace fields of `base`.
      head: whether the head is a tensor of its own even if it is the embedding.
      max_file_bytes: the most bytes of a file, unless one block is larger.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: Any,
        *,
        base: Path | str | None = None,
        fields: Mapping[str, Any] | None = None,
        head: bool = False,
        max_file_bytes: int = 2 * 2**30,
    ):
        self._config, self._dtype = config, jnp.dtype(dtype)
        self._base, self._fields = base, dict(fields or {})
        blocks = _blocks(layout(config, head=head), min(_BLOCK_BYTES, max_file_bytes) // self._dtype.itemsize)
        self._parts = _divided(blocks, jax.process_count())
        limit = max_file_bytes // self._dtype.itemsize
        files = [list(in_files(part, lambda block: block.size, limit)) for part in self._parts]
        names = iter(file_names(sum(map(len, files))))
        self._files = [{next(names): held for held in own} for own in files]

    def fetch(self, params: Params) -> Iterator[np.ndarray]:
        """Yields the blocks of this process in host memory, in the dtype and order of the files. `params` are the
        model's params, of JAX or NumPy. A collective on the main thread if `params` are spread over processes. With
        several processes a device holds at most three whole blocks: the block that is gathered, the block before, and
        the block that is copied to the host."""
        leaves, own = flatten_dict(params), jax.process_index()
        before: jax.Array | None = None
        underway: jax.Array | None = None
        # The processes take turns, so their copies to the host overlap.
        for process, block in itertools.chain.from_iterable(map(enumerate, itertools.zip_longest(*self._parts))):
            if block is None:
                continue
            leaf = leaves[block.entry.path]
            gathers = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            if process != own and not gathers:
                continue
            where = NamedSharding(leaf.sharding.mesh, PartitionSpec()) if gathers else None
            found = _program(where)(leaf, block.start, entry=block.entry, count=block.count, dtype=self._dtype)
            jax.block_until_ready(before)  # a device has room for few blocks
            before = found
            if process == own:
                if underway is not None:
                    yield np.asarray(underway)
                underway = found.addressable_data(0) if gathers else found
                underway.copy_to_host_async()
        if underway is not None:
            yield np.asarray(underway)

    def write(self, folder: Path, blocks: Sequence[np.ndarray]) -> int:
        """Writes the files of this process from all blocks of `fetch`, several files at once. Returns the number of
        bytes. Makes the folder if it is missing. Any thread may call `write`. Raises OSError, which names the file."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = iter(blocks)
        with ThreadPoolExecutor(_WRITERS) as pool:
            files = [
                pool.submit(self._write_file, folder / name, held, list(itertools.islice(arrays, len(held))))
                for name, held in self._files[jax.process_index()].items()
            ]
            return sum(file.result() for file in files)

    def write_slowly(self, folder: Path, blocks: Iterator[np.ndarray]) -> None:
        """Writes the files of this process, block by block, and takes all `blocks`, the generator that `fetch`
        returned. Host memory holds two blocks. Makes a missing folder. Raises OSError, which names the file."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, held in self._files[jax.process_index()].items():
            self._write_file(folder / name, held, itertools.islice(blocks, len(held)))
        collections.deque(blocks, maxlen=0)  # other processes may have the last blocks, which all processes gather

    def complete(self, folder: Path) -> None:
        """Writes the index and then config.json. One process calls it when every process has written its files. Raises
        ValueError if transformers has no such model or config.json of `base` is damaged, OSError if `base` has none."""
        owner = {
            tensor: name
            for own in self._files
            for name, held in own.items()
            for block in held
            for tensor in block.names
        }
        numbers = sum(block.size for part in self._parts for block in part)
        write_index(folder, owner, numbers * self._dtype.itemsize)
        kept = read_object(Path(self._base) / LAST) if self._base is not None else {}
        written = write_config(self._config, self._dtype.name, kept | self._fields)
        write_atomically(folder / LAST, json.dumps(written, indent=2) + "\n")

    def _write_file(self, path: Path, blocks: list[_Block], arrays: Iterable[np.ndarray]) -> int:
        with naming(path), path.open("wb") as file:
            written = file.write(self._header(blocks))
            for array in arrays:
                written += file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return written

    def _header(self, blocks: list[_Block]) -> bytes:
        """Returns the bytes before the tensors of a file: github.com/huggingface/safetensors, "Format"."""
        head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for block in blocks:
            size = block.size // len(block.names) * self._dtype.itemsize
            for name in block.names:
                place = {"data_offsets": [end, end + size], "shape": block.entry.tensor_shape}
                head[name] = {"dtype": DTYPES[self._dtype.name], **place}
                end += size
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def save(folder: Path | str, config: DecoderConfig, params: Params, *, dtype: Any = None, **options: Any) -> None:
    """Writes `params` into a folder that transformers, vLLM and SGLang read: safetensors, and last config.json.

    A collective, which waits until the folder is complete: all processes must see the folder. Host memory holds two
    blocks of at most 64 MiB, or of one layer of one matrix, at a time. Raises OSError, which names the file, and, after
    the weights are written, ValueError as `Saving.complete`.

    Args:
      dtype: of the weights in the folder; None keeps the dtype of the params.
      options: `base`, `fields`, `head` and `max_file_bytes` of `Saving`.
    """
    folder = Path(folder)
    saving = Saving(config, dtype or jax.tree.leaves(params)[0].dtype, **options)
    saving.write_slowly(folder, saving.fetch(params))
    hosts.barrier("weights are written")
    if hosts.is_first():
        saving.complete(folder)
    hosts.barrier("the folder is complete")


@functools.cache
def _program(where: NamedSharding | None) -> Any:
    """Returns the program that makes a block of a parameter, as it is stored, under the sharding `where` (None: of its
    input). The result is never the input, which a trainer may donate."""

    def stored(leaf: jax.Array, start: int, *, entry: Stored, count: int, dtype: Any) -> jax.Array:
        if entry.stacked:
            leaf = jax.lax.dynamic_slice_in_dim(leaf, start, count)
        return jnp.copy(entry.write(leaf.astype(dtype)))

    return jax.jit(stored, static_argnames=("entry", "count", "dtype"), out_shardings=where)


def _blocks(entries: list[Stored], limit: int) -> Iterator[_Block]:
    """Yields all blocks, of at most `limit` numbers or one layer. One program makes the equal blocks of a parameter."""
    for entry in entries:
        layers = entry.shape[0] if entry.stacked else 1
        row = math.prod(entry.shape) // layers
        count = max(n for n in range(1, layers + 1) if layers % n == 0 and (n == 1 or n * row <= limit))
        for start in range(0, layers, count):
            yield _Block(entry, start, count)


def _divided(blocks: Iterable[_Block], processes: int) -> list[list[_Block]]:
    """Returns the blocks of each process, in the order of `blocks`. It shares them out from the largest to the
    smallest, each block to the process that has the fewest numbers so far."""
    numbered, held = list(enumerate(blocks)), [0] * processes
    parts: list[list[tuple[int, _Block]]] = [[] for _ in held]
    for place, block in sorted(numbered, key=lambda one: (-one[1].size, one[0])):
        process = held.index(min(held))
        parts[process].append((place, block))
        held[process] += block.size
    return [[block for _, block in sorted(part, key=lambda one: one[0])] for part in parts]
