"""Packs completions of different lengths into rows of one fixed shape, and unpacks results.

A row holds prompt and completion one after the other, padded on the right only. So positions count from 0, and no
result depends on the amount of padding. All rows of a run have one shape: a jitted step compiles once.

Several completions may share a row. Then the row may hold a prompt once, followed by all of its completions that fit.
A completion attends to its prompt and to itself alone, so log-probabilities and gradients stay the same. G completions
of M tokens with a prompt of P tokens take P + G M tokens in place of G (P + M).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from numpy.typing import ArrayLike

from rpg_jax.data.groups import Group
from rpg_jax.parallel import hosts
from rpg_jax.types import BRANCH, Batch, Rows


class RowShape(NamedTuple):
    """The shape of every micro-batch.

    Attributes:
      rows: B, rows of a micro-batch.
      length: T, tokens of a row, prompts and padding included.
      completion_length: C, the most completion tokens of a row.
      packed: several completions may share a row; else a row holds one completion.
      shared: a packed row holds a prompt once for all its completions there; else once for each completion.
    """

    rows: int
    length: int
    completion_length: int
    packed: bool = False
    shared: bool = False


class Place(NamedTuple):
    """The place of a completion: entries first … first + length − 1 of row `row` of [B, C] of a micro-batch."""

    micro_batch: int
    row: int
    first: int
    length: int


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """The groups of a step as the micro-batches of its mini-batches, and the entries of every completion's tokens.

    Attributes:
      groups: P groups.
      batches: M micro-batches; the first mini-batch comes first.
      minibatch_sizes: micro-batches in each of the U mini-batches; they add up to M.
      places: for each group, the place of each completion.
      trained: for each group, the number of tokens with mask 1 of each completion: its sampled tokens, or 0.
      sharding: the sharding of the micro-batches and of scattered arrays; None: the arrays are on the host.
    """

    groups: Sequence[Group]
    batches: list[Batch]
    minibatch_sizes: list[int]
    places: list[list[Place]]
    trained: list[list[int]]
    sharding: jax.sharding.Sharding | None = None

    @property
    def minibatches(self) -> list[list[Batch]]:
        """The micro-batches of each of the U mini-batches."""
        rest = iter(self.batches)
        return [[next(rest) for _ in range(size)] for size in self.minibatch_sizes]

    def scatter(self, values: Sequence[Sequence[ArrayLike]] | np.ndarray) -> list[Any]:
        """Returns f32[B, C] for each of the M micro-batches: the values at the entries of the completions' tokens, else
        0. `sharding` places the arrays, as it places the micro-batches. `values` has for each of the P groups G numbers
        (one for a completion) or G arrays f32[n] (one number for a token)."""
        out = [np.zeros(batch.rows.mask.shape, np.float32) for batch in self.batches]
        for places, own in zip(self.places, values, strict=True):
            for (m, row, first, n), value in zip(places, own, strict=True):
                out[m][row, first : first + n] = value
        return [_placed(x, self.sharding) for x in out]

    def gather(
        self, arrays: Sequence[np.ndarray | jax.Array], groups: Sequence[int] | None = None
    ) -> list[list[np.ndarray]]:
        """Returns for each completion of each group the array [n, …] of the values at its n tokens: undoes `scatter`.
        `groups` are the numbers of the groups to gather; None: all. `arrays` are [B, C, …], one for each micro-batch;
        those after the last micro-batch that holds one of `groups` may be missing. Every host must call this."""
        own = [x if isinstance(x, np.ndarray) else hosts.gathered(x) for x in arrays]
        chosen = range(len(self.places)) if groups is None else groups
        return [[own[m][row, first : first + n] for m, row, first, n in self.places[p]] for p in chosen]

    def of_sampled(self, arrays: Sequence[np.ndarray | jax.Array]) -> list[list[np.ndarray]]:
        """Returns for each completion of each group the values [m, …] at the m tokens that the policy sampled, without
        tokens that an environment wrote. `arrays` are [B, C, …], one for each micro-batch. Every host must call it."""
        return [
            [x[completion.sampled] for x, completion in zip(own, group.completions, strict=True)]
            for own, group in zip(self.gather(arrays), self.groups, strict=True)
        ]

    def add(self, **columns: Sequence[jax.Array]) -> RolloutBatch:
        """Returns a copy in which fields of the micro-batches have new values. A keyword is the name of a field of
        `types.Batch`, and its value is a list with an array f32[B, C] for each micro-batch."""
        rows = zip(*columns.values(), strict=True)
        batches = [
            dataclasses.replace(batch, **dict(zip(columns, arrays, strict=True)))
            for batch, arrays in zip(self.batches, rows, strict=True)
        ]
        return dataclasses.replace(self, batches=batches)


def pack(
    groups: Sequence[Group],
    shape: RowShape,
    *,
    minibatches: int = 1,
    pad_id: int = 0,
    mask_truncated: bool = False,
    sharding: jax.sharding.Sharding | None = None,
) -> RolloutBatch:
    """Packs groups into rows of one shape, and returns them as micro-batches.

    Every U-th group goes to the same mini-batch. With `shape.packed` the longest completion with its prompt comes
    first, and each completion goes into the first row with room. With `shape.shared` too, a prompt with all its
    completions goes into the first row with room; a group longer than a row is split. The rows of a mini-batch are
    dealt in turn to its micro-batches, so that each has long and short rows. The last rows of each may be padding.

    Tokens that an environment wrote, and completions that their group does not count (`counted`), have mask 0.

    Args:
      groups: P prompts with their completions.
      minibatches: U, the number of mini-batches; there are only P if P is smaller.
      pad_id: the token id of padding; no result depends on it.
      mask_truncated: do not train on completions that a limit of tokens or of turns ended (mask 0).
      sharding: places the rows on devices; None leaves numpy arrays on the host.

    Raises:
      ValueError: a prompt is empty, a prompt and one completion have more than T tokens, the completions of a row have
        more than C tokens, or `shape.rows` is below 1.
    """
    if shape.rows < 1:
        raise ValueError(f"a micro-batch needs at least one row, got {shape.rows}")
    trained = [
        [
            int(c.sampled.sum()) if counted and not (mask_truncated and c.truncated) else 0
            for c, counted in zip(g.completions, g.counted, strict=True)
        ]
        for g in groups
    ]
    places: dict[tuple[int, int], Place] = {}
    batches: list[Batch] = []
    sizes: list[int] = []
    for u in range(min(minibatches, len(groups))):
        rows = _shared_rows(groups, range(u, len(groups), minibatches), shape)
        sizes.append(max(-(-len(rows) // shape.rows), 1))
        for m in range(sizes[-1]):
            batch, own = _filled(rows[m :: sizes[-1]], groups, trained, shape, pad_id)
            places |= {member: Place(len(batches), *where) for member, where in own.items()}
            batches.append(batch)
    ordered = [[places[p, g] for g in range(len(group.completions))] for p, group in enumerate(groups)]
    placed = [_placed(batch, sharding) for batch in batches]
    return RolloutBatch(groups, placed, sizes, ordered, trained, sharding)


def rows_needed(groups: Sequence[Group], shape: RowShape) -> int:
    """Returns the number of rows that `pack` fills with `groups` as one mini-batch. Raises ValueError for an empty
    prompt, and for a completion that with its prompt is longer than a row."""
    return len(_shared_rows(groups, range(len(groups)), shape))


_Members = list[tuple[int, int]]  # (group, completion) of each completion of a row, in order


def _shared_rows(groups: Sequence[Group], chosen: Sequence[int], shape: RowShape) -> list[_Members]:
    """Returns the completions of each row. `chosen` are numbers of groups. Without `shape.packed` a row has one."""
    members = [(p, g) for p in chosen for g in range(len(groups[p].completions))]
    sizes = {(p, g): len(groups[p].prompt) + len(groups[p].completions[g].tokens) for p, g in members}
    for (p, g), size in sizes.items():
        if len(groups[p].prompt) == 0:
            raise ValueError(f"prompt {p} is empty: nothing predicts the first token of its completions")
        if size > shape.length:
            raise ValueError(
                f"prompt {p} and its completion {g} make {size} tokens, above the row length {shape.length}: "
                "raise train.packed_length, or leave it unset"
            )
    units = [[member] for member in members]
    if not shape.packed:
        return units
    if shape.shared:
        units = [[(p, g) for g in range(len(groups[p].completions))] for p in chosen if groups[p].completions]
    return _first_fit(units, groups, shape.length)


def _first_fit(units: Sequence[_Members], groups: Sequence[Group], length: int) -> list[_Members]:
    """Returns the completions of each row. A unit is completions that follow one prompt. The longest unit comes first.
    Each unit goes into the first row with room. A unit that no row can hold is split, longest completions first."""
    rows: list[_Members] = []
    room = np.empty(sum(map(len, units)), np.int64)  # of each row; a completion begins at most one

    def ends(unit: _Members) -> np.ndarray:
        return np.cumsum([len(groups[p].completions[g].tokens) for p, g in unit]) + len(groups[unit[0][0]].prompt)

    for unit in sorted(units, key=lambda unit: -ends(unit)[-1]):
        rest = sorted(unit, key=lambda member: -len(groups[member[0]].completions[member[1]].tokens))
        while rest:
            sizes, count = ends(rest), len(rest)
            fits = room[: len(rows)] >= sizes[-1]
            row = int(fits.argmax()) if fits.any() else len(rows)
            if row == len(rows):
                rows.append([])
                room[row] = length
                count = int(np.searchsorted(sizes, length, side="right"))
            rows[row] += rest[:count]
            room[row] -= int(sizes[count - 1])
            rest = rest[count:]
    return rows


def _filled(
    rows: Sequence[_Members], groups: Sequence[Group], trained: Sequence[Sequence[int]], shape: RowShape, pad_id: int
) -> tuple[Batch, dict[tuple[int, int], tuple[int, int, int]]]:
    """Returns (a micro-batch of numpy arrays; row, first entry and length by the (group, completion) in it)."""
    where = {}
    B, T, C = shape.rows, shape.length, shape.completion_length
    tokens, targets = np.full((B, T), pad_id, np.int32), np.full((B, C), pad_id, np.int32)
    positions, segment_ids = np.zeros((2, B, T), np.int32)
    predictors, completion_ids = np.zeros((2, B, C), np.int32)
    mask, sampler_logprobs = np.zeros((2, B, C), np.float32)
    recorded = next((c.experts for group in groups for c in group.completions), None)
    experts = None if recorded is None else np.zeros((B, T, *recorded.shape[1:]), recorded.dtype)
    for row, members in enumerate(rows):
        start, first, segment, branch, last = 0, 0, 0, 0, 0
        before = None  # the group of the completion before
        for index, (p, g) in enumerate(members, start=1):
            prompt, completion = groups[p].prompt, groups[p].completions[g]
            n, m = len(prompt), len(completion.tokens)
            if first + m > C:
                raise ValueError(f"completion {g} of prompt {p} ends at token {first + m} of a row, above {C}")
            if not (shape.shared and p == before):
                segment, branch, before = segment + 1, 0, p
                span = slice(start, start + n)
                tokens[row, span], positions[row, span], segment_ids[row, span] = prompt, np.arange(n), segment
                if experts is not None and completion.experts is not None:
                    experts[row, span] = completion.experts[:n]
                last, start = start + n - 1, start + n
            branch += shape.shared
            span, entries = slice(start, start + m), slice(first, first + m)
            tokens[row, span], positions[row, span] = completion.tokens, n + np.arange(m)
            segment_ids[row, span] = segment + branch * BRANCH
            if experts is not None and completion.experts is not None:
                experts[row, span] = completion.experts[n:]
            predictors[row, entries] = np.arange(start - 1, start - 1 + m)
            predictors[row, first : first + min(m, 1)] = last
            targets[row, entries] = completion.tokens
            completion_ids[row, entries] = index
            mask[row, entries] = completion.sampled & (trained[p][g] > 0)
            sampler_logprobs[row, entries] = completion.logprobs
            where[p, g] = row, first, m
            start, first = start + m, first + m
    arrays = [tokens, positions, segment_ids, predictors, targets, completion_ids, mask, experts, sampler_logprobs]
    *rows_, sampled = cast(list[jax.Array], arrays)  # on the host, until they are placed
    return Batch(Rows(*rows_), sampled), where


def _placed(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Returns the tree of host arrays, placed on devices by `sharding`; without a sharding the tree itself."""
    return tree if sharding is None else hosts.placed(tree, sharding)
