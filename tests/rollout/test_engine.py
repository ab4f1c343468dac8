"""Every driver gives the same completions in float32, beside any other completions."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import tiny
from rpg_jax import losses, models, parallel
from rpg_jax.models.weights import Int8, quantized
from rpg_jax.rollout import LOCAL_DRIVERS, Decoding, GroupJournal, RolloutError, Start, make_rollout
from rpg_jax.rollout.drivers import LockstepRollout
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.memory import make_decoding
from rpg_jax.storage.journal import Journal
from rpg_jax.types import Sampling

DRIVERS_AND_SLOTS = [
    *((driver, 8) for driver in LOCAL_DRIVERS),
    *(pytest.param(driver, 32, marks=pytest.mark.slow) for driver in LOCAL_DRIVERS),
]


@pytest.mark.parametrize(("driver", "slots"), DRIVERS_AND_SLOTS)
def test_every_driver_and_slot_count_gives_the_oracle_s_completions(build, work, expected, is_same, driver, slots):
    told = []
    assert is_same(build(driver, slots).generate(replace(work, on_group=lambda *group: told.append(group))), expected)
    assert is_same([group for _, group in sorted(told, key=lambda place_and_group: place_and_group[0])], expected)


@pytest.mark.parametrize(("driver", "threads"), [("orchestrator", 2), ("lockstep", 4)])
def test_threads_that_decode_their_share_of_the_slots_give_the_same_completions(
    build, work, expected, is_same, driver, threads
):
    """Refilled early, too: the dispatch of one thread may end some steps before that of another."""
    sampler = build(driver, threads=threads, refill=0.5)
    before = dataclasses.replace(sampler.usage)
    assert is_same(sampler.generate(work), expected)
    assert sampler.usage.tokens - before.tokens == sum(len(c.tokens) for group in expected for c in group)


@pytest.mark.slow  # compiles, or waits, for seconds
@pytest.mark.parametrize(("driver", "options"), [("lockstep", {}), ("lockstep", {"threads": 2}), ("orchestrator", {})])
def test_completions_carry_the_experts_that_every_token_of_prompt_and_completion_went_to(
    model_config, work, driver, options
):
    """Of a model in float32, in which the trainer's routers choose the same. A record is not that of a neighbour."""
    config = replace(model_config, experts=models.Experts(16, 3, 16))
    graphdef, params = models.init(config, seed=3)
    decoding = Decoding(capacity=48, slots=8, record_experts=True, refill=0.5, **options)
    sampler = make_rollout(driver, config, graphdef, params, decoding)
    groups = sampler.generate(work)
    sampler.close()
    routed, shifted = jax.jit(nnx.merge(graphdef, params).routed), []
    for prompt, completion in [(p, c) for p, group in zip(work.prompts, groups, strict=True) for c in group]:
        n = len(prompt) + len(completion.tokens)
        tokens = np.zeros((1, 48), np.int32)
        tokens[0, :n] = np.concatenate([prompt, completion.tokens])
        places = np.arange(48)[None]
        expected = routed(tokens, places, (places < n).astype(np.int32))[1][0, :n]
        assert completion.experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(completion.experts), np.sort(expected))
        shifted.append((np.sort(np.roll(completion.experts, 1, 0)) != np.sort(expected)).any())
    assert np.mean(shifted) > 0.9


def test_a_released_slot_is_that_of_its_own_thread(build, work):
    engine = build("lockstep", threads=2).engine
    prefix = engine.prefill(tokens=np.array([[4] * 16], np.int32), lengths=np.array([16], np.int32))
    rows = [(slot, 0, 0, (0, 0, 0, slot), Sampling(max_tokens=24)) for slot in (0, 1, 2, 5)]
    state = engine.insert(prefix, engine.init_decode_state(), rows)
    drawn = engine.fetch(engine.generate(engine.release(state, [1, 2]))[1])
    assert np.flatnonzero(drawn.counts).tolist() == [0, 5]


@pytest.mark.parametrize(
    ("threads", "idle", "even", "odd"),
    [(1, 1, 2, 2), (1, 2, 3, 3), (1, None, 16, 16), (2, 2, 2, 3), (2, 1, 2, 3), (2, 4, 16, 16), (2, None, 16, 16)],
)
def test_a_dispatch_ends_once_enough_slots_are_idle_and_each_thread_s_with_its_share(build, threads, idle, even, odd):
    """Slots 0 and 1 end after 2 and 3 tokens, the others later than the dispatch."""
    engine = build("lockstep", threads=threads).engine
    prefix = engine.prefill(tokens=np.array([[4] * 16], np.int32), lengths=np.array([16], np.int32))
    limits = [2, 3, *[24] * 6]
    rows = [(slot, 0, 0, (0, 0, 0, slot), Sampling(max_tokens=limit)) for slot, limit in enumerate(limits)]
    state = engine.insert(prefix, engine.init_decode_state(), rows)
    counts = engine.fetch(engine.generate(state, idle=idle)[1]).counts
    assert counts.tolist() == [min(limit, odd if slot % 2 else even) for slot, limit in enumerate(limits)]


def test_threads_share_the_slots_of_one_device(model_config):
    config = tiny.get_config()
    config.rollout.threads, config.rollout.prompts_per_step, config.rollout.group_size = 2, 3, 7
    decoding = make_decoding(make_layout(config, model_config.vocab_size, jax.devices()[:1]))
    assert (decoding.slots % 2, decoding.threads) == (0, 2), "unset slots are as many as threads divide"
    for fields, message in [
        ({"slots": 9, "threads": 2}, "2 threads must divide the 9 slots"),
        ({"slots": 8, "threads": 0}, "threads must be >= 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Decoding(capacity=16, **fields)
    mesh = jax.sharding.AbstractMesh((2,), ("replica",))
    with pytest.raises(ValueError, match="2 threads decode on one device, and the mesh has 2"):
        Decoding(slots=8, capacity=16, threads=2, mesh=mesh)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0, max_tokens=24), Sampling(1.2, 0.7, 12, 24, (5,), 0.1), Sampling(max_tokens=1)],
    ids=["greedy", "cut", "one-token"],
)
def test_sampling_parameters_mean_the_same_to_engine_and_oracle(build, work, is_same, sampling):
    asked = replace(work, sampling=sampling)
    oracle = build("simple").generate(asked)
    assert is_same(build("orchestrator").generate(asked), oracle)
    assert is_same(build("lockstep").generate(asked), oracle)


def test_a_completion_depends_on_its_own_counters_and_prompt_only(build, work, expected, is_same):
    sampler = build("orchestrator")
    order = [7, 0, 4]
    prompts, prompt_ids = [work.prompts[i] for i in order], [work.prompt_ids[i] for i in order]
    part = sampler.generate(replace(work, prompts=prompts, prompt_ids=prompt_ids, group_size=3))
    assert is_same(part, [expected[i][:3] for i in order])


@pytest.mark.parametrize("driver", LOCAL_DRIVERS)
def test_every_driver_continues_after_a_kill_to_the_same_bits(build, work, tmp_path, driver):
    def process():
        told = []
        journal = Journal(tmp_path, max_bytes=1 << 20)
        request = replace(work, on_group=lambda place, group: told.append((place, group)))
        groups = build(driver).generate(request, GroupJournal(journal, {}))
        journal.close()
        assert sorted(place for place, _ in told) == list(range(10)) and all(groups[p] == group for p, group in told)
        return [[(c.tokens.tolist(), c.logprobs.tobytes(), c.finish_reason) for c in g] for g in groups], journal

    straight, _ = process()
    file = tmp_path / "3" / "0.groups"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    resumed, journal = process()
    found, sampled = journal.take_counts().values()
    assert 8 < found < 32 and found + sampled == 40
    assert resumed == straight


@pytest.mark.parametrize("change", [{"seed": 12}, {"step": 4}, {"prompt_ids": list(range(10))}])
def test_other_counters_give_other_completions(build, work, expected, change):
    other = build("orchestrator").generate(replace(work, **change))
    differing = [
        a.tokens.tolist() != b.tokens.tolist()
        for x, y in zip(other, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert np.mean(differing) > 0.8
    first = expected[0]
    assert len({tuple(c.tokens) for c in first}) > 1


def test_the_stop_token_is_kept_and_nothing_follows_it(expected, work):
    completions = [c for group in expected for c in group]
    stops = set(work.sampling.stop_token_ids)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert len(c.tokens) == len(c.logprobs) <= work.sampling.max_tokens
        assert not stops & set(c.tokens[:-1].tolist())
        assert (c.finish_reason == "stop") == (int(c.tokens[-1]) in stops)
        assert c.finish_reason == "stop" or len(c.tokens) == work.sampling.max_tokens


def test_logprobs_are_those_of_the_trainer_s_forward(build, model, work):
    graphdef, params = model
    module = nnx.merge(graphdef, params)
    groups = build("orchestrator").generate(work)
    rows = [(prompt, c) for prompt, group in zip(work.prompts, groups, strict=True) for c in group]
    width = 44
    tokens, segments = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
    for row, (prompt, c) in enumerate(rows):
        n = len(prompt) + len(c.tokens)
        tokens[row, :n], segments[row, :n] = np.concatenate([prompt, c.tokens]), 1
    hidden = module(tokens, np.tile(np.arange(width, dtype=np.int32), (len(rows), 1)), segments)
    logprobs, _ = losses.token_logprobs(
        hidden[:, :-1], module.head(), jnp.asarray(tokens[:, 1:]), temperature=work.sampling.temperature
    )
    for row, (prompt, c) in enumerate(rows):
        start = len(prompt) - 1
        np.testing.assert_allclose(c.logprobs, logprobs[row, start : start + len(c.tokens)], atol=1e-5)


def test_completions_carry_the_version_of_the_weights_that_sampled_them(build, model, work):
    _, params = model
    sampler = build("orchestrator")
    moved = jax.tree.map(lambda x: x * 1.5, params)
    sampler.sync_weights(moved, 17)
    try:
        other = sampler.generate(work)
    finally:
        sampler.sync_weights(params, 0)
    assert {c.weight_version for group in other for c in group} == {17}
    assert {c.weight_version for group in sampler.generate(work) for c in group} == {0}


def test_nothing_is_compiled_after_warm_up(build, model, work, is_same, expected):
    _, params = model
    samplers = [build(driver) for driver in ("orchestrator", "lockstep")]
    newer = jax.block_until_ready(jax.tree.map(lambda x: x + 0, params))
    for sampler in samplers:
        sampler.generate(work)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    jax.block_until_ready(jax.jit(lambda x: x * 3)(1.0))
    assert compiled, "the listener does not see compilations"
    compiled.clear()
    for sampler in samplers:
        sampler.sync_weights(newer, 1)
        changed = replace(work, seed=99, step=8, sampling=replace(work.sampling, temperature=1.1))
        sampler.generate(changed)
        sampler.generate(replace(changed, sampling=Sampling(0.5, 0.9, 3, 6, (1, 2, 3))))
        sampler.sync_weights(params, 0)
        assert is_same(sampler.generate(work), expected)
    assert compiled == []


@pytest.mark.parametrize("driver", LOCAL_DRIVERS)
def test_requests_that_cannot_be_served_are_clear_errors(build, work, driver):
    sampler = build(driver)

    def ask(**change):
        return sampler.generate(replace(work, **{"prompts": work.prompts[:1], "prompt_ids": [0]} | change))

    for change, message in [
        ({"prompts": [np.zeros(0, np.int32)]}, "at least one token"),
        ({"prompts": [np.ones(30, np.int32)]}, "does not fit a slot of 48"),
        ({"prompts": [np.array([50])]}, r"vocabulary is 0\.\.49"),
        ({"prompt_ids": [1, 2]}, "one id per prompt"),
        ({"group_size": 0}, "group_size must be >= 1"),
        ({"sampling": Sampling(stop_token_ids=tuple(range(9)))}, "at most 8 stop tokens"),
        ({"sampling": Sampling(stop_token_ids=(5, 50))}, r"stop tokens must be in the vocabulary 0\.\.49"),
        ({"sampling": Sampling(top_k=2**31)}, r"top_k must be below 2\^31"),
        ({"environment": object(), "starts": [Start(0, 0, 4, index=0, drawn=1)]}, "is drawn in one request"),
    ]:
        with pytest.raises(ValueError, match=message):
            ask(**change)
    assert ask(prompts=[], prompt_ids=[]) == []


@pytest.mark.parametrize("driver", LOCAL_DRIVERS)
def test_weights_that_give_no_numbers_are_an_error_and_the_next_call_is_right(
    build, model, work, expected, is_same, driver
):
    _, params = model
    sampler = build(driver)
    sampler.sync_weights({**params, "final_norm": params["final_norm"] * jnp.nan}, 1)
    with pytest.raises(RolloutError, match="non-finite"):
        sampler.generate(work)
    sampler.sync_weights(params, 0)
    assert is_same(sampler.generate(work), expected)


def test_donated_weights_are_an_error_at_the_call_that_needs_them(build, model, work, expected, is_same):
    _, params = model
    sampler = build("orchestrator")
    gone = jax.tree.map(lambda x: x + 0, params)
    sampler.sync_weights(gone, 1)
    jax.tree.map(lambda x: x.delete(), gone)
    with pytest.raises(RolloutError, match="deleted"):
        sampler.generate(work)
    sampler.sync_weights(params, 0)
    assert is_same(sampler.generate(work), expected)


def test_an_unknown_driver_names_the_known_ones(build):
    with pytest.raises(ValueError, match="orchestrator, lockstep, servers"):
        build("vllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sharding"),
    [
        ({"fsdp": 4, "tensor": 2}, "embed="),
        ({"replica": 8}, "embed="),
        ({"fsdp": 4, "tensor": 2}, "embed=tensor+fsdp,vocab=,heads=,kv_heads=,hidden="),
        ({"context": 2, "tensor": 2, "replica": 2}, "embed=context+replica,layers=tensor,heads=,kv_heads=,hidden="),
        ({"fsdp": 4, "tensor": 2}, "slots=,batch=,hidden=fsdp+tensor,embed=,kv_heads="),
    ],
)
def test_decoding_spread_over_a_mesh_gives_the_same_completions(
    make, model_config, model, work, expected, is_same, shape, sharding
):
    """Lockstep over the mesh; weights in the decoding layout."""
    _, params = model
    mesh = parallel.make_mesh(shape)
    rules = parallel.parse_rules(sharding)
    layout = parallel.shardings(models.logical_axes(model_config), params, mesh, rules)
    made = make("lockstep", *model, slots=8, mesh=mesh, rules=rules, shardings=layout)
    assert is_same(made.generate(work), expected)
    made.weights.verify(params)


@pytest.mark.slow  # programs of its own
def test_more_devices_than_key_value_heads_share_a_copy_of_the_weights(
    make, model_config, model, work, expected, is_same
):
    config, (graphdef, params) = tiny.get_config(), model
    sizes = dataclasses.asdict(model_config)
    config.model.update({name: size for name, size in sizes.items() if name in config.model})
    config.rollout.tensor, config.rollout.slots = 4, 8
    config.sharding = "vocab="  # of 50
    decoding = make_decoding(make_layout(config, sizes["vocab_size"]))
    assert (decoding.mesh.shape["tensor"], sizes["num_kv_heads"]) == (4, 2)
    others = {name: value for name, value in vars(decoding).items() if name != "capacity"}
    made = make("lockstep", graphdef, params, **others)
    assert is_same(made.generate(work), expected)


@pytest.mark.parametrize("compute_dtype, precision", [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_a_float32_model_decodes_with_float32_products(make, model_config, compute_dtype, precision):
    model = models.init(model_config, compute_dtype=compute_dtype)
    made = make("lockstep", *model, slots=8)
    for program in made.engine.lower(2, 16).values():
        products = [line for line in program.as_text().splitlines() if "dot_general" in line]
        assert len(products) > 5
        assert all(f"precision = [{precision}, {precision}]" in line for line in products)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["orchestrator", pytest.param("lockstep", marks=pytest.mark.slow)])
def test_slots_stay_busy_until_nothing_waits(build, work, driver):
    """64 prompts x 16 completions of 1 to 24 tokens through 32 slots: at least 90 % of the slot-steps draw a token."""
    sampler = build(driver, 32)
    prompts = [work.prompts[i % 10] for i in range(64)]
    before = replace(sampler.usage)
    groups = sampler.generate(replace(work, prompts=prompts, prompt_ids=range(64), group_size=16))
    lengths = {len(c.tokens) for group in groups for c in group}
    assert min(lengths) <= 2 and max(lengths) == 24
    steps = sampler.usage.queued_steps - before.queued_steps
    tokens = sampler.usage.queued_tokens - before.queued_tokens
    assert tokens >= 0.9 * 32 * steps > 0


@pytest.mark.slow
def test_decoding_in_eight_bits_is_decoding_of_the_rounded_weights(make, model, work, is_same):
    graphdef, params = model
    made = make("lockstep", *model, slots=8, int8=True)
    expand = {"is_leaf": lambda x: isinstance(x, Int8)}
    rounded = jax.tree.map(lambda x: x[...] if isinstance(x, Int8) else x, quantized(params), **expand)
    plain = make("simple", graphdef, rounded, slots=8)
    assert is_same(made.generate(work), plain.generate(work))
    made.weights.verify(params)


@pytest.mark.slow  # programs of its own
@pytest.mark.parametrize("driver", ["orchestrator", "lockstep"])
def test_with_keys_and_values_in_eight_bits_engine_and_oracle_agree(build, work, expected, is_same, driver):
    few = replace(work, prompts=work.prompts[:4], prompt_ids=work.prompt_ids[:4])
    oracle = build("simple", int8_kv=True).generate(few)
    assert is_same(build(driver, int8_kv=True).generate(few), oracle)
    assert not is_same(oracle, expected[:4])
    first = [
        (x.logprobs[0], y.logprobs[0])
        for a, b in zip(oracle, expected, strict=False)
        for x, y in zip(a, b, strict=True)
    ]
    np.testing.assert_allclose(*zip(*first, strict=True), atol=5e-6)  # the first token's cache is not yet read


def test_prompts_whose_completions_are_expected_to_be_long_are_begun_first(build, work, monkeypatch):
    engine = build("lockstep").engine
    monkeypatch.setattr(engine, "decoding", replace(engine.decoding, prefill_tokens=16))
    sampler = LockstepRollout(engine)
    order, original = [], sampler.engine.prefill

    def prefill(**asked):
        order.append(asked["lengths"].tolist())
        return original(**asked)

    monkeypatch.setattr(sampler.engine, "prefill", prefill)
    one_a_time = replace(work, prompts=[np.full(n, n, np.int32) for n in (9, 10, 11)], prompt_ids=[9, 10, 11])
    for expected, first in [(None, [11, 10, 9]), ([5, 4, 3], [9, 10, 11]), ([1, 3, None], [10, 11, 9])]:
        sampler.generate(replace(one_a_time, expected=expected))
        assert order == [[n] for n in first], "without lengths of completions, the longest prompts"
        order.clear()
