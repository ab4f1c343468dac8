"""Adapters as a folder that the library peft loads: adapter_config.json and adapter_model.safetensors."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from rpg_jax.models.config import DecoderConfig
from rpg_jax.models.decoder import Params
from rpg_jax.models.hf_layout import Stored
from rpg_jax.models.hf_weights import Folder, check_tensors, place
from rpg_jax.models.lora import Lora, adapted_matrices
from rpg_jax.storage.json_files import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields that change what an adapter computes. It is W + (alpha / rank) A B with these values alone, the others off.
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_OFF = (
    *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication", "target_parameters"),
    *("exclude_modules", "trainable_token_indices", "alora_invocation_tokens", "arrow_config"),
)


def save_adapters(folder: Path | str, config: DecoderConfig, lora: Lora, adapters: Params, *, base: str | None) -> None:
    """Writes adapters in float32. With several processes, all must call it, and process 0 writes.

    Args:
      base: the name or folder of the base model, for `base_model_name_or_path`.
    """
    folder, leaves, held = Path(folder), flatten_dict(adapters), {}
    for entry in _layout(config, lora):
        for index, name in entry.tensors():
            part = leaves[entry.path][index]
            whole = part if part.is_fully_addressable else multihost_utils.process_allgather(part, tiled=True)
            held[name] = np.ascontiguousarray(entry.write(np.asarray(whole, np.float32)))  # safetensors ignores strides
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(held, folder / WEIGHTS, {"format": "pt"})
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
        (folder / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def load_adapters(
    folder: Path | str, config: DecoderConfig, lora: Lora, *, dtype=jnp.float32, shardings: Params | None = None
) -> Params:
    """Reads adapters of this model; each device reads its own shard only.

    Raises:
      ValueError: the folder has adapters of another kind, rank, alpha or targets, or of another model.
    """
    folder = Path(folder)
    _check(folder, config, lora)
    stored, default = _layout(config, lora), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = flatten_dict(shardings) if shardings is not None else {entry.path: default for entry in stored}
    with Folder(folder, WEIGHTS) as files:
        check_tensors(files, stored)
        return unflatten_dict({e.path: place(e, where[e.path], jnp.dtype(dtype), files) for e in stored})


def _layout(config: DecoderConfig, lora: Lora) -> list[Stored]:
    """How A and B of every adapted matrix are stored: lora_A [r, inputs] and lora_B [outputs, r]."""
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
    """The names of the adapted modules, as q_proj."""
    return sorted({entry.name.split(".")[-2] for entry in adapted_matrices(config, lora)})


def _check(folder: Path, config: DecoderConfig, lora: Lora) -> None:
    """Raises ValueError where the folder's adapters do not compute W + (alpha / rank) A B as `lora` says."""
    file = folder / CONFIG
    found: dict[str, Any] = read_object(file)
    unknown = [name for name, plain in _PLAIN.items() if found.get(name, plain) != plain]
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
    if not isinstance(targets, list) or sorted(targets) != _modules(config, lora):
        raise ValueError(
            f"{file} adapts {targets}, and model.lora.targets={lora.targets} means {_modules(config, lora)}: choose "
            "the targets that the folder has"
        )
