"""Decode times that users of TPUs have reported, against those that the planner expects.

All are of Qwen3-8B in bf16: marin-community/marin#6229 and #6227 (v6e-8, v5p with four chips), marin#6185 (v6e-8), and
sglang-jax on v6e-4.
"""

from pathlib import Path

import pytest

from rpg_jax import models
from rpg_jax.planning import compiling
from rpg_jax.planning.chips import CHIPS, EXPECTED, HBM_BAND
from rpg_jax.planning.step_time import DecodeStep, Lengths, decode

ROOT = Path(__file__).parents[2]
MODEL = models.size("Qwen3-8B")
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of keys and values


def expected(kind, chips, slots, prompt, tokens, hbm=EXPECTED.hbm):
    """Seconds of prefill and decode of one wave of completions of equal length; a host step for each decode step."""
    chip = CHIPS[kind]
    read = models.parameter_count(MODEL) - MODEL.vocab_size * MODEL.embed_dim  # of the embeddings only some rows
    products = compiling.token_flops(MODEL, tokens=slots, attended=0, predicted=slots)
    scores = compiling.token_flops(MODEL, tokens=slots, attended=1, predicted=slots) - products
    sizes = {"fixed": 2 * read, "cached": slots * TOKEN, "products": products, "scores": scores}
    step = DecodeStep(slots, **{name: size / chips for name, size in sizes.items()}, collectives=2 * 36 + 2)
    rates = EXPECTED._replace(hbm=hbm)
    parts = decode(step, slots, Lengths(prompt, tokens, 0, tokens), chip, rates)
    flops = compiling.forward_flops(MODEL, rows=slots, length=prompt, predicted=0) / chips
    return flops / chip.flops / EXPECTED.flops, parts


# Milliseconds between two tokens of sglang-jax on v6e-4 in bf16 (sgl-project/sglang-jax, docs/cookbook/base/benchmarks/
# qwen3_benchmark.md, 2025-09-12): prompts and completions of 1,024 tokens, of 4,096 + 1,024, of 8,192 + 1,024. Five
# rows are left out: their batches are larger than its memory holds, and the time does not grow with them.
SGLANG = [
    *((1024, slots, ms) for slots, ms in ((8, 5.99), (16, 6.62), (32, 8.18), (64, 11.11), (128, 17.06), (256, 30.0))),
    *((4096, slots, ms) for slots, ms in ((8, 6.61), (16, 9.0), (32, 13.48), (64, 21.13))),
    *((8192, slots, ms) for slots, ms in ((8, 7.98), (16, 11.48), (32, 19.22))),
]


@pytest.mark.parametrize(
    ("kind", "chips", "slots", "prompt", "tokens", "reported"),
    [
        ("v6e", 8, 8, 2048, 128, 8 * 128 / 1264.03),  # vLLM, #6229
        ("v6e", 8, 32, 512, 512, 32 * 512 / 4880.32),  # vLLM, #6185
        ("v5p", 4, 32, 512, 512, 32 * 512 / 5215.67),  # vLLM, #6227
    ],
)
def test_a_reported_batch_takes_somewhat_longer_than_expected(kind, chips, slots, prompt, tokens, reported):
    prefill, parts = expected(kind, chips, slots, prompt, tokens)
    assert 0.78 * reported < prefill + sum(parts.values()) < reported


def test_reported_decode_steps_lie_about_what_is_expected_and_large_batches_within_the_band():
    """The table of docs/plan.md: reported and expected milliseconds, and their ratio."""
    lines = []
    for prompt, slots, reported in SGLANG:
        band = [
            sum(expected("v6e", 4, slots, prompt, 1024, hbm)[1].values()) / 1.024 for hbm in (EXPECTED.hbm, *HBM_BAND)
        ]
        lines.append(f"| {slots}, {prompt:,} + 1,024 | {reported:.1f} | {band[0]:.1f} | {band[0] / reported:.2f} |")
        assert 0.8 < band[0] / reported < 1.3, (prompt, slots)
        if slots >= 32:
            assert band[2] < reported < band[1], (prompt, slots)
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [line for line in lines if line not in page] == []


def test_the_latency_of_a_collective_explains_the_device_time_that_it_was_set_by():
    _, parts = expected("v6e", 8, 8, 2048, 128)
    device = sum(seconds for name, seconds in parts.items() if name != "host")
    assert device == pytest.approx(0.623, rel=0.1)  # Levanter, 127 steps, #6229
