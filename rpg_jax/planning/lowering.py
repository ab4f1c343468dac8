"""The programs of a run, lowered on shapes alone: no array is made."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rpg_jax.data import RowShape
from rpg_jax.models import DecoderConfig
from rpg_jax.planning.flops import forward_flops, token_flops, training_flops
from rpg_jax.rollout import DecodeEngine, Decoding, Weights, prefill_shape
from rpg_jax.runs.memory import placed
from rpg_jax.training.state import TrainState
from rpg_jax.training.step import Programs, Sums
from rpg_jax.types import Batch, Rows

Lowered = tuple[str, jax.stages.Lowered, float]
"""Name, lowered program, and the model's own operations on one chip."""


def batch_of(shape: RowShape, sharding: NamedSharding, *, critic: bool = False) -> Batch:
    """A micro-batch of this shape with the columns that an update reads; `critic` adds those of a critic."""

    def array(width: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((shape.rows, width), dtype, sharding=sharding)

    ids, targets = array(shape.length, jnp.int32), array(shape.completion_length, jnp.int32)
    column = array(shape.completion_length, jnp.float32)
    own = ("rewards", "values", "returns") if critic else ()
    columns = dict.fromkeys(("behaviour_logprobs", "ref_logprobs", "advantages", *own), column)
    return Batch(Rows(ids, ids, ids, targets, targets, targets, column), column, **columns)


def training(
    programs: Programs,
    state: TrainState,
    batch: Batch,
    model: DecoderConfig,
    *,
    micro_batches: int,
    remat: str,
    frozen: bool = False,
) -> Iterator[Lowered]:
    """The log-prob pass, a critic's values, then the update: in one program, or in three for several micro-batches.

    `frozen`: the programs train adapters beside frozen weights.
    """
    rows, length = batch.rows.tokens.shape
    mesh = cast(NamedSharding, batch.rows.tokens.sharding).mesh
    sizes: dict[str, Any] = {"rows": rows, "length": length, "predicted": batch.rows.targets.shape[1]}
    step = training_flops(model, **sizes, remat=remat, frozen=frozen) / mesh.size
    if state.critic is not None and "layers" in state.critic.params:  # a trunk of its own
        step += training_flops(model, **{**sizes, "predicted": 0}, remat=remat) / mesh.size
    yield "log-probs", programs.logprobs.lower(state.params, batch.rows), forward_flops(model, **sizes) / mesh.size
    if programs.baseline is not None:
        values = forward_flops(model, **{**sizes, "predicted": 0}) / mesh.size
        known = dataclasses.replace(batch, advantages=None, values=None, returns=None)
        yield "baseline", programs.baseline.lower(state.weights, known), values
    if micro_batches == 1:
        yield "update", programs.fused.lower(state, batch), step
        return
    shapes = programs.start.trace(state.weights, batch).out_info
    where = jax.tree.map(lambda p: p.sharding, state.weights)
    sums = Sums(placed(shapes.grads, where), placed(shapes.metrics, NamedSharding(mesh, PartitionSpec())))
    yield "start", programs.start.lower(state.weights, batch), step
    yield "add", programs.add.lower(state.weights, sums, batch), step
    yield "apply", programs.apply.lower(state, sums), 0.0


def sampling(
    model: DecoderConfig, graphdef: Any, params: Any, decoding: Decoding, *, max_prompt_tokens: int
) -> Iterator[Lowered]:
    """A prefill of the largest shape, and a decode step of all slots over a full cache."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    engine, chips = DecodeEngine(model, graphdef, Weights(params), decoding), decoding.mesh.size
    rows, length = prefill_shape(max_prompt_tokens, decoding.capacity)
    lowered = engine.lower(rows, length)
    yield "prefill", lowered["prefill"], forward_flops(model, rows=rows, length=length, predicted=0) / chips
    slots = decoding.slots
    step = token_flops(model, tokens=slots, attended=decoding.capacity, predicted=slots)
    yield "decode", lowered["decode"], step / chips
