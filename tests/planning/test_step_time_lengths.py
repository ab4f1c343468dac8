"""Means over ragged completions equal sums over drawn ones."""

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


@pytest.mark.parametrize("slots", [16, 128])
def test_decode_steps_are_about_those_of_a_queue_of_completions(drawn, slots):
    own = drawn[:2000]
    lengths = Lengths(PROMPT, own.mean(), own.std() / own.mean(), own.max())
    free = np.zeros(slots)
    for n in own:
        free[free.argmin()] += n
    assert decode_steps(len(own), lengths, slots) == pytest.approx(free.max(), rel=0.15)


def test_one_wave_takes_as_long_as_its_longest_completion(lengths):
    assert decode_steps(10, lengths, slots=16) == decode_steps(16, lengths, slots=16) == lengths.longest
