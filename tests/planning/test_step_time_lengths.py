"""Means over ragged completions equal sums over drawn ones."""

import math

import numpy as np
import pytest

from rpg_jax.planning.step_time import Lengths, decode_steps

PROMPT = 30


@pytest.fixture(scope="module")
def drawn():
    return np.random.default_rng(0).gamma(3, 40, 20_000).astype(int) + 1


@pytest.fixture(scope="module")
def lengths(drawn):
    return Lengths(PROMPT, drawn.mean(), drawn.std() / drawn.mean(), 10_000)


def test_a_decoded_token_attends_to_the_prompt_and_what_was_decoded_before(drawn, lengths):
    reads = sum(np.arange(PROMPT, PROMPT + n).sum() for n in drawn)
    assert lengths.attended == pytest.approx(reads / drawn.sum())


def test_a_token_of_training_attends_to_half_of_its_sequence_in_the_mean_over_sequences(drawn, lengths):
    pairs = ((PROMPT + drawn) ** 2 / 2).sum()
    assert lengths.attended_in_training == pytest.approx(pairs / (PROMPT + drawn).sum())


def test_the_longest_completion_is_at_the_limit_or_four_deviations_away():
    assert Lengths(PROMPT, 4096, 0.6, 8192).longest == 8192
    assert Lengths(PROMPT, 500, 0.5, 8192).longest == 1500


def parts_of(lengths, part):
    """The lengths of the parts of these completions: whole parts, and a rest."""
    return np.concatenate([np.minimum(lengths[lengths > n] - n, part) for n in range(0, lengths.max(), part)])


@pytest.mark.parametrize("part", [None, 120, 60], ids=["whole", "parts of 120", "parts of 60"])
@pytest.mark.parametrize("slots", [16, 128, 2000])
def test_decode_steps_are_about_those_of_a_queue_of_completions(drawn, slots, part):
    own = drawn[:2000]
    lengths = Lengths(PROMPT, own.mean(), own.std() / own.mean(), own.max(), part or math.inf)
    free = np.zeros(slots)
    for n in own if part is None else np.random.default_rng(0).permutation(parts_of(own, part)):
        free[free.argmin()] += n
    assert decode_steps(len(own), lengths, slots) == pytest.approx(free.max(), rel=0.15 if part is None else 0.2)


def test_a_later_part_is_prefilled_for_the_completions_that_are_longer(drawn):
    part = 60
    lengths = Lengths(PROMPT, drawn.mean(), drawn.std() / drawn.mean(), drawn.max(), part)
    starts = range(part, drawn.max(), part)
    assert sum(share for _, share in lengths.begun) == pytest.approx(sum((drawn > n).mean() for n in starts), rel=0.05)
    read = sum(n * share for n, share in lengths.begun)
    assert read == pytest.approx(sum((PROMPT + n) * (drawn > n).mean() for n in starts), rel=0.1)


def test_one_wave_takes_as_long_as_its_longest_completion(lengths):
    assert decode_steps(10, lengths, slots=16) == decode_steps(16, lengths, slots=16) == lengths.longest
