"""Reads and writes weights in Hugging Face layout, shard by shard, without pickles or a conversion step."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  numpy learns the name "bfloat16", which safetensors asks it for
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rpg_jax.models.config import QwenConfig
from rpg_jax.models.hf_config import write_config
from rpg_jax.models.hf_layout import Index, Stored, layout
from rpg_jax.models.qwen import Params
from rpg_jax.storage.json_files import read_object

_INDEX = "model.safetensors.index.json"
_ROWS = 4096  # rows compared at a time


class Folder(contextlib.ExitStack):
    """The safetensors of a folder, the file `single` or as many as an index names, read slice by slice."""

    def __init__(self, path: Path | str, single: str = "model.safetensors"):
        super().__init__()
        self.path = Path(path)
        index = self.path / _INDEX
        names = _named_in(index) if index.is_file() and single == "model.safetensors" else [single]
        absent = [name for name in names if not (self.path / name).is_file()]
        if absent:
            raise ValueError(f"{self.path} lacks the weight files {_some(absent)} (only safetensors are read)")
        self._files: dict[str, Any] = {}
        for name in names:
            try:
                file = self.enter_context(safe_open(self.path / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / name} is damaged: {error}. Copy it again from where it came") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor; nothing else of it is read."""
        return self._files[name].get_slice(name)[index]


def load(folder: Path | str, config: QwenConfig, *, param_dtype=jnp.float32, shardings: Params | None = None) -> Params:
    """Loads the parameters of `config` from a folder of safetensors; each device reads its own shard only.

    Host memory holds one shard of one (stacked) parameter at a time. Floats are cast to `param_dtype` as they are read.
    `shardings` is a tree like the params; None puts everything on the default device.

    Raises:
      ValueError: tensors are missing from the folder, or extra, or of another shape; the message names them.
    """
    stored, default = layout(config), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = flatten_dict(shardings) if shardings is not None else {entry.path: default for entry in stored}
    with Folder(folder) as files:
        check_tensors(files, stored, head_is_tied=config.tie_embeddings)
        placed = {e.path: place(e, where[e.path], jnp.dtype(param_dtype), files) for e in stored}
    return unflatten_dict(placed)


def save(
    folder: Path | str,
    config: QwenConfig,
    params: Params,
    *,
    dtype=None,
    base: Path | str | None = None,
    fields: Mapping[str, Any] | None = None,
    max_file_bytes: int = 2 * 2**30,
) -> None:
    """Writes a folder that transformers loads: safetensors in files of at most `max_file_bytes`, index, config.json.

    Host memory holds one file at a time. With several processes, all must call it, and process 0 writes. The params may
    be NumPy's.

    Args:
      dtype: dtype of the weights; None keeps that of the params.
      base: folder whose other config fields are taken over.
      fields: further fields of config.json, such as token ids.
    """
    folder, dtype = Path(folder), jnp.dtype(dtype or jax.tree.leaves(params)[0].dtype)
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    stored = [(entry, index, name) for entry in layout(config) for index, name in entry.tensors()]
    sizes = [np.prod(entry.tensor_shape, dtype=np.int64) * dtype.itemsize for entry, *_ in stored]
    file_of = _assign(sizes, max_file_bytes)
    total = max(file_of) + 1
    files = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    if total == 1:
        files = ["model.safetensors"]
    held: dict[str, np.ndarray] = {}
    leaves = flatten_dict(params)
    for i, (entry, index, name) in enumerate(stored):
        part = leaves[entry.path][index] if index else leaves[entry.path]
        here = isinstance(part, np.ndarray) or part.is_fully_addressable
        host = np.asarray(part) if here else multihost_utils.process_allgather(part, tiled=True)
        held[name] = entry.write(host.astype(dtype))
        if i + 1 == len(stored) or file_of[i + 1] != file_of[i]:
            if writes:
                save_file(held, folder / files[file_of[i]], {"format": "pt"})
            held = {}
    if not writes:
        return
    if total > 1:
        weight_map = {name: files[i] for (*_, name), i in zip(stored, file_of, strict=True)}
        record = {"metadata": {"total_size": int(sum(sizes))}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    kept = {}
    if base is not None:
        kept = read_object(Path(base) / "config.json")
    written = write_config(config, dtype.name, kept | dict(fields or {}))
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def _named_in(index: Path) -> list[str]:
    """The files that an index names. Raises ValueError if it is none, or names a file outside its folder."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ValueError(f"{index} is damaged: its weight_map does not name files of this folder")
    return sorted(set(names.values()))


def check_tensors(files: Folder, stored: list[Stored], *, head_is_tied: bool = False) -> None:
    """Raises ValueError unless a folder has the tensors of `stored`, and no others but the head of a tied model."""
    found = files.shapes()
    needed = {name: entry.tensor_shape for entry in stored for _, name in entry.tensors()}
    if head_is_tied and "lm_head.weight" in found:
        _check_tied(files, found)
        del found["lm_head.weight"]
    missing, extra = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    misshapen = [f"{n} is {found[n]}, not {needed[n]}" for n in sorted(needed.keys() & found) if found[n] != needed[n]]
    faults = [("missing", missing), ("extra", extra), ("misshapen", misshapen)]
    if any(names for _, names in faults):
        told = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in faults if names)
        raise ValueError(f"the tensors of {files.path} do not match its config: {told}")


def _check_tied(files: Folder, found: dict[str, tuple[int, ...]]) -> None:
    """Refuses a stored head that differs from the embedding; a tied model may store an equal one."""
    head, embed = "lm_head.weight", "model.embed_tokens.weight"
    same = found[head] == found.get(embed)
    for start in range(0, found[head][0] if same else 0, _ROWS):
        rows = (slice(start, min(start + _ROWS, found[head][0])), slice(None))
        same = same and np.array_equal(files.fetch(head, rows), files.fetch(embed, rows))
    if not same:
        raise ValueError(f"config.json of {files.path} ties the embeddings, but {head} differs from {embed}")


def place(entry: Stored, sharding: jax.sharding.Sharding, dtype, files: Folder) -> jax.Array:
    """The parameter under `sharding`; each distinct shard is read once and dropped before the next."""
    devices: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(entry.shape).items():
        spans = tuple(s.indices(size) for s, size in zip(index or (), entry.shape, strict=True))
        devices.setdefault(spans, []).append(device)
    shards = []
    for spans, owners in devices.items():
        block = entry.read(tuple(slice(*span) for span in spans), dtype, files.fetch)
        shards += jax.block_until_ready([jax.device_put(block, device) for device in owners])
    return jax.make_array_from_single_device_arrays(entry.shape, sharding, shards)


def _assign(sizes: list[int], limit: int) -> list[int]:
    """The file number of each tensor: consecutive tensors share a file of at most `limit` bytes, if they fit in one."""
    numbers, used, number = [], 0, 0
    for size in sizes:
        if used and used + size > limit:
            used, number = 0, number + 1
        used += size
        numbers.append(number)
    return numbers


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
