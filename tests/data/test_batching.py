from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rpg_jax.data.batching import bucket_length, pack_completions, pad_completions, pad_supervised
from rpg_jax.types import Completion


def completion(tokens, finish_reason="stop") -> Completion:
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32) / 10, finish_reason, 0)


def random_groups(seed=0, prompts=5, group=3):
    rng = np.random.default_rng(seed)
    return (
        [rng.integers(1, 50, rng.integers(1, 9)).astype(np.int32) for _ in range(prompts)],
        [[completion(rng.integers(1, 50, rng.integers(1, 12))) for _ in range(group)] for _ in range(prompts)],
        rng.normal(size=(prompts, group)).astype(np.float32),
    )


def test_a_row_is_prompt_then_completion_then_padding():
    batch = pad_completions([[7, 8]], [[completion([3, 4, 1])]], [[0.5]], pad_id=9, row_length=8, completion_length=4)
    assert batch.tokens.tolist() == [[7, 8, 3, 4, 1, 9, 9, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.predictors.tolist() == [[1, 2, 3, 0]]
    assert batch.targets.tolist() == [[3, 4, 1, 9]]
    assert batch.completion_ids.tolist() == [[1, 1, 1, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 0]]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0.5, 0]]
    np.testing.assert_array_equal(batch.sampler_logprobs, np.float32([[-0.3, -0.4, -0.1, 0]]))


def completions_of(batch):
    """Each completion of a batch as (prompt, targets, positions, log-probs, advantages, mask), sorted."""
    found = []
    for b in range(len(batch.tokens)):
        for index in range(1, batch.completion_ids[b].max() + 1):
            entries, span = batch.completion_ids[b] == index, batch.segment_ids[b] == index
            assert (batch.tokens[b][batch.predictors[b][entries] + 1] == batch.targets[b][entries]).all()
            assert (batch.segment_ids[b][batch.predictors[b][entries]] == index).all()
            row = (batch.tokens[b][span], batch.positions[b][span], batch.targets[b][entries])
            row += (batch.sampler_logprobs[b][entries], batch.advantages[b][entries], batch.mask[b][entries])
            found.append(tuple(tuple(x.tolist()) for x in row))
    return sorted(found)


def test_packed_rows_hold_the_padded_completions():
    groups = random_groups()
    padded, packed = pad_completions(*groups), pack_completions(*groups, row_length=40)
    assert len(packed.tokens) < len(padded.tokens) == 15
    assert completions_of(packed) == completions_of(padded)
    assert (packed.segment_ids > 0).sum() == (padded.segment_ids > 0).sum()


def test_per_token_advantages_and_ragged_groups():
    groups = [[completion([1, 2]), completion([3])], [completion([4, 5, 6])]]
    batch = pad_completions([[7], [8, 9]], groups, [[[1, 2, 0], [3, 0, 0]], [[4, 5, 6]]], completion_length=3)
    assert batch.advantages.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


def test_truncated_completions_can_be_left_out_of_the_loss():
    groups = [[completion([1, 2], "length"), completion([3, 4])]]
    assert pad_completions([[7]], groups, [[1, 1]], completion_length=2, mask_truncated=True).mask.tolist() == [
        [0, 0],
        [1, 1],
    ]
    assert pad_completions([[7]], groups, [[1, 1]], completion_length=2).mask.all()


def test_shapes_are_static_where_given_and_bucketed_where_not():
    groups = random_groups()
    given = pad_completions(*groups, rows=20, row_length=33, completion_length=12)
    assert given.tokens.shape == (20, 33) and given.mask.shape == (20, 12)
    assert not given.segment_ids[15:].any() and not given.mask[15:].any() and not given.completion_ids[15:].any()
    assert {pad_completions(*random_groups(seed)).tokens.shape[1] for seed in range(20)} <= {16, 20, 24}
    for field in dataclasses.fields(given):
        array = getattr(given, field.name)
        assert array is None or array.dtype in (np.int32, np.float32)


def test_buckets_waste_at_most_a_quarter():
    for n in range(17, 5000):
        assert n <= bucket_length(n) < n * 1.25 + 4
    assert bucket_length(2049, maximum=2100) == 2100
    assert len({bucket_length(n) for n in range(1, 5000)}) < 40


def test_supervised_rows_are_completions_of_advantage_one():
    batch = pad_supervised([([5, 6], [7, 1]), ([5], [8, 9, 1])], completion_length=3)
    assert batch.targets.tolist() == [[7, 1, 0], [8, 9, 1]]
    assert batch.advantages.tolist() == batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_mismatched_input_is_refused():
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        pad_completions([[]], [[completion([1])]], [[1]])
    with pytest.raises(ValueError, match="2 completions and 1 advantages"):
        pad_completions([[1]], [[completion([1])] * 2], [[1]])
    with pytest.raises(ValueError, match="1 prompts, 2 groups"):
        pad_completions([[1]], [[completion([1])]] * 2, [[1], [1]])
    with pytest.raises(ValueError, match="row_length=4 is too small: this batch needs 6"):
        pad_completions([[1] * 5], [[completion([1])]], [[1]], row_length=4)
    with pytest.raises(ValueError, match="above row_length=4"):
        pack_completions([[1] * 5], [[completion([1])]], [[1]], row_length=4)
    with pytest.raises(ValueError, match="above the limit of 4"):
        bucket_length(5, maximum=4)
