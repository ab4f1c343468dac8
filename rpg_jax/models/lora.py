"""LoRA (arXiv:2106.09685): a frozen matrix W becomes W + (alpha / rank) A B, of which A and B are trained.

Adapters are a tree of their own: {"layers": {"attention": {"q": {"a": A, "b": B}}}}, stacked over layers like the
matrices. Optimizer, checkpoints and the reference see this tree alone. `docs/lora.md` has the equations. A folder of
adapters is one that the library peft loads: adapter_config.json and adapter_model.safetensors.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import numpy as safetensors

from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import Params, logical_axes
from rpg_jax.models.hf_layout import Stored, layout
from rpg_jax.models.hf_loading import Folder, place_all
from rpg_jax.models.weights import Adapted, Int8
from rpg_jax.parallel import hosts
from rpg_jax.storage.files import read_object, write_atomically

_ATTENTION, _MLP = frozenset({"q", "k", "v", "o"}), frozenset({"gate", "up", "down"})
TARGETS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"attention": _ATTENTION, "feed-forward": _MLP, "experts": _MLP, "all": _ATTENTION | _MLP}
)
"""The matrices that get adapters, by the value of `model.lora.targets`."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The choice of adapters: for which matrices of a model, of which rank. Raises ValueError for a value out of range.

    Attributes:
      rank: r, the width of A and the height of B; at least 1.
      alpha: the adapter's product has the factor alpha / rank; above 0.
      targets: a name in `TARGETS`.
    """

    rank: int
    alpha: float
    targets: str = "all"

    def __post_init__(self):
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"an adapter needs rank >= 1 and alpha > 0, got {self.rank=}, {self.alpha=}")
        if self.targets not in TARGETS:
            raise ValueError(f"unknown lora.targets {self.targets!r}; known: {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """alpha / rank, the factor of the product A B."""
        return self.alpha / self.rank


def adapted_matrices(config: DecoderConfig, lora: Lora) -> list[Stored]:
    """Returns how the matrices that get adapters are stored, in the order of the params tree. A matrix has the shape
    [*stack, *inputs, *outputs] with `stacked` stack axes; `groups` is (sizes of the outputs, sizes of the inputs).
    Raises ValueError if the targets are "experts" in a dense model, or "feed-forward" in a mixture."""
    absent, instead = ("experts", "feed-forward") if config.experts is None else ("feed-forward", "experts")
    if lora.targets == absent:
        raise ValueError(f"model.lora.targets={absent!r}: this model has none; choose {instead}, attention or all")
    return [entry for entry in layout(config) if entry.path[-1] in TARGETS[lora.targets]]


def adapter_shapes(config: DecoderConfig, lora: Lora, dtype=jnp.float32) -> Params:
    """Returns the tree of the adapters, {"layers": {"attention": {"q": {"a": A, "b": B}}}}, with a `ShapeDtypeStruct`
    for every array: A [*stack, *inputs, r] and B [*stack, r, *outputs]. Raises ValueError as `adapted_matrices`."""
    return unflatten_dict({one.path: jax.ShapeDtypeStruct(one.shape, dtype) for one in _layout(config, lora)})


def adapter_axes(config: DecoderConfig, lora: Lora) -> Params:
    """Returns the tree of the adapters with a tuple of logical axes for every array: the axes of the matrix, and None
    for the rank, which is not split. Raises ValueError as `adapted_matrices`."""
    found, names = {}, flatten_dict(logical_axes(config))
    for entry in adapted_matrices(config, lora):
        axes, cut = names[entry.path], entry.stacked + len(entry.groups[1])
        found[*entry.path, "a"] = (*axes[:cut], None)
        found[*entry.path, "b"] = (*axes[: entry.stacked], None, *axes[cut:])
    return unflatten_dict(found)


def init_adapters(
    config: DecoderConfig, lora: Lora, *, seed: int = 0, dtype=jnp.float32, shardings: Params | None = None
) -> Params:
    """Draws the tree of adapters: A from U(-1/√n, 1/√n) for n inputs, as the library peft does, and B = 0. So the first
    policy is the base itself. The adapters depend on `seed`, `config`, `lora` and `dtype` only. They are drawn under
    `shardings`, a tree like theirs; None: on the default device. Raises ValueError as `adapted_matrices`."""

    def drawn(seed: jax.Array) -> Params:
        key, leaves = jax.random.key(seed), flatten_dict(adapter_shapes(config, lora, dtype))
        for i, entry in enumerate(adapted_matrices(config, lora)):
            a, b = leaves[*entry.path, "a"], leaves[*entry.path, "b"]
            fan_in = math.prod(entry.groups[1])
            uniform = jax.random.uniform(jax.random.fold_in(key, i), a.shape, dtype, -1.0, 1.0)
            leaves[*entry.path, "a"] = uniform * fan_in**-0.5
            leaves[*entry.path, "b"] = jnp.zeros(b.shape, b.dtype)
        return unflatten_dict(leaves)

    return jax.jit(drawn, out_shardings=shardings)(seed)


@flax.struct.dataclass
class Base:
    """The frozen weights of a model, its params, and `scale`, the factor alpha / rank of its adapters."""

    weights: Params
    scale: float = flax.struct.field(pytree_node=False)

    def policy(self, adapters: Params) -> Params:
        """Returns the model's params with unscaled `adapters`: an `Adapted` in place of every matrix that has one."""
        return attached(self.weights, scaled(adapters, self.scale))


def policy_params(base: Base | None, trained: Params) -> Params:
    """Returns the model's params: `trained` itself if `base` is None, else `base` with the adapters `trained`."""
    return trained if base is None else base.policy(trained)


def scaled(adapters: Params, scale: float) -> Params:
    """Returns the tree of adapters with the factor `scale`, which is alpha / rank, on every B. A stays."""
    leaves = {path: x * scale if path[-1] == "b" else x for path, x in flatten_dict(adapters).items()}
    return unflatten_dict(leaves)


def attached(weights: Params, adapters: Params) -> Params:
    """Returns `weights` with an `Adapted` for each matrix that has an adapter. `adapters` are a result of `scaled`."""
    own, found = flatten_dict(adapters), flatten_dict(weights)
    for path in {path[:-1] for path in own}:
        found[path] = Adapted(found[path], own[*path, "a"], own[*path, "b"])
    return unflatten_dict(found)


def merged(params: Params) -> Params:
    """Returns `params` as arrays: an `Adapted` becomes W + A B in W's dtype, rounded once; an `Int8` values · scale."""

    def leaf(x: Any) -> Any:
        return x.merged() if isinstance(x, Adapted) else x[...]

    return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, Adapted | Int8))


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields that change what an adapter computes: W + (alpha / rank) A B if `_PLAIN` has these values and `_OFF` are off,
# and the adapters began in a way of `_BEGUN`; others, as PiSSA, also change W.
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_OFF = (
    *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication", "target_parameters"),
    *("exclude_modules", "trainable_token_indices", "alora_invocation_tokens", "arrow_config"),
)
_BEGUN = (None, True, False, "gaussian", "orthogonal", "eva")


def save_adapters(folder: Path | str, config: DecoderConfig, lora: Lora, adapters: Params, *, base: str | None) -> None:
    """Writes adapters (unscaled) in float32 into a folder that the library peft reads: adapter_model.safetensors, then
    adapter_config.json. A collective: all processes must call it. Process 0 makes the folder, writes, and may raise
    OSError; the others do not wait. `base` is the field `base_model_name_or_path`: a name, a folder or None."""
    folder, leaves, held = Path(folder), flatten_dict(adapters), {}
    for entry in _layout(config, lora):
        for index, name in entry.tensors():
            whole = hosts.gathered(leaves[entry.path][index])
            held[name] = np.ascontiguousarray(entry.write(np.asarray(whole, np.float32)))  # safetensors ignores strides
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / WEIGHTS, safetensors.save(held, {"format": "pt"}))
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": _modules(config, lora),
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
            "bias": "none",
            "fan_in_fan_out": False,
        }
        write_atomically(folder / CONFIG, json.dumps(fields, indent=2, sort_keys=True) + "\n")


def load_adapters(
    folder: Path | str, config: DecoderConfig, lora: Lora, *, dtype=jnp.float32, shardings: Params | None = None
) -> Params:
    """Reads the tree of (unscaled) adapters in a folder of the library peft, in `dtype`. Each device reads its own
    shard only. `shardings` is a tree like the adapters; None: all on the first local device. Raises ValueError if a
    file is missing or damaged, a number is not finite, or the folder has adapters of another kind, rank, alpha, targets
    or model."""
    folder = Path(folder)
    _check(folder, config, lora)
    with Folder(folder, WEIGHTS) as files:
        return place_all(files, _layout(config, lora), dtype, shardings)


def _layout(config: DecoderConfig, lora: Lora) -> list[Stored]:
    """Returns how A and B of every adapted matrix are stored: lora_A [r, inputs] and lora_B [outputs, r]."""
    found = []
    for entry in adapted_matrices(config, lora):
        (outputs, inputs), lead, rank = entry.groups, entry.shape[: entry.stacked], (lora.rank,)
        name, n, m = _PREFIX + entry.name.removesuffix("weight"), len(inputs), len(outputs)
        a, b = ((*entry.path, side) for side in "ab")
        sizes, k = ((*lead, *inputs, *rank), (*lead, *rank, *outputs)), entry.stacked
        found.append(Stored(a, sizes[0], k, f"{name}lora_A.weight", (rank, inputs), (*range(1, n + 1), 0)))
        found.append(Stored(b, sizes[1], k, f"{name}lora_B.weight", (outputs, rank), (m, *range(m))))
    return found


def _modules(config: DecoderConfig, lora: Lora) -> list[str]:
    """Returns the names of the adapted modules, as q_proj, sorted."""
    return sorted({entry.name.split(".")[-2] for entry in adapted_matrices(config, lora)})


def _check(folder: Path, config: DecoderConfig, lora: Lora) -> None:
    """Raises ValueError unless the folder's adapters compute W + (alpha / rank) A B, with the values of `lora`."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"{folder} has no {CONFIG}: model.lora.path is the folder of an adapter, written by peft")
    found: dict[str, Any] = read_object(file)
    unknown = [name for name, plain in _PLAIN.items() if found.get(name, plain) != plain]
    unknown += ["init_lora_weights"] * (found.get("init_lora_weights") not in _BEGUN)
    if unknown := unknown + [name for name in _OFF if found.get(name)]:
        raise ValueError(
            f"{file}: {', '.join(f'{name}={found[name]!r}' for name in unknown)} cannot be read; merge this adapter "
            "into its base with peft, and start from the merged weights"
        )
    targets = found.get("target_modules")
    theirs = {"rank": found.get("r"), "alpha": found.get("lora_alpha")}
    own = {"rank": lora.rank, "alpha": lora.alpha}
    if differing := [f"{name} {theirs[name]}, here {own[name]:g}" for name in own if theirs[name] != own[name]]:
        raise ValueError(f"{file} has {' and '.join(differing)}: set model.lora.rank and model.lora.alpha to its own")
    if not isinstance(targets, list) or sorted(map(str, targets)) != _modules(config, lora):
        raise ValueError(
            f"{file} adapts {targets}, and model.lora.targets={lora.targets} means {_modules(config, lora)}: choose "
            "the targets that the folder has"
        )
