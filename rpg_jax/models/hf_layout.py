"""The place of each parameter in a folder of Hugging Face safetensors: tensor names, shapes and permutations."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import abstract
from rpg_jax.storage.files import write_atomically

INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, str] = MappingProxyType({"float32": "F32", "bfloat16": "BF16", "float16": "F16"})
"""The names of dtypes in safetensors."""

Item = TypeVar("Item")
Array = Any  # NumPy's or JAX's
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one parameter is stored: one tensor for each index of its stacked axes (layer, expert).

    Attributes:
      path: the keys of the parameter in the params tree.
      shape: shape of the parameter; its first `stacked` axes are the stacked ones.
      name: name of a stored tensor, with a `{}` for each stacked index.
      groups: for each dimension of a stored tensor, the sizes of the parameter's dimensions that it flattens.
      order: parameter dimension i, counted after the stacked axes, is dimension order[i] of the ungrouped tensor.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: int
    name: str
    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of one stored tensor, without the stacked axes."""
        return tuple(math.prod(group) for group in self.groups)

    def tensors(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yields (index along the stacked axes, name) of every stored tensor; without stacked axes the index is ()."""
        for index in np.ndindex(*self.shape[: self.stacked]):
            yield index, self.name.format(*index)

    def read(self, index: Index, dtype, fetch: Callable[[str, Index], np.ndarray]) -> np.ndarray:
        """Returns the shard `index` (a slice for each dimension) of the parameter, as a NumPy array in `dtype`.
        `fetch(name, index)` returns the slice `index` of the stored tensor `name`."""
        bounds = [range(*s.indices(size)) for s, size in zip(index, self.shape, strict=True)]
        out = np.empty([len(b) for b in bounds], dtype)
        inner = [bounds[self.stacked :][self.order.index(i)] for i in range(len(self.order))]  # in stored order
        outer, rest = [], []
        for group in self.groups:
            # A slice of a group's first dimension is a slice of the stored dimension. Others are cut after the read.
            mine, inner = inner[: len(group)], inner[len(group) :]
            block = math.prod(group[1:])
            outer.append(slice(mine[0].start * block, mine[0].stop * block))
            rest += [(len(mine[0]), slice(None))] + [
                (size, slice(b.start, b.stop)) for size, b in zip(group[1:], mine[1:], strict=True)
            ]
        for at in np.ndindex(*out.shape[: self.stacked]):
            name = self.name.format(*(b[i] for b, i in zip(bounds, at, strict=False)))
            tensor = fetch(name, tuple(outer)).reshape([size for size, _ in rest])
            out[at] = tensor[tuple(s for _, s in rest)].transpose(self.order)
        return out

    def write(self, value: Array) -> Array:
        """Returns the stored tensors of the parameter `value`, a NumPy or JAX array: [*stacked axes, *tensor_shape].
        `value` may also be a part of it: some of the layers, or one layer without its axis."""
        lead = value.ndim - len(self.order)
        own = (lead + self.order.index(i) for i in range(len(self.order)))
        return value.transpose(*range(lead), *own).reshape(*value.shape[:lead], *self.tensor_shape)

    def restore(self, tensors: Array) -> Array:
        """Returns the parameter from all its stored tensors, a NumPy or JAX array [*stacked axes, *tensor_shape]."""
        lead = range(self.stacked)
        apart = tensors.reshape(*tensors.shape[: self.stacked], *(size for group in self.groups for size in group))
        return apart.transpose(*lead, *(self.stacked + i for i in self.order))

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns how the array [*stacked axes, *tensor_shape] is split if `spec` splits the parameter. A tensor's
        dimension is split only if `spec` splits none but the first of the parameter's dimensions that it flattens."""
        axes = tuple(spec) + (None,) * (len(self.shape) - len(spec))
        inner = [axes[self.stacked + self.order.index(i)] for i in range(len(self.order))]
        found: list[Any] = []
        for group in self.groups:
            mine, inner = inner[: len(group)], inner[len(group) :]
            found.append(mine[0] if not any(mine[1:]) else None)
        return PartitionSpec(*axes[: self.stacked], *found)


def layout(config: DecoderConfig, *, head: bool = False) -> list[Stored]:
    """Returns how every parameter of a model is stored, in the order of the params tree. With `head` a tied embedding
    is stored a second time, as the head, which comes last."""
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    expert = mlp + "experts.{}." if config.experts else mlp
    # The dimensions of the parameter that each dimension of the tensor flattens, without the stacked ones.
    plain, transposed, heads, biases = ((0,),), ((1,), (0,)), ((1, 2), (0,)), ((0, 1),)
    table: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
        "embed": ("model.embed_tokens.weight", ((0,), (1,))),
        "final_norm": ("model.norm.weight", plain),
        "lm_head": ("lm_head.weight", ((0,), (1,))),
        "layers/attention_norm": ("model.layers.{}.input_layernorm.weight", plain),
        "layers/mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", plain),
        "layers/attention/q": (attention + "q_proj.weight", heads),
        "layers/attention/k": (attention + "k_proj.weight", heads),
        "layers/attention/v": (attention + "v_proj.weight", heads),
        "layers/attention/o": (attention + "o_proj.weight", ((2,), (0, 1))),
        "layers/attention/q_bias": (attention + "q_proj.bias", biases),
        "layers/attention/k_bias": (attention + "k_proj.bias", biases),
        "layers/attention/v_bias": (attention + "v_proj.bias", biases),
        "layers/attention/q_norm": (attention + "q_norm.weight", plain),
        "layers/attention/k_norm": (attention + "k_norm.weight", plain),
        "layers/mlp/router": (mlp + "gate.weight", transposed),
        "layers/mlp/gate": (expert + "gate_proj.weight", transposed),
        "layers/mlp/up": (expert + "up_proj.weight", transposed),
        "layers/mlp/down": (expert + "down_proj.weight", transposed),
    }
    stored = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract(config)[1]):
        keys = tuple(entry.key for entry in path)
        name, dimensions = table["/".join(keys)]
        stacked, flat = name.count("{}"), [i for group in dimensions for i in group]
        groups = tuple(tuple(leaf.shape[stacked + i] for i in group) for group in dimensions)
        order = tuple(flat.index(i) for i in range(len(flat)))
        stored.append(Stored(keys, leaf.shape, stacked, name, groups, order))
    if head and config.tie_embeddings:
        [embed] = (entry for entry in stored if entry.path == ("embed",))
        stored.append(dataclasses.replace(embed, name=table["lm_head"][0]))
    return stored


def mismatch(found: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]]) -> str:
    """Returns a line on missing, extra and misshapen names if shapes `found` differ from `needed`; else ""."""
    misshapen = [f"{n} is {found[n]}, not {needed[n]}" for n in sorted(needed.keys() & found) if found[n] != needed[n]]
    faults = {"missing": sorted(needed.keys() - found), "extra": sorted(found.keys() - needed), "misshapen": misshapen}
    return "; ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in faults.items() if names)


def some(names: Sequence[str]) -> str:
    """Returns the first five names and the number of the others, with commas, as "a, b, c, d, e and 2 more"."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def in_files(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yields lists of consecutive items that share a file. The sum of their `size` is at most `limit`; an item above
    the limit is alone in its list."""
    held: list[Item] = []
    for item in items:
        if held and sum(map(size, held)) + size(item) > limit:
            yield held
            held = []
        held.append(item)
    if held:
        yield held


def file_names(count: int) -> list[str]:
    """Returns the names of `count` files of weights in a folder: model.safetensors for one, else numbered from 1."""
    several = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return several if count > 1 else ["model.safetensors"]


def write_index(folder: Path, owner: Mapping[str, str], size: int) -> None:
    """Writes the index of a folder's weights, model.safetensors.index.json, if `owner` names several files; for one
    file it deletes an earlier index. `owner` has the file name of each tensor; `size` is the sum of all their bytes."""
    if len(set(owner.values())) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    else:
        index = {"metadata": {"total_size": size}, "weight_map": owner}
        write_atomically(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
