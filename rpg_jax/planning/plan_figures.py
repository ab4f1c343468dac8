"""The figures of a plan: what a config asks of a step, and its bound and expected time from the programs' costs."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax.models import DecoderConfig, parameter_count, splash
from rpg_jax.planning import efficiency, step_time
from rpg_jax.planning.compiling import Program
from rpg_jax.planning.flops import token_flops
from rpg_jax.planning.lengths import Lengths
from rpg_jax.planning.rollout_time import DecodeStep
from rpg_jax.planning.step_time import Work
from rpg_jax.planning.topologies import Topology
from rpg_jax.rollout import Decoding, footprint
from rpg_jax.rollout.decoding import prompt_bucket, prompts_per_prefill
from rpg_jax.runs import memory
from rpg_jax.runs.layout import Layout, row_shape
from rpg_jax.runs.learner import reference_differs


def lengths_of(config: ConfigDict, *, mean: float = 0, prompt: float = 0, spread: float = 0) -> Lengths:
    """The lengths that a plan assumes; 0 takes half of rollout.max_tokens, and the figures of `efficiency`."""
    longest = config.task.max_prompt_tokens
    return Lengths(
        prompt=prompt or min(efficiency.PROMPT_TOKENS, longest / 2),
        mean=mean or config.rollout.max_tokens / 2,
        spread=spread or efficiency.SPREAD,
        limit=config.rollout.max_tokens,
    )


def work_of(layout: Layout, decoding: Decoding, lengths: Lengths, store: float = efficiency.STORE) -> Work:
    """What a step of the config has to do."""
    c, shape = layout.config, row_shape(layout.config)
    bucket = prompt_bucket(math.ceil(lengths.prompt), decoding.capacity)
    return Work(
        steps=c.train.steps,
        prompts=memory.prompts_of_a_step(c),
        trained=c.rollout.prompts_per_step,
        group_size=c.rollout.group_size,
        lengths=lengths,
        meshes=layout.decoding_hosts,
        prefill_prompts=prompts_per_prefill(bucket, decoding.prefill_tokens),
        updates=c.train.updates_per_step,
        epochs=c.train.epochs,
        passes=2 if reference_differs(c) else 1,
        micro_batch=(shape.rows, shape.length),
        packed=shape.packed,
        remat=c.model.remat,
        frozen=layout.lora is not None,
        run=_run(layout.model, lengths, shape.length) if shape.packed else 1.0,
        weights=parameter_count(layout.model) * jnp.dtype(c.model.compute_dtype).itemsize,
        store=store,
    )


def _run(model: DecoderConfig, lengths: Lengths, length: int) -> float:
    """Share of a packed row's operations that are run: those of the blocks that hold a pair of one completion.

    A token attends to its completion and, in the mean, to no more than a block beyond it.
    """
    attended = min(length / 2, lengths.attended_in_training + splash.BLOCK)
    within, whole = (token_flops(model, tokens=1, attended=n, predicted=1) for n in (attended, length / 2))
    return within / whole


def decode_step_of(layout: Layout, decoding: Decoding, program: Program) -> DecodeStep:
    """A decode step from the costs of its program, which count the cache as full."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    model, slots, chips = layout.model, decoding.slots, decoding.mesh.size
    cache = footprint.cache_bytes(model, decoding)
    products = token_flops(model, tokens=slots, attended=0, predicted=slots)
    return DecodeStep(
        slots=slots,
        fixed=program.costs.bytes - cache,
        cached=cache / decoding.capacity,
        products=products / chips,
        scores=(token_flops(model, tokens=slots, attended=1, predicted=slots) - products) / chips,
        network=sum(program.costs.collectives.values()),
        collectives=program.costs.launches,
        steps_per_dispatch=decoding.steps_per_dispatch,
        reading=efficiency.HBM_INT8 if decoding.int8_kv else efficiency.HBM,
    )


def step_figures(
    layout: Layout,
    decoding: Decoding,
    programs: Mapping[str, Program],
    on: Topology,
    lengths: Lengths,
    store: float = efficiency.STORE,
) -> dict[str, Any]:
    """Bound and expected time of a step and of the run without evaluations, what binds, and what to try next.

    Prompts include dynamic sampling's oversampling. `servers` of a host each sample as fast as these chips train.
    """
    work, step = work_of(layout, decoding, lengths, store), decode_step_of(layout, decoding, programs["decode"])
    best = step_time.bound(work, step, programs, layout.model, on)
    likely = step_time.expected(work, step, programs, on)
    int8, head = decoding.int8_kv, layout.model.head_dim
    return {
        "prompts": work.prompts,
        "completions": work.prompts * work.group_size,
        "prompt_tokens": lengths.prompt,
        "mean_tokens": lengths.mean,
        "slots": decoding.slots * layout.decoding_hosts,
        "slots_of_a_chip": decoding.slots * layout.decoding_hosts / on.chips,
        "micro_batches": work.micro_batches * work.updates,
        "steps": work.steps,
        "bound": best.as_dict(),
        "expected": likely.as_dict(),
        "binds": step_time.binding(likely),
        "next": step_time.suggestions(work, step, programs, on, head_dim=head, int8_kv=int8),
        "servers": likely.servers,
        "server_chips": on.chip.one_host,
        "weights_bytes": work.weights,
    }
