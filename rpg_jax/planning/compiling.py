"""The programs of a run: counts their operations by arithmetic, lowers them on shapes alone, and compiles them.

The devices need not be there, and no array is made.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax.models import DecoderConfig
from rpg_jax.planning import hlo
from rpg_jax.planning.chips import Chip, Rates
from rpg_jax.rollout import DecodeEngine, Decoding, Weights, prefill_shape
from rpg_jax.runs.layout import Layout, reference_layout, row_shape, rows_per_update
from rpg_jax.runs.learner import Learner, learner_programs
from rpg_jax.runs.memory import decoding_params
from rpg_jax.training.critic import Critic
from rpg_jax.training.state import abstract, shardings_of
from rpg_jax.training.step import Anchor, Sums
from rpg_jax.types import Batch, Rows

SAMPLING = frozenset({"prefill", "decode", "exchange"})  # the other programs train


@dataclasses.dataclass(frozen=True)
class Program:
    """The needs of one program on each chip. The programs are log-probs, baseline, update, start, add, apply, prefill,
    decode and exchange. Memory is in bytes.

    Attributes:
      arguments, temporaries, outputs, alias: HBM, by the compiler; `alias`: arguments that outputs overwrite.
        On a TPU, temporaries count fragmentation twice. By arithmetic all are 0, but for the `temporaries` of exchange.
      resident: HBM that holds arrays of other programs while this program runs.
      costs: operations, and traffic of HBM and network.
      model_flops: one chip's share of the operations of the mathematics, however the compiler arranges them.
      compile_seconds: seconds that compilation took.
      refused: the first line of the compiler's message if the program does not fit; "" if the compiler accepts it.
        With a message, the compiler's numbers are 0.
      peak: HBM of the program's buffers, arguments included, from the compiler or by arithmetic; 0: not known.
      host: host memory for each chip, from remat=offload and the arrays that `offload` names.
    """

    arguments: float = 0
    temporaries: float = 0
    outputs: float = 0
    alias: float = 0
    resident: float = 0.0
    costs: hlo.Costs = dataclasses.field(default_factory=hlo.Costs)
    model_flops: float = 0.0
    compile_seconds: float = 0.0
    refused: str = ""
    peak: float = 0.0
    host: float = 0.0

    @property
    def hbm(self) -> float:
        """Bytes of HBM at the peak, with `resident`; if `peak` is 0, of arguments + temporaries + outputs - alias."""
        own = self.arguments + self.temporaries + self.outputs - self.alias
        return (self.peak or own) + self.resident

    def fits(self, chip: Chip) -> bool:
        """Whether the compiler accepted the program, and `hbm`, with `resident`, is at most the HBM of `chip`."""
        return not self.refused and self.hbm <= chip.hbm

    def limits(self, chip: Chip, run: float = 1.0) -> dict[str, float]:
        """The seconds that each resource of a chip, "compute", "HBM" and "ICI", alone would take at its peak rate.
        "compute" counts the share `run` (0 to 1) of the larger of `costs.flops` and `model_flops`."""
        return {
            "compute": run * max(self.costs.flops, self.model_flops) / chip.flops,
            "HBM": self.costs.bytes / chip.hbm_bandwidth,
            "ICI": sum(self.costs.collectives.values()) / chip.ici_bandwidth,
        }

    def bound(self, chip: Chip) -> tuple[str, float]:
        """The slowest resource at its peak rate ("compute", "HBM" or "ICI"), and its seconds for all operations."""
        return max(self.limits(chip).items(), key=lambda limit: limit[1])

    def expected(self, chip: Chip, rates: Rates, run: float = 1.0) -> float:
        """The expected seconds of one run on a chip: the seconds of the slowest resource at `rates`, with the share
        `run` (0 to 1) of the operations, plus the latency of every collective."""
        shares = {"compute": rates.flops, "HBM": rates.hbm, "ICI": rates.ici}
        slowest = max(seconds / shares[name] for name, seconds in self.limits(chip, run).items())
        return slowest + self.costs.launches * rates.collective_seconds


def compile_program(
    lowered: Any, *, model_flops: float = 0.0, resident: float = 0.0, cheapest: bool = False
) -> Program:
    """Compiles `lowered`, the result of `jax.jit(...).lower(...)`, in seconds to minutes, and counts the program's
    costs. A program that does not fit in HBM is a result with the field `refused`, not an error. Other errors of the
    compiler are raised as jax.errors.JaxRuntimeError. `cheapest`, and a ValueError, are as in `hlo.count`.
    `model_flops` and `resident` go into the result as they are."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = next(line for line in str(error).splitlines() if line.strip())[:300]
        took = time.perf_counter() - start
        return Program(resident=resident, model_flops=model_flops, compile_seconds=took, refused=said)
    seconds = time.perf_counter() - start
    m, costs = compiled.memory_analysis(), hlo.count(compiled.as_text(), cheapest=cheapest)
    sizes = m.argument_size_in_bytes, m.temp_size_in_bytes, m.output_size_in_bytes, m.alias_size_in_bytes
    host = m.host_argument_size_in_bytes + m.host_temp_size_in_bytes
    return Program(*sizes, resident, costs, model_flops, seconds, peak=m.peak_memory_in_bytes, host=host)


def lowered_programs(layout: Layout, learner: Learner, decoding: Decoding) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """Lowers each program of a training step when the caller asks for it, and at last "prefill" and "decode" together.
    Yields (name, lowered program)."""
    with layout.activate():
        yield from training(layout, learner)
    engine = DecodeEngine(layout.model, layout.graphdef, Weights(decoding_params(layout, decoding)), decoding)
    yield from engine.lower(*prefill_shape(layout.config.task.max_prompt_tokens, decoding.capacity)).items()


def operations(layout: Layout, decoding: Decoding, critic: Critic | None = None) -> dict[str, float]:
    """Returns the operations of the mathematics in each program on one chip, by the program's name: of a micro-batch,
    of the largest prefill, and of a decode step of all slots over a full cache. A `critic` adds its passes to updates.
    All names of `Program` but "exchange" are there."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    c, model, shape, chips = layout.config, layout.model, row_shape(layout.config), layout.mesh.size
    sizes: dict[str, Any] = {"rows": shape.rows, "length": shape.length}
    forward = forward_flops(model, **sizes, predicted=shape.completion_length)
    how: dict[str, Any] = {"remat": c.model.remat, "frozen": layout.lora is not None}
    update = training_flops(model, **sizes, predicted=shape.completion_length, **how)
    if critic is not None:
        update += training_flops(model, **sizes, predicted=0, **how)
    values = forward_flops(model, **sizes, predicted=0)
    found = {"log-probs": forward, "baseline": values, "update": update, "start": update, "add": update, "apply": 0.0}
    rows, length = prefill_shape(c.task.max_prompt_tokens, decoding.capacity)
    prefill = forward_flops(model, rows=rows, length=length, predicted=0)
    step = token_flops(model, tokens=decoding.slots, attended=decoding.capacity, predicted=decoding.slots)
    sampling = {"prefill": prefill / decoding.mesh.size, "decode": step / decoding.mesh.size}
    return {name: flops / chips for name, flops in found.items()} | sampling


def batch_of(layout: Layout, *, critic: bool = False) -> Batch:
    """Returns a micro-batch of ShapeDtypeStructs with shardings, with the columns that an update reads. `critic` adds a
    critic's columns. With `model.replay_experts` a mixture of experts has the experts of every token."""
    shape, experts = row_shape(layout.config), None

    def array(width: int, dtype: Any, *each: int) -> Any:
        return jax.ShapeDtypeStruct((shape.rows, width, *each), dtype, sharding=layout.row_sharding)

    ids, targets = array(shape.length, jnp.int32), array(shape.completion_length, jnp.int32)
    column = array(shape.completion_length, jnp.float32)
    own = ("rewards", "values", "returns") if critic else ()
    columns = dict.fromkeys(("behaviour_logprobs", "ref_logprobs", "advantages", *own), column)
    if layout.config.model.replay_experts and (mixture := layout.model.experts) is not None:
        experts = array(shape.length, mixture.dtype, layout.model.num_layers, mixture.per_token)
    return Batch(Rows(ids, ids, ids, targets, targets, targets, column, experts), column, **columns)


def training(layout: Layout, learner: Learner) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """Lowers the programs of a training step, each when the caller asks for it, and yields (name, lowered program). The
    names are "log-probs"; "baseline", a critic's values, if there is a critic; and "update" if one micro-batch makes an
    update and nothing is rehearsed, else "start", "add" and "apply"."""
    c, shape, state = layout.config, row_shape(layout.config), learner.like
    programs = learner_programs(layout, learner, base=layout.base)
    batch = batch_of(layout, critic=learner.critic is not None)
    if c.loss.estimator == "exact":  # the KL is summed over the vocabulary, from the reference's hidden states
        reference = reference_layout(layout)
        embed, dtype = reference.weights["embed"], jnp.dtype(reference.config.model.compute_dtype)
        sizes = shape.rows, shape.completion_length, reference.model.embed_dim
        hidden: Any = jax.ShapeDtypeStruct(sizes, dtype, sharding=layout.row_sharding)
        head: Any = jax.ShapeDtypeStruct(embed.shape, dtype, sharding=embed.sharding)
        batch = dataclasses.replace(batch, ref_hidden=hidden)
        programs = programs.beside(Anchor(lambda rows: hidden, head))
    yield "log-probs", programs.logprobs.lower(state.params, batch.rows)
    if programs.baseline is not None:
        known = dataclasses.replace(batch, advantages=None, values=None, returns=None)
        yield "baseline", programs.baseline.lower(state.weights, known)
    if rows_per_update(c) == shape.rows and not c.rehearsal.path:
        yield "update", programs.fused.lower(state, batch)
        return
    start = programs.start.lower(state.weights, batch)
    everywhere = jax.tree.map(lambda _: layout.replicated, start.out_info.metrics)
    sums = Sums(
        abstract(start.out_info.grads, shardings_of(state.weights)), abstract(start.out_info.metrics, everywhere)
    )
    yield "start", start
    yield "add", programs.add.lower(state.weights, sums, batch)
    yield "apply", programs.apply.lower(state, sums)


def token_flops(config: DecoderConfig, *, tokens: float, attended: float, predicted: float) -> float:
    """Returns the operations of a forward pass over `tokens` that attend to `attended` tokens each, in the mean, with
    logits at `predicted` positions in all. A multiply-add in a product is two operations; norms and softmax none."""
    D, H = config.embed_dim, config.head_dim
    weights = 2 * D * config.num_heads * H + 2 * D * config.num_kv_heads * H + 3 * D * _hidden_units(config)
    if config.experts:
        weights += D * config.experts.count
    scores_and_values = 2 * 2 * config.num_heads * H * attended
    return tokens * config.num_layers * (2.0 * weights + scores_and_values) + predicted * 2 * D * config.vocab_size


def forward_flops(config: DecoderConfig, *, rows: int, length: int, predicted: int) -> float:
    """Returns the operations of a forward pass over `rows` sequences of `length` tokens, with logits at `predicted`
    positions of each sequence. Causal attention counts half of the scores."""
    return token_flops(config, tokens=rows * length, attended=length / 2, predicted=rows * predicted)


def training_flops(
    config: DecoderConfig, *, rows: int, length: int, predicted: int, remat: str = "none", frozen: bool = False
) -> float:
    """Returns the operations of a forward and a backward pass over `rows` sequences of `length` tokens, with logits at
    `predicted` positions of each: three forward passes, and recomputation. Causal attention counts half of the scores.

    All logits are computed again. A remat policy that keeps layer inputs only (`full`, `offload`) also computes the
    layers again, except the last product of each: no gradient needs its result. Attention's own backward pass then
    computes the scores once more. `frozen` weights have no gradient, which saves a third of their products. The
    products of adapters beside frozen weights are few and not counted."""
    tokens, attended, logits = rows * length, length / 2, rows * predicted
    forward = token_flops(config, tokens=tokens, attended=attended, predicted=logits)
    layers = token_flops(config, tokens=tokens, attended=attended, predicted=0)
    again = 0.0
    if remat in ("full", "offload"):
        last = 2 * _hidden_units(config) * config.embed_dim
        scores = 2 * config.num_heads * config.head_dim * attended
        again = layers + tokens * config.num_layers * (scores - last)
    saved = token_flops(config, tokens=tokens, attended=0, predicted=logits) if frozen else 0.0
    return 3 * forward + (forward - layers) + again - saved


def _hidden_units(config: DecoderConfig) -> int:
    """Hidden units of the feed-forward layer that a token goes through; in a mixture those of the token's k experts."""
    return config.experts.per_token * config.experts.hidden_dim if config.experts else config.hidden_dim
