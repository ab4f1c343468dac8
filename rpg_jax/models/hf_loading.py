"""Reads weights in Hugging Face layout, without pickles or a conversion step: shard by shard, or whole at once."""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  numpy learns the name "bfloat16", which safetensors asks it for
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open

from rpg_jax import storage
from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import Params
from rpg_jax.models.hf_layout import DTYPES, INDEX, Index, Stored, layout, mismatch, some
from rpg_jax.storage.files import read_object

_DTYPES = {name: np.dtype(dtype) for dtype, name in DTYPES.items()}
_READERS = 16  # threads


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes are: a file, its descriptor, the place of the first byte, and the dtype in safetensors."""

    path: Path
    file: int
    start: int
    dtype: str

    def read(self, into: np.ndarray) -> None:
        """Fills the contiguous array `into` with the bytes. Raises ValueError if the file ends before them."""
        left, place = into.reshape(-1).view(np.uint8).data, self.start
        while left:
            got = os.preadv(self.file, [left], place)
            if not got:
                raise ValueError(f"{self.path} is damaged: it was cut short while it was read")
            left, place = left[got:], place + got


class Folder(contextlib.ExitStack):
    """Opens the safetensors of a folder, to read slices of tensors. A context, which closes the files. The files are
    those that the folder's index names. Without an index, or with another `single` than the default, the only file is
    `single`. Raises ValueError if a file is missing, a file or the index is damaged, or a tensor has another dtype than
    float32, bfloat16 and float16."""

    def __init__(self, path: Path | str, single: str = "model.safetensors"):
        super().__init__()
        self.path = Path(path)
        index = self.path / INDEX
        names = _named_in(index) if index.is_file() and single == "model.safetensors" else [single]
        absent = [name for name in names if not (self.path / name).is_file()]
        if absent:
            raise ValueError(f"{self.path} lacks the weight files {some(absent)} (only safetensors are read)")
        self._names, self._files = names, dict[str, Any]()
        for name in names:
            try:
                file = self.enter_context(safe_open(self.path / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / name} is damaged: {error}. Copy it again from where it came") from error
            dtypes = {tensor: file.get_slice(tensor).get_dtype() for tensor in file.keys()}  # noqa: SIM118 - no mapping
            if wrong := next((item for item in dtypes.items() if item[1] not in _DTYPES), None):
                raise ValueError(f"{self.path / name} has {wrong[0]} as {wrong[1]}; known: {', '.join(_DTYPES)}")
            self._files |= dict.fromkeys(dtypes, file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor, by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def places(self) -> dict[str, _Place]:
        """Returns where every tensor's bytes are, by name; to be read while the folder is open."""
        found = {}
        for path in (self.path / name for name in self._names):
            file = os.open(path, os.O_RDONLY)
            self.callback(os.close, file)
            size = int.from_bytes(os.pread(file, 8, 0), "little")
            head = json.loads(os.pread(file, size, 8))  # `safe_open` has checked it
            head.pop("__metadata__", None)
            for name, own in head.items():
                found[name] = _Place(path, file, 8 + size + own["data_offsets"][0], own["dtype"])
        return found

    def fetch(self, name: str, index: Index) -> np.ndarray:
        """Returns the slice `index` of the tensor `name`, in its stored dtype. Only the bytes of the slice are read.
        Raises KeyError if there is no such tensor."""
        return self._files[name].get_slice(name)[index]


def load(
    folder: Path | str, config: DecoderConfig, *, param_dtype=jnp.float32, shardings: Params | None = None
) -> Params:
    """Loads the parameters of `config` from a folder of safetensors; each device reads its own shard only.

    Host memory holds this host's shards of one (stacked) parameter at a time. Numbers are cast to `param_dtype` as they
    are read. `shardings` is a tree like the params; None puts everything on the first local device. If `shardings`
    spans processes, all processes must call `load`: a program on the devices checks that the numbers are finite.

    Raises ValueError if a file is missing or damaged; if tensors are missing, extra, of another shape or not finite; or
    if a tied model has a head that differs from its embedding. The message names them.
    """
    with Folder(folder) as files:
        return place_all(files, layout(config), param_dtype, shardings, head_is_tied=config.tie_embeddings)


@dataclasses.dataclass(frozen=True)
class InHostMemory:
    """The weights of a folder in host memory, in the dtype and order of their files, as `read` makes them.

    Attributes:
      tensors: for each parameter, by its path in the params, one array [*stacked axes, *tensor_shape] of its tensors.
      entries: how each parameter is stored.
    """

    tensors: Mapping[tuple[str, ...], np.ndarray]
    entries: list[Stored]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(array.nbytes for array in self.tensors.values())

    def placed(self, param_dtype: Any, shardings: Params) -> Params:
        """Returns the params on devices, a nested dict in `param_dtype` and under `shardings`, a tree like the params,
        when all are there. For the cast, a device holds one parameter's shard twice. NaN and infinity are no error."""
        where, found = flatten_dict(shardings), {}
        for entry in self.entries:
            sharding = where[entry.path]
            stored = sharding
            if isinstance(sharding, jax.sharding.NamedSharding):
                stored = jax.sharding.NamedSharding(sharding.mesh, entry.spec(sharding.spec))
            tensors = jax.device_put(self.tensors[entry.path], stored)
            placed = _restored(sharding)(tensors, entry=entry, dtype=jnp.dtype(param_dtype))
            found[entry.path] = jax.block_until_ready(placed)
        return unflatten_dict(found)


def read(folder: Path | str, config: DecoderConfig) -> InHostMemory:
    """Reads the whole folder into host memory, many tensors at a time, without a program on a device. Raises OSError if
    a read fails, and ValueError if a file is missing or damaged; if tensors are missing, extra or of another shape; if
    a tied model has a head that differs from its embedding; if the layers of a parameter have different dtypes; or if a
    dtype is not float32, bfloat16 or float16."""
    entries = layout(config)
    with Folder(folder) as files, ThreadPoolExecutor(_READERS) as pool:
        _check_tensors(files, entries, head_is_tied=config.tie_embeddings)
        places, found = files.places(), {}
        for entry in entries:
            dtypes = {places[name].dtype for _, name in entry.tensors()}
            if len(dtypes) > 1:
                raise ValueError(f"{files.path} has {entry.name} as {' and '.join(sorted(dtypes))}: export it anew")
            array = np.empty(entry.shape[: entry.stacked] + entry.tensor_shape, _DTYPES[dtypes.pop()])
            found[entry.path] = array
        reads = [
            pool.submit(places[name].read, found[entry.path][index])
            for entry in entries
            for index, name in entry.tensors()
        ]
        for one in reads:
            one.result()
    return InHostMemory(found, entries)


@functools.cache
def _restored(sharding: jax.sharding.Sharding) -> Any:
    def restored(tensors: jax.Array, *, entry: Stored, dtype: Any) -> jax.Array:
        return entry.restore(tensors).astype(dtype)

    return jax.jit(restored, static_argnames=("entry", "dtype"), out_shardings=sharding)


def _named_in(index: Path) -> list[str]:
    """Returns the files that an index names. Raises ValueError if `index` is damaged or names other folders' files."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ValueError(f"{index} is damaged: its weight_map does not name files of this folder")
    return sorted(set(names.values()))


def _check_tensors(files: Folder, stored: list[Stored], *, head_is_tied: bool = False) -> None:
    """Raises ValueError unless a folder has the tensors of `stored` alone. A tied model may have an equal head, too."""
    computed = ".rotary_emb.inv_freq"  # by `rope_theta`; folders of before August 2023 have it
    found = {name: shape for name, shape in files.shapes().items() if not name.endswith(computed)}
    needed = {name: entry.tensor_shape for entry in stored for _, name in entry.tensors()}
    head, embed, whole = "lm_head.weight", "model.embed_tokens.weight", (slice(None), slice(None))
    if head_is_tied and head in found:
        if found[head] != found.get(embed) or not np.array_equal(files.fetch(head, whole), files.fetch(embed, whole)):
            raise ValueError(f"config.json of {files.path} ties the embeddings, but {head} differs from {embed}")
        del found[head]
    if told := mismatch(found, needed):
        raise ValueError(f"the tensors of {files.path} do not match its config: {told}")


def place_all(
    files: Folder, stored: list[Stored], dtype, shardings: Params | None, *, head_is_tied: bool = False
) -> Params:
    """Returns the `stored` parameters in `dtype` on the devices, a nested dict by their paths; each device reads its
    own shard only. `shardings` is such a dict too; None: all on the first local device. With `head_is_tied` the output
    head is the embedding, and the files have no head or an equal head. Raises ValueError unless the files have the
    tensors of `stored` alone, in their shapes, and all numbers are finite."""
    _check_tensors(files, stored, head_is_tied=head_is_tied)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = flatten_dict(shardings) if shardings is not None else {entry.path: default for entry in stored}
    found = {}
    for entry in stored:
        read = functools.partial(entry.read, dtype=jnp.dtype(dtype), fetch=files.fetch)
        placed = jax.make_array_from_callback(entry.shape, where[entry.path], read, jnp.dtype(dtype))
        found[entry.path] = jax.block_until_ready(placed)
    if wrong := [".".join(path) for path, x in found.items() if not _finite(x)]:
        raise ValueError(
            f"{files.path} has weights that are not finite, in {some(wrong)}. Copy it again from where it came"
        )
    return unflatten_dict(found)


@jax.jit
def _finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))


_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")  # config, tokenizer, chat template
_WEIGHTS = ("*.safetensors",)  # never *.bin and *.pt, which are pickles: loading one executes it
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_folder(address: str | Path, *, weights: bool = True) -> Path:
    """Returns the folder in Hugging Face layout at `address`: a local folder itself, or a copy in a cache of this host.

    Args:
      address: a local FILE.gguf, which is converted once; gs://BUCKET/FOLDER; a local folder; configs/NAME, a model
        that comes with the code; or OWNER/NAME on the hub. A local folder with the address comes first. An address in
        no other form is returned as a local folder, which need not exist.
      weights: False fetches only config and tokenizer.

    Raises:
      ValueError: the address is of another kind, or the bucket, the hub or the GGUF file does not provide a model.
      StorageFailure: the bucket cannot be read, after retries.
      OSError: the weights of a GGUF file cannot be read or written.
    """
    text, wanted = str(address), _DESCRIPTION + _WEIGHTS * weights
    if text.endswith(".gguf"):
        if storage.in_bucket(text) or not Path(address).is_file():
            raise ValueError(f"there is no local file {text}: copy the GGUF file to this machine first")
        from rpg_jax.models import gguf_files  # the tokenizers and converters, which few runs need

        return gguf_files.kept_folder(Path(address), weights=weights)
    if storage.in_bucket(text):
        return storage.local_copy(text, wanted)
    if not Path(address).exists() and (shipped := _shipped(text)):
        return shipped
    if Path(address).exists() or not _ON_HUB.fullmatch(text):
        storage.local(address)
        return Path(address)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(text, allow_patterns=list(wanted), ignore_patterns=["*/*"]))
    except Exception as error:  # the hub client and its transport raise errors of many kinds
        raise ValueError(
            f"{text} is not a local folder, and the hub did not provide it: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}. Fetch it where there is a network: hf download {text} "
            f"--local-dir {text.rpartition('/')[2].lower()}"
        ) from error


def _shipped(address: str) -> Path | None:
    """Returns the folder of a small model that comes with the code, as configs/NAME; None if there is no such model."""
    package = Path(__file__).resolve().parents[1]
    found = (home / address for home in (package.parent, package) if address.startswith("configs/"))
    return next((folder for folder in found if (folder / "config.json").exists()), None)
