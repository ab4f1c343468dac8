"""Plans a run: compiles its programs for a TPU slice, and adds up memory and seconds."""

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.models import DecoderConfig, splash
from rpg_jax.models.sizes import parameter_count
from rpg_jax.parallel import hosts
from rpg_jax.planning import hlo, step_time
from rpg_jax.planning.chips import EXCHANGED_BYTES, EXPECTED, HBM_BAND, PACKING, PEAKS, PROMPT_TOKENS, SPREAD
from rpg_jax.planning.compiling import (
    SAMPLING,
    Program,
    compile_program,
    forward_flops,
    lowered_programs,
    operations,
    token_flops,
)
from rpg_jax.planning.step_time import DecodeStep, Lengths, Work
from rpg_jax.planning.topologies import Topology
from rpg_jax.rollout import Decoding, prefill_shape
from rpg_jax.rollout.decoding import prompt_bucket, prompts_per_prefill
from rpg_jax.runs import config_files, memory
from rpg_jax.runs.experiment import make_stage, open_tokenizer
from rpg_jax.runs.layout import (
    Layout,
    make_layout,
    model_config,
    packing_shape,
    reference_layout,
    row_shape,
    rows_per_update,
)
from rpg_jax.runs.learner import Learner, is_on_policy, make_learner, reference_differs
from rpg_jax.runs.problems import Task, listed


def plan(
    config: ConfigDict, topology: Topology, only: Sequence[str] | None = None, *, lengths: Lengths | None = None
) -> tuple[dict[str, Program], dict[str, Any]]:
    """Compiles every program of a resolved config for `topology`, or the programs named in `only`; a line on stderr
    announces each. Returns the programs by name, and the result of `step_figures`, which is {} if `only` is given or
    the compiler refuses a program. `lengths` None: as `lengths_of` assumes. Raises ValueError as `parts_on` does, if a
    program cannot be lowered, or if `only` has a name that is not compiled, as "exchange"; and as `compile_program`."""
    layout, learner, decoding, held = parts_on(config, topology, only)
    programs, found = {}, dict(lowered_programs(layout, learner, decoding))
    flops = operations(layout, decoding, learner.critic)
    if unknown := sorted(set(only or ()) - set(found)):
        raise ValueError(f"this config has no program {', '.join(unknown)}; it has {', '.join(found)}")
    for name, lowered in found.items():
        if not only or name in only:
            print(f"compiling {name} for {topology.name}", file=sys.stderr, flush=True)
            plain = name == "decode"  # the other branch cuts the distribution, which training never does
            known = {"model_flops": flops[name], "resident": held[name]}
            programs[name] = compile_program(lowered, **known, cheapest=plain)
    if only or any(program.refused for program in programs.values()):
        return programs, {}
    lengths = lengths or lengths_of(config)
    programs |= exchange(layout, decoding, held, topology, lengths)
    return programs, step_figures(layout, decoding, programs, topology, lengths)


def parts_on(
    config: ConfigDict, topology: Topology, only: Sequence[str] | None = None
) -> tuple[Layout, Learner, Decoding, dict[str, float]]:
    """Returns four things for a config on a slice: the layout, with the micro-batch that a run would take there; the
    learner; how the run decodes; and, by program, the bytes that other parts of the run hold on a chip meanwhile.
    Raises ValueError without libtpu, if model, mesh and sizes of the config conflict, or as `check_one_mesh`. If all
    programs in `only` sample, the sizes of training are not checked."""
    check_one_mesh(config)
    place = topology.devices(), topology.host.devices(), topology.chip.hbm
    layout = memory.with_micro_batch(make_layout(config, vocabulary(config), *place))
    if not only or not SAMPLING.issuperset(only):
        packing_shape(layout)
    learner, decoding = make_learner(layout), memory.make_decoding(layout)
    return layout, learner, decoding, memory.resident(layout, learner, decoding)


def check_one_mesh(config: ConfigDict) -> None:
    """Raises ValueError if `rollout.devices` is set: devices that only sample are a second mesh, and a plan has one."""
    if config.rollout.devices:
        raise ValueError(
            f"plan looks at one mesh, and rollout.devices={config.rollout.devices} makes two. Leave it out and plan "
            "each part as a slice: --programs=prefill,decode for the part that samples, --programs=log-probs,update "
            "(or log-probs,start,add,apply) for the one that trains"
        )


def with_known_shapes(config: ConfigDict) -> ConfigDict:
    """Returns `config`; or a copy without `model.path` and `model.tokenizer`, if the model at `model.path` cannot be
    read here and `model.size` gives the shapes. A line on stderr then says the reason."""
    m = config.model
    if not (m.path and m.size):
        return config
    try:
        model_config(config, None)
    except (ValueError, OSError) as error:
        print(f"planning with the shapes of model.size={m.size}: {error}", file=sys.stderr)
        return config_files.changed(config, {"model.path": None, "model.tokenizer": None})
    return config


def vocabulary(config: ConfigDict) -> int | None:
    """None for a config with `model.path` or `model.size`, whose model says the size. Else the vocabulary size of the
    tokenizer `model.tokenizer`; if this field is unset, of a tokenizer that is trained as in the run, then deleted."""
    if config.model.path or config.model.size:
        return None
    task, stage = Task.from_config(config), make_stage(config)
    if stage is not None:
        with stage:
            task = task.opened(stage)
    with tempfile.TemporaryDirectory() as folder:
        return open_tokenizer(config, task, Path(folder)).vocab_size


def lengths_of(config: ConfigDict, *, mean: float = 0, prompt: float = 0) -> Lengths:
    """Returns the lengths that a plan assumes, in tokens. `mean` is the mean of completions; 0: half of
    rollout.max_tokens. `prompt` is the mean of prompts; 0: `PROMPT_TOKENS`, or half of task.max_prompt_tokens if less.
    The spread is `SPREAD`, and the config gives the limits."""
    limit, usual = config.rollout.max_tokens, min(PROMPT_TOKENS, config.task.max_prompt_tokens / 2)
    part = config.rollout.partial_tokens or math.inf
    return Lengths(prompt=prompt or usual, mean=mean or limit / 2, spread=SPREAD, limit=limit, part=part)


def exchange(
    layout: Layout, decoding: Decoding, held: Mapping[str, float], on: Topology, lengths: Lengths
) -> dict[str, Program]:
    """Returns the exchange of a step's groups between hosts as {"exchange": Program}; {} with one host. Its collective
    has the bytes that a host receives from the others. `held` has the bytes that other parts of the run hold on a chip,
    by program. During the exchange a chip also holds the decoding weights, a piece of the groups of each host, and its
    own piece twice."""
    if on.hosts == 1:
        return {}
    sampled = memory.prompts_of_a_step(layout.config) * layout.config.rollout.group_size * lengths.mean
    size = sampled * EXCHANGED_BYTES * (on.hosts - 1) / on.hosts
    costs = hlo.Costs(0.0, 0.0, {"all-gather": size}, launches=math.ceil(size / (on.hosts - 1) / hosts.PIECE))
    pieces = (on.hosts + 1) * min(hosts.PIECE, size / (on.hosts - 1))
    stays = held["decode"] + memory.bytes_on_a_device(memory.decoding_params(layout, decoding))
    return {"exchange": Program(temporaries=pieces, resident=stays, costs=costs)}


HELD_OUT = {"aime-2024": 30, "aime25": 30, "amc-23": 40, "minerva": 272, "olympiadbench": 674, "gsm8k-test": 1319}
"""The number of problems in published sets, by source. A plan reads no problems."""


def held_out_problems(config: ConfigDict) -> int:
    """Returns the most problems that an evaluation of all held-out sets can have. A set with more problems than
    `evaluation.problems`, or of unknown size, counts as `evaluation.problems`."""
    sources = [entry.partition("=")[2] for entry in listed(config.task.held_out_sets or "held out")]
    most = config.evaluation.problems
    return sum(min(most, HELD_OUT.get(source, most)) for source in sources)


def work_of(layout: Layout, decoding: Decoding, lengths: Lengths) -> Work:
    """Returns the work of a step of the layout's config, and of the run's evaluations."""
    c, shape = layout.config, row_shape(layout.config)
    policy, reference = (parameter_count(model) for model in (layout.model, reference_layout(layout).model))
    passes = c.train.epochs if c.loss.estimator == "exact" else reference_differs(c)
    bucket = prompt_bucket(math.ceil(lengths.prompt), decoding.capacity)
    # the rows that a completion fills
    filled = (lengths.prompt + lengths.mean) / shape.length / PACKING if shape.packed else 1.0
    rows, length = prefill_shape(c.task.max_prompt_tokens, decoding.capacity)
    dispatch = forward_flops(layout.model, rows=rows, length=length, predicted=0)
    begun = [(forward_flops(layout.model, rows=1, length=round(n), predicted=0), share) for n, share in lengths.begun]
    again = sum(flops * share for flops, share in begun) / dispatch
    return Work(
        steps=c.train.steps,
        prompts=memory.prompts_of_a_step(c),
        group_size=c.rollout.group_size,
        lengths=lengths,
        meshes=layout.decoding_hosts,
        prefill_prompts=prompts_per_prefill(bucket, decoding.prefill_tokens),
        prefilled_again=again,
        updates=c.train.updates_per_step,
        epochs=c.train.epochs,
        passes=(not is_on_policy(layout)) + passes * reference / policy,
        micro_batches=math.ceil(rows_per_update(c) * filled / shape.rows),
        rehearsed=math.ceil(rows_per_update(c) / c.rollout.group_size * filled / shape.rows) if c.rehearsal.path else 0,
        run=_run(layout.model, lengths, shape.length) if shape.packed else 1.0,
        evaluations=1 + math.ceil(c.train.steps / c.evaluation.every),  # before the first step, and after the last
        evaluated=(held_out_problems(c), c.evaluation.k),
        synced=memory.bytes_of_a_number(layout) * policy,
    )


def _run(model: DecoderConfig, lengths: Lengths, length: int) -> float:
    """Returns the share of the operations of a packed row of `length` tokens that run: attention skips blocks without
    two tokens of one completion. A token attends to its completion and, in the mean, at most a block of others."""
    attended = min(length / 2, lengths.attended_in_training + splash.BLOCK)
    within, whole = (token_flops(model, tokens=1, attended=n, predicted=1) for n in (attended, length / 2))
    return within / whole


def decode_step_of(layout: Layout, decoding: Decoding, program: Program) -> DecodeStep:
    """Returns the costs of a decode step on one chip. `program` is "decode", whose costs count a full cache."""
    assert decoding.mesh is not None, "a plan decodes on a mesh"
    model, slots, chips = layout.model, decoding.slots, decoding.mesh.size
    cache = memory.cache_bytes(layout, decoding)
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
    )


def step_figures(
    layout: Layout, decoding: Decoding, programs: Mapping[str, Program], on: Topology, lengths: Lengths
) -> dict[str, Any]:
    """Returns the time of a step, with the step's share of the run's evaluations, and of the run, for JSON and tables.
    `programs` are all programs of a step by name, with "exchange" if there are several hosts.

    "bound" is at the peaks of the chip, "expected" at the expected rates; "fastest" and "slowest" are expected at the
    ends of `HBM_BAND`. These four are results of `step_time.figures`. "binds" is a text with the longest phase of the
    expected step, and its share. Further keys count a step's prompts, with oversampling, completions, micro-batches and
    slots, mean lengths in tokens, the run's steps and evaluations, and as "evaluated" an evaluation's completions."""
    work, step = work_of(layout, decoding, lengths), decode_step_of(layout, decoding, programs["decode"])
    slowest, fastest = (EXPECTED._replace(hbm=hbm) for hbm in HBM_BAND)
    sides = {"bound": PEAKS, "expected": EXPECTED, "fastest": fastest, "slowest": slowest}
    phases = {side: step_time.phases(work, step, programs, on, rates) for side, rates in sides.items()}
    found = {side: step_time.figures(phases[side], work, on, rates) for side, rates in sides.items()}
    longest, seconds = max(phases["expected"].items(), key=lambda phase: phase[1])
    return {
        "prompts": work.prompts,
        "completions": work.prompts * work.group_size,
        "prompt_tokens": lengths.prompt,
        "mean_tokens": lengths.mean,
        "slots": decoding.slots * layout.decoding_hosts,
        "slots_of_a_chip": decoding.slots * layout.decoding_hosts / on.chips,
        "micro_batches": work.micro_batches * work.updates,
        "steps": work.steps,
        "evaluations": work.evaluations,
        "evaluated": math.prod(work.evaluated),
        **found,
        "binds": f"{longest}, {seconds / found['expected']['seconds']:.0%} of the expected step",
    }
