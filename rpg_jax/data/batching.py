"""From ragged prompts and completions to rows of fixed shape.

Rows hold prompt and completion one after the other, padded on the right only, so that positions count from 0 and
nothing depends on how much padding there is. Lengths are rounded up to a few buckets: a jitted step that reads them
compiles once per bucket, not once per batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rpg_jax.types import Batch, Completion


def bucket_length(n: int, *, minimum: int = 16, maximum: int | None = None) -> int:
    """Smallest length >= n among minimum * 2**i * {4, 5, 6, 7}/4 (at most 25 % padding), capped at `maximum`.

    Raises:
      ValueError: n is above `maximum`.
    """
    if maximum is not None and n > maximum:
        raise ValueError(f"a row needs {n} tokens, above the limit of {maximum}: raise it or filter long prompts")
    size = minimum
    while size < n:
        size *= 2
    finer = [size // 8 * k for k in (5, 6, 7) if size > minimum and size // 8 * k >= n]
    size = finer[0] if finer else size
    return size if maximum is None else min(size, maximum)


class Segment(NamedTuple):
    """One prompt with one completion: what a row holds one or more of."""

    prompt: np.ndarray
    completion: Completion
    advantages: np.ndarray
    trained: bool

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion.tokens)


def pad_completions(
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    advantages: ArrayLike | Sequence[Sequence[ArrayLike]],
    *,
    pad_id: int = 0,
    rows: int | None = None,
    row_length: int | None = None,
    completion_length: int | None = None,
    mask_truncated: bool = False,
) -> Batch:
    """One row per completion, group by group: row p·G + g is completion g of prompt p.

    Args:
      prompts: P arrays i32[n], n >= 1.
      completions: P groups, of possibly different sizes.
      advantages: f32[P, G], or f32[P, G, C] per token, or the same as nested sequences where groups differ in size.
      pad_id: written to padding; no result depends on it.
      rows: B; rows beyond the completions are empty (segment id and mask 0). Default: as many as completions.
      row_length: T, default the bucket of the longest prompt plus completion.
      completion_length: C, default the bucket of the longest completion.
      mask_truncated: completions that ran into the length limit are not trained (mask 0).

    Returns:
      Batch of numpy arrays; `behaviour_logprobs` and `ref_logprobs` are 0 until the trainer computes them.

    Raises:
      ValueError: an empty prompt, shapes that do not match, or something longer than the length given.
    """
    segments = _segments(prompts, completions, advantages, mask_truncated)
    return _fill([[s] for s in segments], pad_id, rows, row_length, completion_length)


def pack_completions(
    prompts: Sequence[np.ndarray],
    completions: Sequence[Sequence[Completion]],
    advantages: ArrayLike | Sequence[Sequence[ArrayLike]],
    *,
    row_length: int,
    pad_id: int = 0,
    rows: int | None = None,
    completion_length: int | None = None,
    mask_truncated: bool = False,
) -> Batch:
    """Several completions to a row of `row_length` tokens, longest first into the first row with room.

    Each keeps its own segment id and completion id (1, 2, … within the row) and positions from 0, so attention and
    losses are those of `pad_completions`, in another order. Arguments and errors are the same.
    """
    segments = _segments(prompts, completions, advantages, mask_truncated)
    packed: list[list[Segment]] = []
    room: list[int] = []
    for segment in sorted(segments, key=lambda s: -s.length):
        if segment.length > row_length:
            raise ValueError(f"prompt and completion make {segment.length} tokens, above row_length={row_length}")
        row = next((i for i, left in enumerate(room) if left >= segment.length), len(packed))
        if row == len(packed):
            packed.append([])
            room.append(row_length)
        packed[row].append(segment)
        room[row] -= segment.length
    return _fill(packed, pad_id, rows, row_length, completion_length)


def pad_supervised(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    pad_id: int = 0,
    rows: int | None = None,
    row_length: int | None = None,
    completion_length: int | None = None,
) -> Batch:
    """Rows that imitate targets: (prompt ids, target ids) pairs with advantage 1, so that -A·log π is cross entropy.

    The targets must end with the stop token that the policy is to learn. Arguments and errors of `pad_completions`.
    """
    prompts, completions = [], []
    for prompt, target in pairs:
        tokens = np.asarray(target, np.int32)
        prompts.append(np.asarray(prompt, np.int32))
        completions.append([Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0)])
    lengths = {"rows": rows, "row_length": row_length, "completion_length": completion_length}
    return pad_completions(prompts, completions, np.ones((len(prompts), 1)), pad_id=pad_id, **lengths)


def micro_batches(batch: Batch, rows: int) -> list[Batch]:
    """The rows of `batch` in micro-batches of exactly `rows`; the last one is filled up with rows without tokens.

    Micro-batch m of M takes every M-th row, so that long and short rows, which neighbour each other when packed, are
    spread over all of them.

    Raises:
      ValueError: `rows` is below 1.
    """
    if rows < 1:
        raise ValueError(f"a micro-batch needs at least one row, got {rows}")
    count = max(-(-len(batch.tokens) // rows), 1)

    def split(x: np.ndarray) -> np.ndarray:
        missing = np.zeros((count * rows - len(x), *x.shape[1:]), x.dtype)
        return np.concatenate([x, missing]).reshape(rows, count, *x.shape[1:]).swapaxes(0, 1)

    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    parts = {name: split(x) for name, x in arrays.items() if x is not None}
    return [Batch(**{name: x[m] for name, x in parts.items()}) for m in range(count)]


def _segments(prompts, completions, advantages, mask_truncated: bool) -> list[Segment]:
    if not len(prompts) == len(completions) == len(advantages):
        raise ValueError(
            f"{len(prompts)} prompts, {len(completions)} groups of completions and {len(advantages)} rows of advantages"
        )
    if not isinstance(advantages, list | tuple):
        advantages = np.asarray(advantages)
    segments = []
    for p, (prompt, group) in enumerate(zip(prompts, completions, strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"prompt {p} is empty: nothing predicts the first token of its completions")
        if len(group) != len(advantages[p]):
            raise ValueError(f"prompt {p} has {len(group)} completions and {len(advantages[p])} advantages")
        for completion, advantage in zip(group, advantages[p], strict=True):
            n = len(completion.tokens)
            advantage = np.asarray(advantage, np.float32)
            per_token = advantage[:n] if advantage.ndim else np.full(n, advantage)
            trained = not (mask_truncated and completion.finish_reason == "length")
            segments.append(Segment(np.asarray(prompt, np.int32), completion, per_token, trained))
    return segments


def _fill(packed: list[list[Segment]], pad_id: int, rows, row_length, completion_length) -> Batch:
    longest = max((sum(s.length for s in row) for row in packed), default=1)
    longest_completion = max((sum(len(s.completion.tokens) for s in row) for row in packed), default=1)
    b = _at_least("rows", len(packed), rows, len(packed))
    t = _at_least("row_length", longest, row_length, bucket_length(longest))
    c = _at_least("completion_length", longest_completion, completion_length, bucket_length(longest_completion))

    tokens = np.full((b, t), pad_id, np.int32)
    positions, segment_ids = np.zeros((2, b, t), np.int32)
    predictors, completion_ids = np.zeros((2, b, c), np.int32)
    targets = np.full((b, c), pad_id, np.int32)
    mask, advantages, sampler_logprobs = np.zeros((3, b, c), np.float32)
    for row, segments in enumerate(packed):
        start, first = 0, 0
        for index, (prompt, completion, advantage, trained) in enumerate(segments, start=1):
            n, m = len(prompt), len(completion.tokens)
            span, entries = slice(start, start + n + m), slice(first, first + m)
            tokens[row, start : start + n] = prompt
            tokens[row, start + n : start + n + m] = completion.tokens
            positions[row, span] = np.arange(n + m)
            segment_ids[row, span] = index
            predictors[row, entries] = np.arange(start + n - 1, start + n - 1 + m)
            targets[row, entries] = completion.tokens
            completion_ids[row, entries] = index
            mask[row, entries] = trained
            advantages[row, entries] = advantage
            sampler_logprobs[row, entries] = completion.logprobs
            start, first = start + n + m, first + m
    return Batch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        predictors=predictors,
        targets=targets,
        completion_ids=completion_ids,
        mask=mask,
        advantages=advantages,
        sampler_logprobs=sampler_logprobs,
        behaviour_logprobs=np.zeros((b, c), np.float32),
        ref_logprobs=np.zeros((b, c), np.float32),
    )


def _at_least(name: str, needed: int, given: int | None, default: int) -> int:
    if given is not None and given < needed:
        raise ValueError(f"{name}={given} is too small: this batch needs {needed}")
    return default if given is None else given
