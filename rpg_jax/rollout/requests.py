"""The host's side of a rollout: which prompts are prefilled together, and what becomes of each completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax.rollout.decode_state import MAX_STOP_TOKENS, Requests
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion, Sampling

# A group's place in the call, and its completions.
OnGroup = Callable[[int, list[Completion]], None]


@dataclasses.dataclass(eq=False, slots=True)
class Row:
    """One completion in the making.

    Attributes:
      prompt_row: its prompt's row in the chunk's prefill.
      prompt_length: tokens.
      counters: (seed, step, prompt_id, index), the origin of its random key.
      sampling: how it is drawn.
      tokens, logprobs: pieces in order, one per dispatch.
      spans: version of the weights of each dispatch, and the tokens that it drew.
      group: its prompt's place in the call.
      emitted: tokens drawn so far, as the scheduling thread knows it.
      channel: where a driver with threads reports this row; None where there are none.
      cancelled: whoever asked for it no longer wants it; its slot is freed at the next dispatch.
    """

    prompt_row: int
    prompt_length: int
    counters: tuple[int, int, int, int]
    sampling: Sampling
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    group: int = 0
    emitted: int = 0
    channel: Any = None
    cancelled: bool = False

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)

    def completion(self) -> Completion:
        """Of a row that has ended."""
        versions = np.repeat(*np.array(self.spans, np.int32).T)
        tokens, logprobs = np.concatenate(self.tokens), np.concatenate(self.logprobs)
        stopped = int(tokens[-1]) in self.sampling.stop_token_ids
        mixed = versions if (versions != versions[0]).any() else None
        return Completion(tokens, logprobs, "stop" if stopped else "length", int(versions[0]), mixed)


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """Prompts prefilled in one forward pass and the completions that start from them.

    Attributes:
      tokens: i32[P, T], right-padded. lengths: i32[P].
      rows: completions, each naming its prompt's row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: list[Row]


def check(
    prompts: Sequence[np.ndarray],
    prompt_ids: Sequence[int],
    group_size: int,
    sampling: Sampling,
    enough: int | None = None,
    *,
    capacity: int,
    vocab_size: int,
) -> None:
    """Raises ValueError for a request that the engine cannot serve exactly as asked."""
    if enough is not None and not 0 < enough <= len(prompts):
        raise ValueError(f"enough must be from 1 to {len(prompts)}, the number of prompts, got {enough}")
    if len(prompt_ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(prompt_ids)} prompt_ids; give one id per prompt")
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1, got {group_size}")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise ValueError(f"at most {MAX_STOP_TOKENS} stop tokens are supported, got {sampling.stop_token_ids}")
    if not all(0 <= token < vocab_size for token in sampling.stop_token_ids):
        raise ValueError(f"stop tokens must be in the vocabulary 0..{vocab_size - 1}, got {sampling.stop_token_ids}")
    if sampling.top_k >= 2**31:
        raise ValueError(f"top_k must be below 2^31 (0 switches it off), got {sampling.top_k}")
    for i, prompt in enumerate(prompts):
        if np.ndim(prompt) != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompt {i} (id {prompt_ids[i]}) has shape {np.shape(prompt)}; a prompt is a 1-D array of at least "
                "one token id (encode an empty text as the BOS or another separator token)"
            )
        if np.min(prompt) < 0 or np.max(prompt) >= vocab_size:
            raise ValueError(
                f"prompt {i} (id {prompt_ids[i]}) has token ids from {np.min(prompt)} to {np.max(prompt)}; the model's "
                f"vocabulary is 0..{vocab_size - 1}"
            )
        if len(prompt) + sampling.max_tokens > capacity:
            raise ValueError(
                f"prompt {i} (id {prompt_ids[i]}) has {len(prompt)} tokens, and with max_tokens {sampling.max_tokens} "
                f"does not fit a slot of {capacity} tokens; raise the rollout's capacity, or filter long prompts"
            )


class Finish:
    """Which groups of a call are complete: the first `enough` of them are kept, then all others are cancelled.

    Args:
      groups: their rows.
      enough: None for all.
      on_group: is told of each that is kept; see `rpg_jax.rollout.Rollout`.
    """

    def __init__(self, groups: Sequence[Sequence[Row]], enough: int | None, on_group: OnGroup | None):
        self._groups, self._left, self._on_group = groups, [len(rows) for rows in groups], on_group
        self._wanted = len(groups) if enough is None else enough

    @property
    def over(self) -> bool:
        return self._wanted == 0

    def completed(self, row: Row) -> None:
        """To be told of rows one at a time, in the order in which they end."""
        self._left[row.group] -= 1
        if self.over or self._left[row.group]:
            return
        self._wanted -= 1
        if self._on_group is not None:
            self._on_group(row.group, [one.completion() for one in self._groups[row.group]])
        if self.over:
            for rows, left in zip(self._groups, self._left, strict=True):
                for other in rows if left else ():
                    other.cancelled = True


def completions(groups: Sequence[Sequence[Row]], version: int, *, mixed: bool) -> list[list[Completion]]:
    """What has become of complete rows that were asked for under weights of `version`; nothing for cancelled ones.

    Raises:
      RolloutError: non-finite log-probs, or other weights have sampled and `mixed` does not allow that.
    """
    groups = [[] if group[0].cancelled else group for group in groups]
    others = {v for group in groups for row in group for v, _ in row.spans} - {version}
    if others and not mixed:
        step = next(row.counters[1] for group in groups for row in group)
        raise RolloutError(
            f"weights changed from version {version} to {max(others)} during the rollout of step {step}: its "
            "completions mix two policies; sync weights between rollouts"
        )
    made = [[row.completion() for row in group] for group in groups]
    for rows, group in zip(groups, made, strict=True):
        for row, one in zip(rows, group, strict=True):
            if not np.isfinite(one.logprobs).all():
                _, step, prompt_id, index = row.counters
                raise RolloutError(
                    f"completion {index} of prompt {prompt_id} at step {step} has non-finite log-probabilities: the "
                    f"weights (version {row.spans[-1][0]}) give non-finite logits"
                )
    return made


def mean_lengths(prompt_ids: Sequence[int], groups: Sequence[Sequence[Completion]]) -> dict[int, float]:
    """Tokens of a prompt's completions on average, by its id; cancelled groups are left out."""
    return {i: sum(len(c.tokens) for c in g) / len(g) for i, g in zip(prompt_ids, groups, strict=True) if g}


def plan(
    engine: QwenEngine,
    prompts: Sequence[np.ndarray],
    prompt_ids: Sequence[int],
    group_size: int,
    sampling: Sampling,
    *,
    seed: int,
    step: int,
    prefill_tokens: int,
    expected: Mapping[int, float],
) -> tuple[list[list[Row]], list[Chunk]]:
    """Rows [P][G] in the caller's order, and chunks in the order to run them: those that will take longest first, by
    the `expected` tokens of a prompt's completions (by its id; prompts that are not there count as the mean of those
    that are), then by the prompt's own.

    A chunk holds prompts of one length bucket, as many as `prefill_tokens` allows but a power of two (the unused rows
    are padding), so that prompts of any number and length reach few compiled shapes.
    """
    groups = [
        [Row(0, len(prompt), (seed, step, prompt_id, index), sampling, group=place) for index in range(group_size)]
        for place, (prompt, prompt_id) in enumerate(zip(prompts, prompt_ids, strict=True))
    ]
    chunks: list[Chunk] = []
    known = [expected.get(prompt_id) for prompt_id in prompt_ids]
    usual = float(np.mean([n for n in known if n is not None] or [0]))
    lengths_to_come = [usual if n is None else n for n in known]
    pending = sorted(range(len(prompts)), key=lambda i: (-lengths_to_come[i], -len(prompts[i])))
    while pending:
        width = engine.prompt_bucket(len(prompts[pending[0]]))
        fitting = [i for i in pending if engine.prompt_bucket(len(prompts[i])) == width]
        taken = fitting[: max(1, prefill_tokens // width)]
        pending = [i for i in pending if i not in taken]
        height = 1 << (len(taken) - 1).bit_length()
        tokens, lengths = np.zeros((height, width), np.int32), np.ones(height, np.int32)
        for row, i in enumerate(taken):
            tokens[row, : len(prompts[i])], lengths[row] = prompts[i], len(prompts[i])
            for completion in groups[i]:
                completion.prompt_row = row
        chunks.append(Chunk(tokens, lengths, [row for i in taken for row in groups[i]]))
    return groups, chunks


def requests(engine: QwenEngine, placed: Sequence[tuple[int, Row]]) -> Requests:
    """The argument of the `insert` that puts rows, all of one chunk, into the slots they are paired with."""
    r = Requests.empty(engine.slots)
    for i, (slot, row) in enumerate(placed):
        sampling = row.sampling
        r.slots[i] = slot
        r.seed[i], r.step[i], r.prompt_id[i], r.index[i] = (counter & 0xFFFFFFFF for counter in row.counters)
        r.rows[i], r.limit[i] = row.prompt_row, sampling.max_tokens
        r.temperature[i], r.top_p[i], r.top_k[i] = sampling.temperature, sampling.top_p, sampling.top_k
        r.min_p[i] = sampling.min_p
        r.stop_tokens[i, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
    return r.replace(count=np.int32(len(placed)))
