"""Decode times that users of TPUs have reported, against those that the planner expects.

All are of Qwen3-8B in bf16: marin-community/marin#6229 and #6227 (v6e-8, v5p with four chips), marin#6185 (v6e-8).
"""

import pytest

from rpg_jax import models, planning
from rpg_jax.planning import efficiency
from rpg_jax.planning.step_time import DecodeStep, Lengths, decode_expected

MODEL = models.size("Qwen3-8B")
TOKEN = 36 * 2 * 8 * 128 * 2  # bytes of keys and values


def expected(kind, chips, slots, prompt, tokens):
    """Seconds of prefill and decode of one wave of completions of equal length; a host step for each decode step."""
    chip = planning.CHIPS[kind]
    read = models.parameter_count(MODEL) - MODEL.vocab_size * MODEL.embed_dim  # of the embeddings only some rows
    products = planning.token_flops(MODEL, tokens=slots, attended=0, predicted=slots)
    scores = planning.token_flops(MODEL, tokens=slots, attended=1, predicted=slots) - products
    sizes = {"fixed": 2 * read, "cached": slots * TOKEN, "products": products, "scores": scores}
    step = DecodeStep(slots, **{name: size / chips for name, size in sizes.items()}, collectives=2 * 36 + 2)
    parts = decode_expected(step, slots, Lengths(prompt, tokens, 0, tokens), chip)
    flops = planning.forward_flops(MODEL, rows=slots, length=prompt, predicted=0) / chips
    return flops / chip.flops / efficiency.FLOPS, parts


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
    seconds = prefill + sum(parts.values())
    print(f"{kind}-{chips} {slots} x {prompt}+{tokens}: expected {seconds:.2f} s, reported {reported:.2f} s")
    assert 0.7 * reported < seconds < reported


def test_the_latency_of_a_collective_explains_the_device_time_that_it_was_set_by():
    _, parts = expected("v6e", 8, 8, 2048, 128)
    device = sum(seconds for name, seconds in parts.items() if name != "host")
    assert device == pytest.approx(0.623, rel=0.1)  # Levanter, 127 steps, #6229
