"""The weights that a run starts from; with adapters, the base that is frozen beside them and the copy that decodes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import models, rollout, storage
from rpg_jax.models.lora import init_adapters, load_adapters, merged
from rpg_jax.models.weights import quantized
from rpg_jax.parallel import hosts
from rpg_jax.runs import memory
from rpg_jax.runs.layout import Layout
from rpg_jax.storage.checkpoints import Snapshots

Draw = Callable[[Layout], Any]
"""The weights of a layout without adapters, before any training by reinforcement."""


def init_params(layout: Layout) -> Any:
    """The weights of `model.path`, or random ones; straight into their shards."""
    m, dtype = layout.config.model, jnp.dtype(layout.config.model.param_dtype)
    if m.path:
        folder = models.local_folder(m.path)
        return models.load(folder, layout.model, param_dtype=dtype, shardings=layout.param_shardings)
    seed = layout.config.warm_start.seed
    return models.init(layout.model, seed=seed, param_dtype=dtype, shardings=layout.param_shardings)[1]


def no_params(layout: Layout) -> Any:
    """Zeros in place of the trained arrays, for a run whose checkpoint has them: `model.path` is not even fetched."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.trained_shapes)

    return jax.jit(zeros, out_shardings=layout.trained_shardings)()


def open_base(layout: Layout, folder: storage.Folder, draw: Draw, *, begins: bool) -> models.Base | None:
    """The frozen weights of a run; None if all weights are trained. Collective.

    The weights of `model.path` are read from there each time. Other weights, random or of a warm start, are drawn when
    the run `begins`; its folder keeps them once, in `base`.

    Raises:
      Refused: the base in the folder is missing or damaged.
    """
    if layout.lora is None:
        return None
    if not keeps_base(layout.config):
        return new_base(layout, draw)
    kept, like = Snapshots(folder.home / "base"), layout.abstract_base
    assert like is not None
    if not begins:
        return dataclasses.replace(like, weights=kept.restore(0, like.weights))
    base = new_base(layout, draw)
    kept.save(0, base.weights)
    kept.close()
    return base


def new_base(layout: Layout, draw: Draw) -> models.Base:
    """The weights that `draw` reads or makes, frozen in `model.compute_dtype`, or in 8 bits."""
    m, like = layout.config.model, layout.abstract_base
    assert like is not None, "a layout without adapters has no base"
    params = draw(layout.without_adapters(dtype=m.param_dtype if keeps_base(layout.config) else m.compute_dtype))

    def freeze(params: Any) -> Any:
        params = jax.tree.map(lambda x: x.astype(m.compute_dtype), params)
        return quantized(params) if m.lora.int8 else params

    if m.lora.int8 or any(x.dtype != m.compute_dtype for x in jax.tree.leaves(params)):
        where = jax.tree.map(lambda x: x.sharding, like.weights)
        params = jax.jit(freeze, out_shardings=where)(params)
    return dataclasses.replace(like, weights=params)


def keeps_base(config: ConfigDict) -> bool:
    """Whether a run's folder keeps the base of its adapters. The weights of `model.path` need no copy."""
    return not config.model.path or config.warm_start.enabled


def first_adapters(layout: Layout) -> Any:
    """The adapters before the first update, of `model.lora.path` or of the seed; straight into their shards."""
    c, lora = layout.config, layout.lora
    assert lora is not None, "a layout without adapters trains all weights"
    dtype = jnp.dtype(c.model.param_dtype)
    if c.model.lora.path:
        folder, where = models.local_folder(c.model.lora.path), layout.adapter_shardings
        return load_adapters(folder, layout.model, lora, dtype=dtype, shardings=where)
    return init_adapters(layout.model, lora, seed=c.seed, dtype=dtype, shardings=layout.adapter_shardings)


def merged_layout(layout: Layout, base: models.Base | None, adapters: Any) -> tuple[Layout, Any]:
    """A layout without adapters, and its weights W + (alpha / rank) A B in the compute dtype; `base` is taken over."""
    whole = layout.without_adapters(dtype=layout.config.model.compute_dtype)

    def merge(base: models.Base, adapters: Any) -> Any:
        return merged(base.policy(adapters))

    donated = () if layout.config.model.lora.int8 else (0,)  # bytes of another width cannot be used again
    return whole, jax.jit(merge, out_shardings=whole.param_shardings, donate_argnums=donated)(base, adapters)


def decoding_base(layout: Layout, decoding: rollout.Decoding, base: models.Base) -> models.Base:
    """The base that decodes with adapters beside it: the trainer's, or a copy in another layout or in 8 bits."""
    if not memory.has_copy(layout, decoding):
        return base
    weights, where = base.weights, jax.tree.map(lambda x: x.sharding, memory.decoding_base(layout, decoding).weights)
    if decoding.int8 and not layout.config.model.lora.int8:
        weights = jax.jit(quantized)(weights)
    own = jax.tree.leaves(where)[0].is_fully_addressable
    if own and not jax.tree.leaves(weights)[0].is_fully_addressable:
        return dataclasses.replace(base, weights=hosts.local_copies(weights, where))
    return dataclasses.replace(base, weights=jax.device_put(weights, where))
