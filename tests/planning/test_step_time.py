"""Bound and expected time of the paper's 8K step on v5p:4x4x4, against figures worked out by hand."""

import dataclasses
import math

import pytest

from rpg_jax import models, planning
from rpg_jax.planning import efficiency, step_time
from rpg_jax.planning.step_time import DecodeStep, Lengths, decode_bound, decode_expected

MODEL = models.size("Qwen3-4B")
SLICE = planning.parse("v5p:4x4x4")
CHIP = SLICE.chip
LENGTHS = Lengths(prompt=300, mean=4096, spread=0.6, limit=8192)
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of keys and values
WEIGHTS = 2 * models.parameter_count(MODEL) / 4  # on each of the four chips of a host


def step(slots, **changes):
    """A decode step of a host with that many slots."""
    products = planning.token_flops(MODEL, tokens=slots, attended=0, predicted=slots)
    scores = planning.token_flops(MODEL, tokens=slots, attended=1, predicted=slots) - products
    sizes = dict(fixed=WEIGHTS, cached=slots * TOKEN / 4, products=products / 4, scores=scores / 4)
    return dataclasses.replace(DecodeStep(slots, **sizes), **changes)


WORK = step_time.Work(
    steps=400,
    prompts=1536,
    trained=512,
    group_size=16,
    lengths=LENGTHS,
    meshes=16,
    prefill_prompts=4,
    updates=16,
    epochs=1,
    passes=1,
    micro_batch=(64, 10_240),
    packed=True,
    remat="full",
)


def programs(**launches):
    """Programs of the step's own operations; "add" has the collectives of `launches`."""

    def program(name, flops):
        costs = planning.Costs(flops, 1e9, {}, launches.get(name, 0))
        return planning.Program(name, 0, 0, 0, 0, 0, costs, flops, 0)

    sizes = {"rows": 64, "length": 10_240, "predicted": 10_240}
    update = planning.training_flops(MODEL, **sizes, remat="full") / 64
    flops = {
        "log-probs": planning.forward_flops(MODEL, **sizes) / 64,
        "start": update,
        "add": update,
        "apply": 0.0,
        "prefill": planning.forward_flops(MODEL, rows=1, length=2048, predicted=0) / 4,
        "decode": 0.0,
    }
    return {name: program(name, of) for name, of in flops.items()}


def test_the_bound_of_decoding_is_the_hand_computation():
    limits = decode_bound(step(160), 1536, LENGTHS, CHIP)
    cache = 24_576 * 4096 * (300 + (4096 * 1.36 - 1) / 2) * 147_456 / 64 / 2.765e12
    weights = 24_576 * 4096 / 2560 * 8.045e9 / 4 / 2.765e12
    assert (cache, weights) == (pytest.approx(259, abs=1), pytest.approx(29, abs=1))
    assert limits["HBM"] == pytest.approx(cache + weights, rel=1e-3)
    assert limits["compute"] < limits["HBM"] and limits["ICI"] == 0
    few = decode_bound(step(8), 1536, LENGTHS, CHIP)["HBM"]
    assert few - cache == pytest.approx(572, abs=2)


def test_the_bound_of_the_step_is_at_most_the_hand_computation_and_an_eighth():
    total = step_time.bound(WORK, step(160), programs(), MODEL, SLICE).total
    assert 0.9 * 355 < total < 1.15 * 355


def test_the_parts_of_expected_decoding_add_up_by_hand():
    own = step(64, collectives=75, network=5.4e6)
    parts = decode_expected(own, 1536, LENGTHS, CHIP)
    steps = 4096 * (1536 - 64) / 64 + 8192
    assert parts["weights"] == pytest.approx(steps * WEIGHTS / 2.765e12 / efficiency.HBM)  # above the products' time
    latency = 75 * efficiency.COLLECTIVE_SECONDS + 5.4e6 / 540e9 / efficiency.ICI
    assert parts["latency"] == pytest.approx(steps * latency)
    assert parts["host"] == pytest.approx(steps / 16 * 3e-3)
    read = decode_bound(dataclasses.replace(own, fixed=0), 1536, LENGTHS, CHIP)["HBM"]
    assert parts["cache"] == pytest.approx(read / efficiency.HBM)


def test_many_slots_are_limited_by_their_products():
    own = step(1536)
    parts = decode_expected(own, 1536, LENGTHS, CHIP)
    assert parts["weights"] == pytest.approx(8192 * own.products / 459e12 / efficiency.FLOPS)


def test_an_update_takes_whole_micro_batches():
    rows = 512 * 4396 / 10_240 / efficiency.PACKING  # 224 of an update
    assert WORK.micro_batches == math.ceil(rows / 64) == 4
    assert dataclasses.replace(WORK, packed=False).micro_batches == 512 / 64


def test_blocks_between_completions_cost_nothing():
    whole = step_time.expected(WORK, step(160), programs(), SLICE)
    skipping = step_time.expected(dataclasses.replace(WORK, run=0.8), step(160), programs(), SLICE)
    assert skipping.training < whole.training and skipping.rollout == whole.rollout
    assert skipping.seconds["log-probs"] == pytest.approx(0.8 * whole.seconds["log-probs"])


def test_expected_training_pays_for_every_collective():
    few = step_time.expected(WORK, step(160), programs(), SLICE)
    many = step_time.expected(WORK, step(160), programs(add=100), SLICE)
    added = many.seconds["update"] - few.seconds["update"]
    assert added == pytest.approx(16 * 3 * 100 * efficiency.COLLECTIVE_SECONDS)


def test_expected_is_slower_than_the_bound_in_every_phase():
    least = step_time.bound(WORK, step(160), programs(), MODEL, SLICE).seconds
    likely = step_time.expected(WORK, step(160), programs(), SLICE).seconds
    for name in ("prefill", "log-probs", "update"):
        assert least[name] < likely[name]
    assert least["decode"] < sum(s for name, s in likely.items() if name.startswith("decode"))


def test_days_and_dollars_are_those_of_all_steps_on_all_chips():
    found = step_time.Phases({"decode: cache": 300.0, "update": 60.0}, WORK, SLICE)
    assert (found.rollout, found.training, found.beside_servers) == (300, 60, 300)
    figures = found.as_dict()
    assert figures["days"] == pytest.approx(400 * 360 / 86_400)
    assert figures["dollars"] == pytest.approx(400 * 360 / 3600 * 64 * 4.20)
    assert step_time.binding(found) == "decode: cache, 83% of the expected step"
