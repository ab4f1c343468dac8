"""Completions find their rows and come back, padded, packed, split into mini-batches and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.data import RowShape, pack
from rpg_jax.types import BRANCH, Completion, Turns


class Prompted(NamedTuple):
    prompt: np.ndarray
    completions: list[Completion]

    @property
    def counted(self):
        return [True] * len(self.completions)


def completion(tokens, finish_reason="stop") -> Completion:
    return Completion(np.array(tokens, np.int32), -np.array(tokens, np.float32) / 10, finish_reason, 0)


def group(prompt, *completions) -> Prompted:
    return Prompted(
        np.array(prompt, np.int32), [c if isinstance(c, Completion) else completion(c) for c in completions]
    )


def random_groups(seed=0, prompts=5, size=3):
    rng = np.random.default_rng(seed)
    return [
        group(rng.integers(1, 50, rng.integers(1, 9)), *(rng.integers(1, 50, rng.integers(1, 12)) for _ in range(size)))
        for _ in range(prompts)
    ]


def test_a_row_is_prompt_then_completion_then_padding():
    packed = pack([group([7, 8], [3, 4, 1])], RowShape(1, 8, 4), pad_id=9)
    rows = packed.batches[0].rows
    assert rows.tokens.tolist() == [[7, 8, 3, 4, 1, 9, 9, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert rows.predictors.tolist() == [[1, 2, 3, 0]]
    assert rows.targets.tolist() == [[3, 4, 1, 9]]
    assert rows.completion_ids.tolist() == [[1, 1, 1, 0]]
    assert rows.mask.tolist() == [[1, 1, 1, 0]]
    np.testing.assert_array_equal(packed.batches[0].sampler_logprobs, np.float32([[-0.3, -0.4, -0.1, 0]]))
    assert packed.scatter([[0.5]])[0].tolist() == [[0.5, 0.5, 0.5, 0]]


def test_completions_of_a_prompt_share_its_tokens():
    shape = RowShape(1, 12, 12, packed=True, shared=True)
    packed = pack([group([7, 8], [3, 4, 1], [5, 1]), group([6], [2, 1])], shape, pad_id=9)
    rows = packed.batches[0].rows
    first, second = 1 + BRANCH, 1 + 2 * BRANCH
    assert rows.tokens.tolist() == [[7, 8, 3, 4, 1, 5, 1, 6, 2, 1, 9, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, *[first] * 3, *[second] * 2, 2, 2 + BRANCH, 2 + BRANCH, 0, 0]]
    assert rows.predictors.tolist() == [[1, 2, 3, 1, 5, 7, 8, 0, 0, 0, 0, 0]]
    assert rows.targets.tolist() == [[3, 4, 1, 5, 1, 2, 1, *[9] * 5]]
    assert rows.completion_ids.tolist() == [[1, 1, 1, 2, 2, 3, 3, *[0] * 5]]
    apart = pack([group([7, 8], [3, 4, 1], [5, 1]), group([6], [2, 1])], shape._replace(shared=False))
    assert len(packed.batches) == 1 and len(apart.batches) == 1 and apart.batches[0].rows.segment_ids.max() == 3


def test_a_group_that_fills_several_rows_has_its_prompt_once_in_each():
    groups = [group([7, 8, 9], *[[n, n, n, 1] for n in (2, 3, 4, 5)]), group([6], [2, 2, 1])]
    made = pack(groups, RowShape(3, 11, 11, packed=True, shared=True))
    rows = made.batches[0].rows.tokens.tolist()
    assert rows[:2] == [[7, 8, 9, 2, 2, 2, 1, 3, 3, 3, 1], [7, 8, 9, 4, 4, 4, 1, 5, 5, 5, 1]]
    assert rows[2][:4] == [6, 2, 2, 1] and len(made.batches) == 1


def conversation(tokens, observed, finish_reason="stop"):
    one = completion(tokens, finish_reason)
    return dataclasses.replace(one, turns=Turns(np.isin(one.tokens, observed), np.zeros(2, np.float32)))


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_that_an_environment_wrote_are_read_and_not_trained(packed):
    groups = [group([7], conversation([3, 5, 6, 4], [5, 6]), conversation([2, 8, 2], [8], "length"))]
    shape = RowShape(1, 9, 7, packed) if packed else RowShape(2, 5, 4)
    made = pack(groups, shape)
    without = pack([group([7], [3, 5, 6, 4], completion([2, 8, 2], "length"))], shape)
    assert made.trained == [[2, 2]]
    for batch, plain in zip(made.batches, without.batches, strict=True):
        assert batch.rows.mask.tolist() == (plain.rows.mask * ~np.isin(plain.rows.targets, [5, 6, 8])).tolist()
        for name in ("tokens", "positions", "segment_ids", "predictors", "targets", "completion_ids"):
            np.testing.assert_array_equal(getattr(batch.rows, name), getattr(plain.rows, name), err_msg=name)
    cut = pack(groups, shape, mask_truncated=True)
    assert cut.trained == [[2, 0]] and sum(b.rows.mask.sum() for b in cut.batches) == 2
    out_of_turns = [dataclasses.replace(c, finish_reason="turns") for c in groups[0].completions]
    assert pack([group([7], *out_of_turns)], shape, mask_truncated=True).trained == [[0, 0]]


def completions_of(packed, values):
    """Each completion of all batches as (prompt and tokens, targets, positions, log-probs, values, mask), sorted."""
    found = []
    for batch, value in zip(packed.batches, packed.scatter(values), strict=True):
        r = batch.rows
        for b in range(len(r.tokens)):
            own = [*dict.fromkeys(r.segment_ids[b].tolist())]
            own = [i for i in own if i > BRANCH] or [i for i in own if i]  # a shared prompt is no completion
            for index, segment in enumerate(own, start=1):
                entries = r.completion_ids[b] == index
                span = (r.segment_ids[b] == segment) | (r.segment_ids[b] == segment % BRANCH)
                read, n = np.flatnonzero(span), entries.sum()
                assert (r.tokens[b][read[-n:]] == r.targets[b][entries]).all()
                assert (r.predictors[b][entries] == read[-n - 1 : -1]).all()
                row = (r.tokens[b][span], r.positions[b][span], r.targets[b][entries])
                row += (batch.sampler_logprobs[b][entries], value[b][entries], r.mask[b][entries])
                found.append(tuple(tuple(x.tolist()) for x in row))
    return sorted(found)


@pytest.mark.parametrize("rows, minibatches", [(15, 1), (4, 1), (2, 3), (20, 7)])
def test_packed_rows_hold_the_padded_completions(rows, minibatches):
    groups, values = random_groups(), np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    padded = pack(groups, RowShape(15, 40, 40))
    packed = pack(groups, RowShape(rows, 40, 40, packed=True), minibatches=minibatches)
    assert completions_of(packed, values) == completions_of(padded, values)
    shared = pack(groups, RowShape(rows, 40, 40, packed=True, shared=True), minibatches=minibatches)
    assert completions_of(shared, values) == completions_of(padded, values)
    ways = (shared, packed, padded)
    taken = [sum(int((b.rows.segment_ids[:, 0] > 0).sum()) for b in p.batches) for p in ways]
    assert taken[0] <= taken[1] < taken[2] == 15
    tokens = [sum((b.rows.segment_ids > 0).sum() for b in way.batches) for way in ways]
    assert tokens[0] < tokens[1] == tokens[2]
    once = sum(len(g.prompt) + sum(len(c.tokens) for c in g.completions) for g in groups)
    assert tokens[0] == once or taken[0] > minibatches, "every prompt once, unless its completions fill several rows"


def test_every_uth_group_makes_a_minibatch_and_every_mth_row_a_micro_batch():
    groups = [group([1], *[[p, g] for g in range(2)]) for p in range(5)]  # a completion says whose it is
    packed = pack(groups, RowShape(2, 4, 3), minibatches=2)
    assert packed.minibatch_sizes == [3, 2]
    owners = [[batch.rows.targets[:, :2].tolist() for batch in batches] for batches in packed.minibatches]
    assert owners[0] == [[[0, 0], [2, 1]], [[0, 1], [4, 0]], [[2, 0], [4, 1]]]  # rows 0, 3; 1, 4; 2, 5
    assert owners[1] == [[[1, 0], [3, 0]], [[1, 1], [3, 1]]]
    assert pack(groups[:1], RowShape(2, 4, 3), minibatches=2).minibatch_sizes == [1]  # a shortage: no empty mini-batch


def test_one_number_a_token_and_groups_of_any_size():
    groups = [group([7], [1, 2], [3]), group([8, 9], [4, 5, 6])]
    made = pack(groups, RowShape(3, 5, 3))
    assert made.scatter([[[1, 2], [3]], [[4, 5, 6]]])[0].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 6),
    minibatches=st.integers(1, 4),
    kind=st.sampled_from([(False, False), (True, False), (True, True)]),
    masked=st.booleans(),
)
def test_gather_is_the_inverse_of_scatter(seed, rows, minibatches, kind, masked):
    groups = random_groups(seed, prompts=4)
    made = pack(groups, RowShape(rows, 40, 40, *kind), minibatches=minibatches, mask_truncated=masked)
    values = [[np.arange(len(c.tokens)) + 10 * i + 100 * p for i, c in enumerate(g.completions)]
              for p, g in enumerate(groups)]  # fmt: skip
    arrays = made.scatter(values)
    for wanted, found in zip(values, made.gather(arrays), strict=True):
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a, b)
    first = made.minibatch_sizes[0]  # the groups of a mini-batch need its micro-batches only
    chosen = range(0, len(groups), minibatches)
    for p, found in zip(chosen, made.gather(arrays[:first], chosen), strict=True):
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(values[p]))


def test_scattered_numbers_lie_at_the_tokens_of_their_completion():
    groups = random_groups()
    made = pack(groups, RowShape(2, 30, 30, packed=True), minibatches=2)
    for array, batch in zip(made.scatter([[c.tokens for c in g.completions] for g in groups]), made.batches,
                            strict=True):  # fmt: skip
        there = batch.rows.completion_ids > 0
        np.testing.assert_array_equal(array[there], batch.rows.targets[there])
        assert not array[~there].any()


def test_truncated_completions_can_be_left_out_of_the_loss():
    groups = [group([7], completion([1, 2], "length"), completion([3, 4]))]
    made = pack(groups, RowShape(2, 3, 2), mask_truncated=True)
    assert made.batches[0].mask.tolist() == [[0, 0], [1, 1]]
    assert made.trained == [[0, 2]]  # what averages over tokens counts
    everything = pack(groups, RowShape(2, 3, 2))
    assert everything.batches[0].mask.all() and everything.trained == [[2, 2]]


def test_rows_beyond_the_completions_are_empty_and_all_arrays_are_32_bits():
    batch = pack(random_groups(), RowShape(20, 33, 12)).batches[0]
    rows = batch.rows
    assert rows.tokens.shape == (20, 33) and rows.mask.shape == (20, 12)
    assert not rows.segment_ids[15:].any() and not rows.mask[15:].any() and not rows.completion_ids[15:].any()
    arrays = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    assert arrays.pop("experts") is None
    assert all(array.dtype in (np.int32, np.float32) for array in arrays.values())


def test_a_column_that_nobody_has_computed_is_named():
    batch = pack([group([7], [1])], RowShape(1, 2, 1)).batches[0]
    with pytest.raises(ValueError, match="the batch has no advantages yet"):
        batch.known("advantages")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        pack([group([], [1])], RowShape(1, 4, 4))
    for packed in (False, True):
        with pytest.raises(ValueError, match="completion 0 make 6 tokens, above the row length 4: raise train.packed"):
            pack([group([1] * 5, [1])], RowShape(1, 4, 4, packed))
    with pytest.raises(ValueError, match="completion 0 of prompt 0 ends at token 3 of a row, above 2"):
        pack([group([1], [1, 2, 3])], RowShape(1, 8, 2))
    with pytest.raises(ValueError, match="at least one row, got 0"):
        pack([group([1], [1])], RowShape(0, 4, 4))


def with_experts(found):
    """The group with experts u16[m + n, 2, 3] of each completion that tell the token, its position and the layer."""

    def known(completion):
        tokens = np.concatenate([found.prompt, completion.tokens])
        numbers = 1000 * np.arange(2)[:, None] + np.arange(3)
        experts = (tokens + 50 * np.arange(len(tokens)))[:, None, None] + 3000 * numbers[None]
        return dataclasses.replace(completion, experts=experts.astype(np.uint16))

    return found._replace(completions=[known(c) for c in found.completions])


@pytest.mark.parametrize("kind", [{}, {"packed": True}, {"packed": True, "shared": True}], ids=str)
def test_the_recorded_experts_of_every_token_are_at_its_place(kind):
    groups = [with_experts(g) for g in random_groups(seed=3)]
    shape = RowShape(3, 40 if kind else 20, 38 if kind else 12, **kind)
    batches = pack(groups, shape, minibatches=2).batches
    numbers = 3000 * (1000 * np.arange(2)[:, None] + np.arange(3))
    seen = 0
    for rows in (batch.rows for batch in batches):
        assert rows.experts.shape == (3, shape.length, 2, 3) and rows.experts.dtype == np.uint16
        expected = (rows.tokens + 50 * rows.positions)[..., None, None] + numbers
        real = rows.segment_ids > 0
        np.testing.assert_array_equal(rows.experts[real], expected[real].astype(np.uint16))
        assert not rows.experts[~real].any()
        seen += real.sum()
    assert seen >= sum(len(c.tokens) for g in groups for c in g.completions)
    assert batches[0].rows.unrouted.experts is None


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 23), min_size=1, max_size=60))
def test_each_completion_goes_into_the_first_row_with_room_longest_first(sizes):
    packed = pack([group([7], [3] * size) for size in sizes], RowShape(100, 24, 24, packed=True))
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        row = next((i for i, left in enumerate(room) if left >= size + 1), len(room))
        room[row:] = room[row:] or [24]
        room[row] -= size + 1
    used = (packed.batches[0].rows.segment_ids > 0).sum(axis=1)
    assert used[used > 0].tolist() == [24 - left for left in room]
