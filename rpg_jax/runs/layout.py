"""The layout of a config's model on devices. To make a layout takes neither data nor weights."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from rpg_jax import data, models, parallel, rollout
from rpg_jax.models.lora import adapter_axes, adapter_shapes
from rpg_jax.models.weights import quantized, quantized_shardings
from rpg_jax.training.state import abstract, shardings_of


@dataclasses.dataclass(frozen=True)
class Layout:
    """A config's model on the devices that train, and the devices that decode.

    Attributes:
      config: the resolved config.
      mesh: the mesh of the devices that train.
      rules: map logical axes to axes of `mesh`.
      model, graphdef: the model's dimensions, and its Flax graphdef.
      weights: nested dict of the model's weights, without adapters: a `ShapeDtypeStruct` with a sharding on `mesh` for
        each array.
      adapters: the same of the adapters; None if the run trains all weights.
      decoding_devices: the devices that decode together. They are all devices of `mesh`, the devices of one host, or
        devices that do not train.
      decoding_hosts: the number of hosts that decode by themselves, each a part of the prompts.
      device_memory: bytes of a device that programs can use; None if it is not known, as on a CPU.
      trains: whether an optimizer's state and a reference are beside the weights.
    """

    config: ConfigDict
    mesh: Mesh
    rules: parallel.Rules
    model: models.DecoderConfig
    graphdef: Any
    weights: Any
    decoding_devices: Sequence[jax.Device]
    decoding_hosts: int
    device_memory: float | None = None
    adapters: Any = None
    trains: bool = True

    def activate(self) -> contextlib.AbstractContextManager:
        """A context in which JAX traces programs for this mesh and these rules."""
        return parallel.activate(self.mesh, self.rules)

    @property
    def lora(self) -> models.Lora | None:
        """Rank, alpha and targets of the config's adapters; None if all weights are trained."""
        c = self.config.model.lora
        return models.Lora(c.rank, c.alpha, c.targets) if c.rank else None

    @property
    def trained(self) -> Any:
        """The trained arrays (adapters, else all weights), a nested dict like `weights`."""
        return self.weights if self.adapters is None else self.adapters

    @property
    def base(self) -> models.Base | None:
        """The frozen weights beside adapters, like `weights`, in 8 bits if the config says so. None if all weights are
        trained."""
        if self.lora is None:
            return None
        return models.Base(in_8_bits(self.weights) if self.config.model.lora.int8 else self.weights, self.lora.scale)

    def without_adapters(self, *, dtype: str, model: models.DecoderConfig | None = None) -> Layout:
        """A layout on the same mesh, of the same model (None) or of another `model`, without adapters: all weights may
        be trained, and they have the dtype named `dtype`. The config is a changed copy."""
        config = self.config.copy_and_resolve_references()
        config.model.lora.rank, config.model.param_dtype = 0, dtype
        model = model or self.model
        graphdef, shapes = abstract_model(config, model)
        weights = abstract(shapes, parallel.shardings(models.logical_axes(model), shapes, self.mesh, self.rules))
        own: dict[str, Any] = {"config": config, "model": model, "graphdef": graphdef}
        return dataclasses.replace(self, **own, weights=weights, adapters=None)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding with which every device of the mesh has the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def row_sharding(self) -> NamedSharding:
        """The sharding that spreads the first axis of an array, the rows of a batch, over the data axes of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(self.rules["batch"]))


def make_layout(
    config: ConfigDict,
    vocab_size: int | None,
    devices: Sequence[jax.Device] | None = None,
    host: Sequence[jax.Device] | None = None,
    device_memory: float | None = None,
) -> Layout:
    """Makes the layout of a resolved config. Makes no arrays, and reads the dimensions of a model, but no weights.

    Args:
      vocab_size: entries of the vocabulary; read only if the config gives the model's dimensions.
      devices: the devices that train and decode; None: all devices.
      host: the devices of one host; None: those among `devices` that this process has.
      device_memory: bytes of a device. None: what this process's first device says, or unknown if `host` is given.

    Raises ValueError if the mesh does not cover the devices that train, or model, sharding or `rollout.devices` do not
    fit; and as `model_config`.
    """
    model = model_config(config, vocab_size)
    devices = list(jax.devices() if devices is None else devices)
    training, decoding = _parts(devices, config.rollout.devices)
    try:
        mesh = parallel.make_mesh(config.mesh.to_dict(), training)
    except ValueError as error:
        only = f"; rollout.devices={len(decoding)} more devices only sample" if decoding else ""
        raise ValueError(f"{error}{only}") from error
    rules = parallel.parse_rules(config.sharding)
    graphdef, shapes = abstract_model(config, model)
    weights = abstract(shapes, parallel.shardings(models.logical_axes(model), shapes, mesh, rules))
    if host is None:
        host = sorted((d for d in devices if d.process_index == jax.process_index()), key=lambda d: d.id)
        device_memory = device_memory or (host[0].memory_stats() or {}).get("bytes_limit")
    hosts = 1 if rollout.find_driver(config.rollout.driver).spans_hosts else len(devices) // len(host)
    decoding = decoding or list(mesh.devices.flat if hosts == 1 else host)
    whole = Layout(config, mesh, rules, model, graphdef, weights, decoding, hosts, device_memory)
    if (lora := whole.lora) is None:
        return whole
    own = adapter_shapes(model, lora, jnp.dtype(config.model.param_dtype))
    where = parallel.shardings(adapter_axes(model, lora), own, mesh, rules)
    return dataclasses.replace(whole, adapters=abstract(own, where))


def in_8_bits(weights: Any) -> Any:
    """The `ShapeDtypeStruct`s with shardings of `quantized(weights)`. `weights` is such a tree too."""
    return abstract(jax.eval_shape(quantized, weights), quantized_shardings(shardings_of(weights), weights))


def abstract_model(config: ConfigDict, model: models.DecoderConfig) -> tuple[Any, Any]:
    """(the Flax graphdef of `model` with the config's compute dtype and remat policy, a nested dict of the weights as
    `ShapeDtypeStruct`s). The weights have `model.param_dtype`, or the compute dtype if the config has adapters."""
    m = config.model
    compute_dtype = jnp.dtype(m.compute_dtype)
    dtype = compute_dtype if m.lora.rank else jnp.dtype(m.param_dtype)
    return models.abstract(model, dtype, compute_dtype=compute_dtype, remat=m.remat)


def model_config(config: ConfigDict, vocab_size: int | None) -> models.DecoderConfig:
    """The dimensions of the model of `model.path`, else of the size `model.size`, else the config's own dimensions with
    `vocab_size` entries in the vocabulary. Only the config's own dimensions need `vocab_size`. Raises ValueError if the
    model is missing or not supported, or a needed number is not set; StorageFailure if a bucket cannot be read."""
    m = config.model
    if m.path:
        return models.read_config(models.local_folder(m.path, weights=False))
    if m.size:
        return models.size(m.size)
    dimensions = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "hidden_dim")
    unset = [name for name in dimensions if m[name] is None]
    if unset or vocab_size is None:
        raise ValueError(
            f"which model? Set model.path, model.size, or all dimensions (model.{(unset or ['tokenizer'])[0]} is not "
            f"set among {', '.join(dimensions)})"
        )
    optional = {} if m.tie_embeddings is None else {"tie_embeddings": m.tie_embeddings}
    if m.rope_theta is not None:
        optional["rope"] = models.Rope(m.rope_theta)
    return models.DecoderConfig(vocab_size=vocab_size, **{name: m[name] for name in dimensions}, **optional)


def row_shape(config: ConfigDict) -> data.RowShape:
    """The shape of every micro-batch that the trainer sees; `shared` is False. Without `train.microbatch_size` a
    micro-batch has as many rows as a mini-batch has completions."""
    c = config
    rows = c.train.microbatch_size or rows_per_update(c)
    if c.train.packed_length:
        return data.RowShape(rows, c.train.packed_length, c.train.packed_length, packed=True)
    return data.RowShape(rows, c.task.max_prompt_tokens + c.rollout.max_tokens, c.rollout.max_tokens)


def packing_shape(layout: Layout) -> data.RowShape:
    """The shape of every micro-batch as `row_shape` gives it, but `shared` is True if rows are packed, except on TPUs.
    Raises ValueError if the rows cannot be spread evenly over the data axes of the mesh."""
    shape = row_shape(layout.config)
    ways = parallel.shards("batch", layout.mesh.shape, layout.rules)
    if shape.rows % ways:
        raise ValueError(
            f"a micro-batch of {shape.rows} rows cannot be spread over {ways} devices: set train.microbatch_size to a "
            f"multiple of {ways}, or mesh.fsdp to a divisor of {shape.rows}"
        )
    return shape._replace(shared=shape.packed and shares_prompts(layout))


def shares_prompts(layout: Layout) -> bool:
    """Whether completions of a packed row may share a prompt. On TPUs the attention kernel cannot do that."""
    [device, *_] = layout.mesh.devices.flat
    return device.platform != "tpu"


def rows_per_update(config: ConfigDict) -> int:
    """The number of completions of a mini-batch. A mini-batch makes one optimizer update."""
    return config.rollout.prompts_per_step // config.train.updates_per_step * config.rollout.group_size


def teacher_folder(config: ConfigDict) -> str | None:
    """The folder or hub address of a teacher whose weights the run reads (`reference.path`); None: no such teacher."""
    path = config.reference.path
    return path if path and not path.startswith(("http://", "https://")) else None


def reference_layout(layout: Layout) -> Layout:
    """The layout of the reference policy: a teacher's in the compute dtype, or `layout` if the run reads no teacher.

    A teacher is the model of `reference.path`, which anchors the KL term and is never trained. The teacher may have
    another family and other widths, and lies on the policy's mesh. Its vocabulary is cut to the entries that the policy
    has: published models of one tokenizer differ in the number of entries that no token has.

    Raises ValueError if the teacher is missing or not supported, has fewer entries than the policy, or too short a
    context for a prompt with its completion; StorageFailure if a bucket cannot be read."""
    if not (path := teacher_folder(layout.config)):
        return layout
    config, own = layout.config, models.read_config(models.local_folder(path, weights=False))
    wanted, given = layout.model.vocab_size, own.vocab_size
    if given < wanted:
        raise ValueError(
            f"reference.path={path} has {given} entries in its vocabulary, and the policy has {wanted}: the KL of an "
            "entry that only the policy has is infinite; choose a teacher with the policy's vocabulary"
        )
    longest = config.task.max_prompt_tokens + config.rollout.max_tokens
    if longest > own.rope.max_position_embeddings:
        raise ValueError(
            f"reference.path={path} has positions for {own.rope.max_position_embeddings} tokens, and a prompt with its "
            f"completion may have {longest}: lower task.max_prompt_tokens or rollout.max_tokens"
        )
    model = dataclasses.replace(own, vocab_size=wanted)
    return layout.without_adapters(dtype=config.model.compute_dtype, model=model)


def _parts(devices: list[jax.Device], decoding: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """(the devices that train, the last `decoding` devices, which only sample). Raises ValueError if none would train,
    or if several processes would split their devices."""
    if not 0 <= decoding < len(devices):
        raise ValueError(
            f"rollout.devices={decoding} of {len(devices)} devices would only sample: it must be at least 0 and leave "
            "one to train"
        )
    if decoding and jax.process_count() > 1:
        raise ValueError(
            f"rollout.devices={decoding} needs a single process, not {jax.process_count()}: weights go from device to "
            "device of one host. Set it to 0 on several hosts; rollout.driver=servers samples on other machines"
        )
    return devices[: len(devices) - decoding], devices[len(devices) - decoding :]
