"""The paper's 8K step on v5p:4x4x4, at the peaks and as expected, against figures worked out by hand.

The rollout, worked by hand for Qwen3-4B with completions of 8,192 tokens on v5p:4x4x4. There
are 1,536 prompts of 300 tokens and 24,576 completions of 4,096 tokens in the mean with a coefficient of variation of
0.6, in 2,560 slots. Each host of four chips has one copy of the weights.

  a token's keys and values    36 layers × 2 × 8 heads × 128 × 2 bytes           = 147,456 bytes
  attended in the mean         300 + (4096 × 1.36 - 1) / 2                       = 3,085 tokens
  cache that is read           24,576 × 4,096 × 3,085 × 147,456 bytes            = 4.58e16 bytes
    over 64 chips              / (64 × 2.765e12 bytes/s)                         = 259 s
  steps                        4,096 × (24,576 - 2,560) / 2,560 + 8,192          = 43,418
  weights that are read        43,418 × 8.04e9 bytes / 4 chips / 2.765e12        = 32 s

With 128 slots the same weights are read 790,528 times, which takes 575 s.
"""

import dataclasses
import functools
import math

import jax
import pytest

from configs import qwen3_4b_8k
from rpg_jax import models
from rpg_jax.planning import compiling, hlo, run_plan, step_time, topologies
from rpg_jax.planning.chips import EXPECTED, PEAKS
from rpg_jax.planning.step_time import DecodeStep, Lengths, decode
from rpg_jax.runs import memory
from rpg_jax.runs.layout import make_layout
from rpg_jax.runs.resolve import resolve

MODEL = models.size("Qwen3-4B")
SLICE = topologies.parse("v5p:4x4x4")
CHIP = SLICE.chip
LENGTHS = Lengths(prompt=300, mean=4096, spread=0.6, limit=8192)
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of keys and values
WEIGHTS = 2 * models.parameter_count(MODEL) / 4  # on each of the four chips of a host


def step(slots, **changes):
    """A decode step of a host with that many slots."""
    products = compiling.token_flops(MODEL, tokens=slots, attended=0, predicted=slots)
    scores = compiling.token_flops(MODEL, tokens=slots, attended=1, predicted=slots) - products
    sizes = dict(fixed=WEIGHTS, cached=slots * TOKEN / 4, products=products / 4, scores=scores / 4)
    return dataclasses.replace(DecodeStep(slots, **sizes), **changes)


@functools.cache
def parts_of(slots, rehearses):
    """The layout of the 8K config on 16 hosts, with that many slots on each, and how it decodes."""
    config = resolve(qwen3_4b_8k.get_config())
    config.rollout.slots, config.train.microbatch_size = slots // 4, 64
    with config.unlocked():
        config.rehearsal.path = rehearses
    layout = make_layout(config, None, host=jax.devices()[:4])
    return dataclasses.replace(layout, decoding_hosts=16), memory.make_decoding(layout)


def phases(rates=EXPECTED, *, slots=160, rehearses=None, launches=0, **more):
    """The phases of a step; "add" has `launches` collectives, and `more` are further programs."""
    layout, decoding = parts_of(slots, rehearses)
    known = programs(add=launches) | more
    known["decode"].costs.bytes = WEIGHTS + memory.cache_bytes(layout, decoding)
    return run_plan.phases(layout, decoding, known, SLICE, LENGTHS, rates)


def programs(**launches):
    """Programs of the step's own operations; "add" has the collectives of `launches`."""

    def program(name, flops):
        costs = hlo.Costs(flops, 1e9, {}, launches.get(name, 0))
        return compiling.Program(0, 0, 0, 0, 0, costs, flops, 0)

    sizes = {"rows": 64, "length": 10_240, "predicted": 10_240}
    update = compiling.training_flops(MODEL, **sizes, remat="full") / 64
    flops = {
        "log-probs": compiling.forward_flops(MODEL, **sizes) / 64,
        "start": update,
        "add": update,
        "apply": 0.0,
        "prefill": compiling.forward_flops(MODEL, rows=1, length=2048, predicted=0) / 4,
        "decode": 0.0,
    }
    return {name: program(name, of) for name, of in flops.items()}


def test_decoding_at_the_peaks_is_the_hand_computation():
    parts = decode(step(160), 1536, LENGTHS, CHIP, PEAKS)
    cache = 24_576 * 4096 * (300 + (4096 * 1.36 - 1) / 2) * 147_456 / 64 / 2.765e12
    weights = (4096 * (24_576 - 2560) / 2560 + 8192) * 8.045e9 / 4 / 2.765e12
    assert (cache, weights) == (pytest.approx(259, abs=1), pytest.approx(32, abs=1))
    assert parts == pytest.approx({"cache": cache, "weights": weights, "latency": 0, "host": 0}, rel=1e-3)
    assert decode(step(8), 1536, LENGTHS, CHIP, PEAKS)["weights"] == pytest.approx(575, abs=2)


def test_a_step_at_the_peaks_is_the_hand_computation_and_at_most_an_eighth():
    assert 0.9 * 355 < sum(phases(PEAKS).values()) < 1.15 * 355


def test_the_parts_of_expected_decoding_add_up_by_hand():
    own = step(64, collectives=75, network=5.4e6)
    parts = decode(own, 1536, LENGTHS, CHIP, EXPECTED)
    steps = 4096 * (1536 - 64) / 64 + 8192
    read = steps * WEIGHTS / 2.765e12 / EXPECTED.hbm
    assert parts["weights"] == pytest.approx(read)  # above the products' time
    latency = 75 * EXPECTED.collective_seconds + 5.4e6 / 540e9 / EXPECTED.ici
    assert parts["latency"] == pytest.approx(steps * latency)
    assert parts["host"] == pytest.approx(steps / 16 * 3e-3)
    read = decode(own, 1536, LENGTHS, CHIP, PEAKS)["cache"]
    assert parts["cache"] == pytest.approx(read / EXPECTED.hbm)


def test_many_slots_are_limited_by_their_products():
    own = step(1536)
    parts = decode(own, 1536, LENGTHS, CHIP, EXPECTED)
    assert parts["weights"] == pytest.approx(8192 * own.products / 459e12 / EXPECTED.flops)


def test_blocks_between_completions_cost_nothing(monkeypatch):
    skipping = phases()
    monkeypatch.setattr(run_plan, "_run", lambda *_: 1.0)
    whole = phases()
    assert skipping["update"] < whole["update"] and skipping["decode: cache"] == whole["decode: cache"]
    attended = LENGTHS.attended_in_training + 512
    few, all_ = (compiling.token_flops(MODEL, tokens=1, attended=n, predicted=1) for n in (attended, 10_240 / 2))
    assert skipping["log-probs"] == pytest.approx(few / all_ * whole["log-probs"])


def test_expected_training_pays_for_every_collective():
    added = phases(launches=100)["update"] - phases()["update"]
    assert added == pytest.approx(16 * 3 * 100 * EXPECTED.collective_seconds)


def test_expected_is_slower_than_the_peaks_in_every_phase():
    least, likely = phases(PEAKS), phases()
    assert all(least[name] < likely[name] for name in ("prefill", "decode: cache", "log-probs", "update"))
    assert all(least[name] <= likely[name] for name in likely)


def test_a_step_has_its_share_of_the_runs_evaluations():
    """41 of 100 problems and 32 completions each, which fill a part of the slots: each takes the longest completion."""
    found = phases(slots=240)
    own = decode(step(240), 200, LENGTHS, CHIP, EXPECTED)
    prefill = found["prefill"] / (1536 / 16 / 4) * math.ceil(100 / 16 / 4)
    # the layout's cache has the length of each slot, too
    assert found["evaluations"] == pytest.approx(41 / 400 * (sum(own.values()) + prefill), rel=1e-4)


def test_hosts_exchange_groups_at_the_rate_of_a_host_beside_the_collective():
    exchange = compiling.Program(0, 0, 0, 0, 0, hlo.Costs(0, 0, {"all-gather": 1.5e9}), 0, 0)
    assert phases(exchange=exchange)["exchange"] == pytest.approx(1.5 + 1.5e9 / 540e9 / EXPECTED.ici)
    assert phases(PEAKS, exchange=exchange)["exchange"] == pytest.approx(1.5e9 / 540e9)


def test_a_step_beside_servers_is_no_shorter_than_the_way_of_the_weights():
    def beside_servers(synced, **seconds):
        return step_time.figures(seconds, SLICE, EXPECTED, steps=400, synced=synced)["seconds_beside_servers"]

    assert beside_servers(0, decode=300, update=60, evaluations=7) == 307
    synced = 256e9  # each of 16 hosts copies and writes 16 s, each server reads 256 s
    assert beside_servers(synced, decode=300, update=60, evaluations=7) == 307
    assert beside_servers(synced, decode=30, update=60) == 16 + 256
    assert beside_servers(synced, decode=30, update=360) == 360 + 16


def test_days_and_dollars_are_those_of_all_steps_on_all_chips():
    figures = step_time.figures({"decode: cache": 300.0, "update": 60.0}, SLICE, EXPECTED, steps=400, synced=0.0)
    assert (figures["seconds"], figures["seconds_beside_servers"]) == (360, 300)
    assert figures["days"] == pytest.approx(400 * 360 / 86_400)
    assert figures["dollars"] == pytest.approx(400 * 360 / 3600 * 64 * 4.20)


def test_rehearsal_adds_micro_batches_to_every_update_and_no_log_prob_pass(monkeypatch):
    monkeypatch.setattr(run_plan, "_run", lambda *_: 1.0)
    plain, more = phases(), phases(rehearses="stored.npz")
    an_add = programs()["add"].expected(CHIP, EXPECTED)
    assert more["update"] - plain["update"] == pytest.approx(16 * an_add)  # 14 stored rows: one micro-batch
    assert more["log-probs"] == plain["log-probs"]
