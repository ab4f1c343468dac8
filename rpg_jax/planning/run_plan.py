"""Plans a run: compiles its programs for a TPU slice, and adds up memory and seconds."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from rpg_jax.models import splash
from rpg_jax.models.sizes import parameter_count
from rpg_jax.parallel import hosts
from rpg_jax.planning import hlo
from rpg_jax.planning.chips import EXCHANGED_BYTES, EXPECTED, HBM_BAND, PACKING, PEAKS, PROMPT_TOKENS, SPREAD, Rates
from rpg_jax.planning.compiling import (
    SAMPLING,
    Program,
    compile_program,
    forward_flops,
    lowered_programs,
    operations,
    token_flops,
)
from rpg_jax.planning.step_time import DecodeStep, Lengths, decode, figures
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
    the compiler refuses a program. `lengths` None: `lengths_of` chooses. Raises ValueError if a program cannot be
    lowered, if `only` has a name that is not compiled, as "exchange", and as `parts_on` and `compile_program`."""
    layout, learner, decoding, held = parts_on(config, topology, only)
    programs, found = {}, dict(lowered_programs(layout, learner, decoding))
    flops = operations(layout, decoding, learner.critic)
    if unknown := sorted(set(only or ()) - set(found)):
        raise ValueError(f"this config has no program {', '.join(unknown)}; it has {', '.join(found)}")
    for name, lowered in found.items():
        if not only or name in only:
            print(f"compiling {name} for {topology.name}", file=sys.stderr, flush=True)
            plain = name == "decode"  # the other branch cuts the distribution, which training never does
            programs[name] = compile_program(lowered, model_flops=flops[name], resident=held[name], cheapest=plain)
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
    """The vocabulary size of the tokenizer `model.tokenizer`; if this field is unset, of a tokenizer that is trained as
    in the run, then deleted. None for a config with `model.path` or `model.size`: then the model says the size."""
    if config.model.path or config.model.size:
        return None
    task, stage = Task.from_config(config), make_stage(config)
    if stage is not None:
        with stage:
            task = task.opened(stage)
    return open_tokenizer(config, task).vocab_size


def lengths_of(config: ConfigDict, *, mean: float = 0, prompt: float = 0) -> Lengths:
    """Returns the lengths that a plan assumes, in tokens. `mean` is the mean of completions; 0: half of
    rollout.max_tokens. `prompt` is the mean of prompts; 0: `PROMPT_TOKENS`, or half of task.max_prompt_tokens if less.
    The spread is `SPREAD`, and the config gives the limits. Raises ValueError for a mean below 0 or above its limit."""
    limit, usual = config.rollout.max_tokens, min(PROMPT_TOKENS, config.task.max_prompt_tokens / 2)
    for flag, field, given in (("mean", "rollout.max_tokens", mean), ("prompt", "task.max_prompt_tokens", prompt)):
        if not 0 <= given <= config[field]:
            raise ValueError(f"--{flag}_tokens={given:g}: at least 0, and at most {field}={config[field]}")
    part = config.rollout.partial_tokens or math.inf
    return Lengths(prompt=prompt or usual, mean=mean or limit / 2, spread=SPREAD, limit=limit, part=part)


def exchange(
    layout: Layout, decoding: Decoding, held: Mapping[str, float], on: Topology, lengths: Lengths
) -> dict[str, Program]:
    """Returns the exchange of a step's groups between hosts as {"exchange": Program}; {} with one host. The program's
    collective has the bytes that a host receives from the others. `held["decode"]` is the bytes that other parts of the
    run hold on a chip meanwhile. A chip also holds the decoding weights, a piece of each host, and its own piece twice.
    """
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


def evaluations_of(config: ConfigDict) -> tuple[int, int]:
    """Returns the number of evaluations of a run, and the most problems that an evaluation of all held-out sets can
    have. A set with more problems than `evaluation.problems`, or of unknown size, counts as `evaluation.problems`."""
    sources = [entry.partition("=")[2] for entry in listed(config.task.held_out_sets or "held out")]
    most = config.evaluation.problems
    number = 1 + math.ceil(config.train.steps / config.evaluation.every)  # before the first step, and after the last
    return number, sum(min(most, HELD_OUT.get(source, most)) for source in sources)


def micro_batches(layout: Layout, lengths: Lengths) -> tuple[int, int]:
    """Returns the whole micro-batches of an update, and further ones with stored completions (`rehearsal.path`)."""
    c, shape = layout.config, row_shape(layout.config)
    # the rows that a completion fills
    filled = (lengths.prompt + lengths.mean) / shape.length / PACKING if shape.packed else 1.0
    stored = rows_per_update(c) / c.rollout.group_size if c.rehearsal.path else 0
    return math.ceil(rows_per_update(c) * filled / shape.rows), math.ceil(stored * filled / shape.rows)


def phases(
    layout: Layout, decoding: Decoding, programs: Mapping[str, Program], on: Topology, lengths: Lengths, rates: Rates
) -> dict[str, float]:
    """Returns the seconds of each phase of a step on the slice `on` at `rates`, with whole micro-batches and
    dispatches, a latency for each collective, and slots that empty in the end. `programs` are all programs by name. The
    wait for the slowest host is left out: 1 to 4 % of decoding on 16 hosts.

    The phases are "prefill", four of "decode: PART", "log-probs" and "update", "baseline" and "exchange" if the run has
    them, and "evaluations": the step's share of the run's evaluations, with completions of the same lengths."""
    c, t, model = layout.config, layout.config.train, layout.model
    share = _run(layout, lengths)
    seconds = {name: p.expected(on.chip, rates, 1.0 if name in SAMPLING else share) for name, p in programs.items()}
    step = decode_step_of(layout, decoding, programs["decode"])
    each = prompts_per_prefill(prompt_bucket(math.ceil(lengths.prompt), decoding.capacity), decoding.prefill_tokens)
    rows, length = prefill_shape(c.task.max_prompt_tokens, decoding.capacity)
    dispatch = forward_flops(model, rows=rows, length=length, predicted=0)

    def sampled(prompts: float, completions: float, lengths: Lengths) -> dict[str, float]:
        own = prompts / layout.decoding_hosts  # hosts take prompts from one list
        parts = decode(step, own * completions, lengths, on.chip, rates)
        # the prefills of a completion's later parts, in dispatches with as many operations
        begun = [(forward_flops(model, rows=1, length=round(n), predicted=0), of) for n, of in lengths.begun]
        again = sum(flops * of for flops, of in begun) / dispatch
        prefill = (math.ceil(own / each) + own * completions * again) * seconds["prefill"]
        return {"prefill": prefill, **{f"decode: {part}": value for part, value in parts.items()}}

    first, stored = micro_batches(layout, lengths)
    batches = first * t.updates_per_step
    if "update" in seconds:
        update = batches * seconds["update"]
    else:
        later = (first - 1 + stored) * t.updates_per_step * seconds["add"]
        update = t.updates_per_step * (seconds["start"] + seconds["apply"]) + later
    found = sampled(memory.prompts_of_a_step(c), c.rollout.group_size, lengths)
    if "exchange" in seconds:
        received = sum(programs["exchange"].costs.collectives.values())
        found["exchange"] = received / rates.host + seconds["exchange"]
    # Passes over the completions, of the behaviour policy and of a reference that differs from it. A pass of a teacher
    # counts as the ratio of its parameters to the policy's.
    policy, reference = parameter_count(model), parameter_count(reference_layout(layout).model)
    of_reference = t.epochs if c.loss.estimator == "exact" else reference_differs(c)
    passes = (not is_on_policy(layout)) + of_reference * reference / policy
    found |= {"log-probs": passes * batches * seconds["log-probs"], "update": t.epochs * update}
    if "baseline" in seconds:
        found["baseline"] = batches * seconds["baseline"]
    evaluations, problems = evaluations_of(c)
    whole = sampled(problems, c.evaluation.k, dataclasses.replace(lengths, part=math.inf))
    return found | {"evaluations": evaluations / t.steps * sum(whole.values())}


def _run(layout: Layout, lengths: Lengths) -> float:
    """Returns the share of a micro-batch's operations that run. In packed rows attention skips blocks without two
    tokens of one completion. A token attends to its completion and, in the mean, at most a block of others."""
    shape = row_shape(layout.config)
    if not shape.packed:
        return 1.0
    attended = min(shape.length / 2, lengths.attended_in_training + splash.BLOCK)
    within, whole = (token_flops(layout.model, tokens=1, attended=n, predicted=1) for n in (attended, shape.length / 2))
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
    ends of `HBM_BAND`. These four are results of `figures`. "binds" is a text with the longest phase of the
    expected step, and its share. Further keys count a step's prompts, with oversampling, completions, micro-batches and
    slots, mean lengths in tokens, the run's steps and evaluations, and as "evaluated" an evaluation's completions."""
    c, prompts = layout.config, memory.prompts_of_a_step(layout.config)
    slowest, fastest = (EXPECTED._replace(hbm=hbm) for hbm in HBM_BAND)
    sides = {"bound": PEAKS, "expected": EXPECTED, "fastest": fastest, "slowest": slowest}
    known = {"steps": c.train.steps, "synced": memory.bytes_of_a_number(layout) * parameter_count(layout.model)}
    found = {
        side: figures(phases(layout, decoding, programs, on, lengths, rates), on, rates, **known)
        for side, rates in sides.items()
    }
    expected, (evaluations, problems) = found["expected"], evaluations_of(c)
    longest, seconds = max(expected["phases"].items(), key=lambda phase: phase[1])
    return {
        "prompts": prompts,
        "completions": prompts * c.rollout.group_size,
        "prompt_tokens": lengths.prompt,
        "mean_tokens": lengths.mean,
        "slots": decoding.slots * layout.decoding_hosts,
        "slots_of_a_chip": decoding.slots * layout.decoding_hosts / on.chips,
        "micro_batches": micro_batches(layout, lengths)[0] * c.train.updates_per_step,
        "steps": c.train.steps,
        "evaluations": evaluations,
        "evaluated": problems * c.evaluation.k,
        **found,
        "binds": f"{longest}, {seconds / expected['seconds']:.0%} of the expected step",
    }
