"""The plan of prefills: which prompts share one, and its shape."""

from __future__ import annotations

import types

import numpy as np
import pytest

from rpg_jax import rollout
from rpg_jax.rollout.schedule import Planner
from rpg_jax.types import Sampling


def chunks(lengths, capacity, prefill_tokens, done=()):
    decoding = rollout.Decoding(slots=8, capacity=capacity, prefill_tokens=prefill_tokens)
    engine = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=50), decoding=decoding)
    prompts = [np.full(n, n % 50, np.int32) for n in lengths]
    request = rollout.Request(prompts, range(len(prompts)), 2, Sampling(max_tokens=8), 0, 0, done=frozenset(done))
    return prompts, *Planner(engine).plan(request)


@pytest.mark.parametrize("max_prompt_tokens", [1, 16, 24, 40, 64])
@pytest.mark.parametrize("prefill_tokens", [1, 100, 512])
def test_the_largest_prefill_has_the_shape_that_a_plan_asks_for(max_prompt_tokens, prefill_tokens):
    capacity = rollout.capacity(max_prompt_tokens, 8)
    expected = rollout.prefill_shape(max_prompt_tokens, capacity, prefill_tokens)
    _, _, made = chunks([max_prompt_tokens] * 40, capacity, prefill_tokens)
    assert made[0].tokens.shape == expected == max(chunk.tokens.shape for chunk in made)


def test_every_prompt_is_in_one_chunk_of_its_length_and_every_row_names_it():
    lengths = [3, 40, 17, 5, 33, 16, 1, 20, 20]
    prompts, groups, made = chunks(lengths, 64, 64)
    assert sum(len(chunk.rows) for chunk in made) == 2 * len(prompts)
    for chunk in made:
        for row in chunk.rows:
            length = chunk.lengths[row.prompt_row]
            np.testing.assert_array_equal(chunk.tokens[row.prompt_row, :length], prompts[row.group])
            assert row in groups[row.group]


def test_prompts_that_are_done_leave_the_prefills_of_the_others_as_they_are():
    lengths = [3, 40, 17, 5, 33, 16, 1, 20, 20]
    done = {1, 3, 4, 7}
    prompts, groups, made = chunks(lengths, 64, 64, done)
    whole = chunks(lengths, 64, 64)[2]
    assert [len(group) for group in groups] == [0 if place in done else 2 for place in range(len(prompts))]
    assert len(made) < len(whole), "a chunk of done prompts alone is left out"
    kept = [chunk for chunk in whole if {row.group for row in chunk.rows} - done]
    for chunk, full in zip(made, kept, strict=True):
        np.testing.assert_array_equal(chunk.tokens, full.tokens)
        assert [row.prompt_row for row in chunk.rows] == [r.prompt_row for r in full.rows if r.group not in done]
