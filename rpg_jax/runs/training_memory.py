"""Bytes that training takes on a device at its peaks, and the rows of a micro-batch that fit by this arithmetic."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from rpg_jax import parallel
from rpg_jax.models import QwenConfig
from rpg_jax.models.sizes import parameter_count
from rpg_jax.rollout import Decoding, footprint
from rpg_jax.runs import memory
from rpg_jax.runs.layout import Layout, row_shape, rows_per_update
from rpg_jax.runs.learner import Learner, make_learner, offloaded, reference_differs
from rpg_jax.runs.sampling_layout import make_decoding

TRUSTED = 0.8  # of a device's memory for training: a compiler also needs room for what the arithmetic leaves out
_EMPTY = 1 / 8  # of an update's packed rows, at most
_TOKENS = 8192  # of packed rows that a device is given at once; more saves gathers, and costs more in empty rows


def with_micro_batch(layout: Layout) -> Layout:
    """`layout` with the largest micro-batch that fits, where `train.microbatch_size` is unset.

    That is the largest number of rows of `_sizes` whose peak, with what others hold meanwhile, takes at most 4/5 of a
    device; the smallest if none fits. It depends on the config and the kind of device alone. Where the memory is
    unknown (CPU), a micro-batch is a mini-batch. The choice is said on stderr.
    """
    if layout.config.train.microbatch_size is not None or layout.device_memory is None:
        return layout
    learner, decoding = make_learner(layout), make_decoding(layout)
    fitted = layout
    for rows in _sizes(layout):
        config = layout.config.copy_and_resolve_references()
        config.train.microbatch_size = rows
        fitted = dataclasses.replace(layout, config=config)
        if peak(fitted, learner, decoding) <= TRUSTED * layout.device_memory:
            break
    if (rows := row_shape(fitted.config).rows) < (whole := rows_per_update(layout.config)):
        gib = layout.device_memory / 2**30
        print(f"train.microbatch_size={rows} of {whole} rows an update, which fits {gib:.1f} GiB", file=sys.stderr)
    return fitted


def peak(layout: Layout, learner: Learner, decoding: Decoding) -> float:
    """Bytes on a device at the peak of training, with what others hold meanwhile."""
    c, held = layout.config.rollout, resident(layout, learner, decoding)
    beside = footprint.cache_bytes(layout.model, decoding) if c.max_staleness and not c.devices else 0.0
    return beside + max(held[name] + own for name, own in own_peaks(layout).items())


def own_peaks(layout: Layout) -> dict[str, float]:
    """Bytes at the peak of each program of training by arithmetic, without `resident`.

    They are the activations that wait, the gradients, one gathered layer and the state that the program works on. What
    a compiler keeps besides is left out: activations between two products of a layer, copies, gaps.
    """
    c, model, shape = layout.config, layout.model, row_shape(layout.config)
    held = footprint.bytes_on_a_device(layout.abstract_trained)
    frozen = 0.0 if layout.abstract_base is None else footprint.bytes_on_a_device(layout.abstract_base)
    width, layers = bytes_of_a_number(layout), model.num_layers
    rows = shape.rows * shape.length / layout.mesh.size  # tokens of a device
    inputs = rows * layers * _kept(model, c.model.remat) * width
    layer = 3 * width * parameter_count(model) / layers + 16 * rows * model.embed_dim * width
    found = {"log-probs": held + frozen + layer}
    if shape.rows >= rows_per_update(c):
        return found | {"update": 4 * held + inputs + frozen + layer}
    accumulating = inputs + frozen + layer
    return found | {"start": 2 * held + accumulating, "add": 4 * held + accumulating, "apply": 4 * held}


def resident(layout: Layout, learner: Learner, decoding: Decoding) -> dict[str, float]:
    """Bytes on a device that other owners hold while a program runs, by program.

    The optimizer's state always stays, and so do frozen weights. A copy of the weights for decoding stays while the
    trainer works. The cache stays while prompts are prefilled. A reference that differs from the policy is there for
    its log-probs.
    """
    c, shape = layout.config, row_shape(layout.config)
    weights = footprint.bytes_on_a_device(layout.abstract_trained)
    frozen = 0 if layout.abstract_base is None else footprint.bytes_on_a_device(layout.abstract_base)
    slots = footprint.bytes_on_a_device(learner.like) - weights  # without what waits on the host
    params = memory.decoding_params(layout, decoding)
    own = footprint.bytes_on_a_device(params) if memory.has_copy(layout, decoding) else 0
    cache = footprint.cache_bytes(layout.model, decoding)
    row = 4 * (3 * shape.length + 8 * shape.completion_length)
    training = own + c.rollout.prompts_per_step * c.rollout.group_size * row / layout.mesh.size
    stays = c.reference.resident and "reference" not in offloaded(c)
    other = weights if stays or reference_differs(c) else 0
    sampling = memory.held_while_sampling(layout, learner, decoding)
    return {
        "log-probs": training + slots + other,
        "baseline": training + slots,
        "start": training + slots,
        "add": training + slots,
        "apply": training + frozen,
        "update": training,
        "prefill": sampling + cache,
        "decode": sampling,
    }


def bytes_of_a_number(layout: Layout) -> int:
    """Bytes of an activation, and of a weight that is gathered for a product."""
    return 2 if layout.config.model.compute_dtype == "bfloat16" else 4


def _sizes(layout: Layout) -> Iterator[int]:
    """The rows that a micro-batch may have, the largest first.

    Packed rows are fewer than completions, how many fewer depends on their lengths, and the last micro-batch of an
    update is filled up with empty rows. So a device gets one row or `_TOKENS`, and a micro-batch at most an eighth of
    the rows that prompts and completions of half their limits fill.
    """
    c, whole = layout.config, rows_per_update(layout.config)
    shards = parallel.shards("batch", dict(layout.mesh.shape), layout.rules)
    most = whole
    if c.train.packed_length:
        filled = whole * (c.task.max_prompt_tokens + c.rollout.max_tokens) / 2 / c.train.packed_length
        most = max(shards, int(min(filled * _EMPTY, shards * _TOKENS / c.train.packed_length)))
    yield from (rows for rows in range(most, 0, -1) if whole % rows == 0 and rows % shards == 0)


def _kept(model: QwenConfig, remat: str) -> float:
    """Activations of a token that wait in a layer for the backward pass.

    "none" also keeps what lies between the products, some of it in f32. Its sum was set by one compiled update, of
    Qwen3-4B in rows of 10,240 tokens on v5p:4x4x4: 87 thousand numbers.
    """
    heads, pairs = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    products = 2 * model.embed_dim + 2 * model.hidden_dim + heads + pairs
    kept = {"full": 0, "offload": -model.embed_dim, "dots": products}
    return model.embed_dim + kept.get(remat, products + 8 * model.embed_dim + 2 * model.hidden_dim + 3 * heads)
