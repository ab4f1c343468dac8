"""Decides which prompts are prefilled together, which completion decodes in which slot, and when a dispatch ends."""

import concurrent.futures
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from rpg_jax.rollout.decode_state import DecodeResult, Extension, Prefix
from rpg_jax.rollout.decoding import power_of_two, prompt_bucket, prompts_per_prefill
from rpg_jax.rollout.engine import DecodeEngine, State
from rpg_jax.rollout.request import Reply, Request, Row
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """Prompts that are read in one forward pass of P rows, and the completions that start from these prompts.

    Attributes:
      tokens: i32[P, T], the prompts, padded on the right.
      lengths: i32[P], the prompts' numbers of tokens without padding; 1 for an unused row.
      rows: completions in the making; `Row.prompt_row` is the row of the completion's prompt in `tokens`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: list[Row]


class Finish:
    """Counts the completions of a request that have not ended, and hands each complete group to `request.on_group`.
    `groups` are the rows of each prompt, in the order of the prompts; [] for a prompt in `request.done`."""

    def __init__(self, request: Request, groups: Sequence[Sequence[Row]]):
        self._groups, self._left, self._on_group = groups, [len(rows) for rows in groups], request.on_group
        self._incomplete = sum(map(bool, groups))

    @property
    def over(self) -> bool:
        """Whether all groups are complete."""
        return self._incomplete == 0

    def completed(self, row: Row) -> None:
        """Notes that `row` has ended. The last row of a group hands the group's completions to `request.on_group`, in
        the caller's thread. Only one thread may call this at a time, once for each row."""
        self._left[row.group] -= 1
        if self._left[row.group]:
            return
        self._incomplete -= 1
        if self._on_group is not None:
            self._on_group(row.group, [one.completion() for one in self._groups[row.group]])


def plan(engine: DecodeEngine, request: Request) -> tuple[list[list[Row]], list[Chunk]]:
    """Returns the rows of each prompt, in the order of the prompts, and the chunks, in the order of their prefills. A
    prompt in `request.done` keeps its place in a chunk and gets no rows, []. A chunk without rows is left out. Raises
    ValueError if a prompt, its limit of tokens or a token does not fit the engine.

    The prompts of a chunk have one length bucket, and one prefill takes all of them. The number of rows of a prefill is
    a power of two, and unused rows are padding. So few shapes are compiled for prompts of all numbers and lengths."""
    decoding = engine.decoding
    request.check_fits(capacity=decoding.capacity, vocab_size=engine.config.vocab_size)
    groups = [request.rows(place) for place in range(len(request.prompts))]
    prompts, batches, before = request.prompts, dict[tuple[int, int], list[int]](), Counter[int]()
    for i in request.order:
        width = prompt_bucket(len(prompts[i]), decoding.capacity)
        batches.setdefault((width, before[width] // prompts_per_prefill(width, decoding.prefill_tokens)), []).append(i)
        before[width] += 1
    chunks = []
    for (width, _), together in batches.items():
        height = power_of_two(len(together))
        tokens, lengths = np.zeros((height, width), np.int32), np.ones(height, np.int32)
        for row, i in enumerate(together):
            tokens[row, : len(prompts[i])], lengths[row] = prompts[i], len(prompts[i])
            for completion in groups[i]:
                completion.prompt_row = row
        chunks.append(Chunk(tokens, lengths, [row for i in together for row in groups[i]]))
    return groups, [chunk for chunk in chunks if chunk.rows]


def completions_of(request: Request, groups: Sequence[Sequence[Row]], version: int) -> list[list[Completion]]:
    """Returns the completions of rows that have ended, by prompt: `groups` are the rows of each prompt, [] for none.
    Raises RolloutError if a log-probability is not finite, or if weights of another version than `version`, the version
    at the beginning, drew or read a token. The message names the step of `request`."""
    others = {v for group in groups for row in group for v in row.transcript.versions} - {version}
    if others:
        raise RolloutError(
            f"weights changed from version {version} to {max(others)} during the rollout of step {request.step}: "
            "its completions mix two policies; sync weights between rollouts"
        )
    made = [[row.completion() for row in group] for group in groups]
    for rows, group in zip(groups, made, strict=True):
        for row, one in zip(rows, group, strict=True):
            if not np.isfinite(one.logprobs).all():
                _, step, prompt_id, index = row.counters
                raise RolloutError(
                    f"completion {index} of prompt {prompt_id} at step {step} has non-finite log-probabilities: "
                    f"the weights (version {row.transcript.versions[-1]}) give non-finite logits"
                )
    return made


EXTENSION_TOKENS = 512
"""The most tokens of one `extend` of a thread, padding included; longer observations are appended piece by piece."""
EXTENSION_ROWS = 8
"""Rows of one `extend` of a thread, padding included; fewer where they would have more than `EXTENSION_TOKENS`.

The number of rows does not depend on how many replies came together: programs of different shapes round differently,
and then the log-probability of the token after an observation would depend on timing."""
_REPLY_SECONDS = 0.1  # the longest wait for an environment's reply, if nothing else is to do


@dataclasses.dataclass
class Usage:
    """The work of the slots since the rollout was made, summed over dispatches.

    Attributes:
      decode_s: seconds between a dispatch and its result on the host.
      steps: number of decode steps.
      tokens: tokens that were drawn.
      queued_steps, queued_tokens: `steps` and `tokens` of dispatches that began while rows waited for prefill or slot.
      extended_tokens: tokens of observations that were appended to the cache of a slot.
      again_tokens: tokens of prompt and completion that were prefilled after a reply, because another row had the slot.
    """

    decode_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    queued_steps: int = 0
    queued_tokens: int = 0
    extended_tokens: int = 0
    again_tokens: int = 0


class _PendingReply(NamedTuple):
    """A row whose environment was asked for a reply at the time `since`, in seconds of `time.perf_counter`."""

    row: Row
    reply: Future[Reply]
    since: float

    @property
    def over(self) -> bool:
        return self.row.cancelled or self.reply.done()


class Schedule:
    """The slots, the rows in the slots, and the rows that wait for a slot. Only one thread may use a schedule.

    A schedule owns the decode state. A row whose turn has ended keeps its slot while the environment replies. After
    `patience_s` of `engine.decoding`, a waiting row may take the slot; the first row is then prefilled once more.

    Attributes:
      free: the free slots.
      live: {slot: row} of the slots that draw tokens.

    Args:
      engine: the engine that decodes.
      usage: the schedule adds its times, steps and tokens to this object.
      on_end: called with each row that has ended or was cancelled, once its slot is free.
    """

    def __init__(self, engine: DecodeEngine, usage: Usage, on_end: Callable[[Row], None]):
        self.engine, self.free, self.live = engine, list(range(engine.decoding.slots)), dict[int, Row]()
        self._waiting: deque[tuple[Prefix, Row]] = deque()
        self._asked: dict[int, _PendingReply] = {}  # the longest wait comes first
        self._without_slot: list[_PendingReply] = []
        self._usage, self._on_end = usage, on_end
        self._state: State | None = None

    @property
    def empty(self) -> bool:
        """Whether no row is in a slot, no row waits for a slot, and no row waits for a reply."""
        return not (self.live or self._waiting or self._asked or self._without_slot)

    @property
    def waiting(self) -> int:
        """The number of rows whose tokens are prefilled and which wait for a slot."""
        return len(self._waiting)

    @property
    def hungry(self) -> bool:
        """Whether the rows that wait for a slot are fewer than the free slots and the slots that they may take."""
        return len(self._waiting) < len(self.free) + len(self._to_lend)

    @property
    def _to_lend(self) -> list[int]:
        """The slots whose rows have waited `patience_s` for a reply, and still wait. The longest wait comes first."""
        latest = time.perf_counter() - self.engine.decoding.patience_s
        return [slot for slot, asked in self._asked.items() if asked.since <= latest and not asked.over]

    def add(self, prefix: Prefix, rows: Sequence[Row]) -> None:
        """Queues rows that start from `prefix`, behind all rows that wait for a slot."""
        for row in rows:
            row.prompt_experts = prefix.experts
            self._waiting.append((prefix, row))

    def release_state(self) -> None:
        """Frees the decode state, with the cache; the next `round` allocates a new one. No row may be in a slot."""
        self._state = None

    def round(self, *, more: bool) -> None:
        """Continues the rows whose replies have come, moves waiting rows into slots, and runs one dispatch. If no slot
        draws tokens, waits for the next reply instead, 0.1 s at most. `more`: further rows wait for their prefill."""
        self._resume()
        self._fill()
        if self.live:
            self._settle(self._advance(more))
        elif replies := [asked.reply for asked in (*self._asked.values(), *self._without_slot)]:
            concurrent.futures.wait(replies, _REPLY_SECONDS, concurrent.futures.FIRST_COMPLETED)

    def _end(self, row: Row, slot: int | None) -> None:
        """Frees the slot of a row that has ended or was cancelled; None: the row has no slot."""
        self.free += [] if slot is None else [slot]
        self._on_end(row)

    def _fill(self) -> None:
        """Moves waiting rows, in their order, into free slots and then into slots of rows that have waited `patience_s`
        for a reply. Slots of cancelled rows become inactive. Cancelled rows at the head of the queue leave it."""
        if self._state is None:
            self._state = self.engine.init_decode_state()
        if cancelled := [slot for slot, row in self.live.items() if row.cancelled]:
            self._state = self.engine.release(self._state, cancelled)
        lent = self._to_lend
        while self._waiting and (self.free or lent):
            prefix, batch = self._waiting[0][0], dict[int, Row]()
            while self._waiting and (self.free or lent) and self._waiting[0][0] is prefix:
                row = self._waiting.popleft()[1]
                if row.cancelled:
                    self._end(row, None)
                else:
                    batch[self.free.pop() if self.free else self._lend(lent.pop(0))] = row
            if batch:
                rows = [
                    (slot, row.prompt_row, row.drawn + row.transcript.count, row.counters, row.of_turn)
                    for slot, row in batch.items()
                ]
                self._state = self.engine.insert(prefix, self._state, rows)
            self.live |= batch

    def _advance(self, more: bool) -> DecodeResult:
        """Runs one dispatch, adds the tokens to the rows in `live`, and returns the result on the host. Some row must
        be in `live`. The dispatch may end early, by `Decoding.refill`, if rows wait for prefill, a slot or a reply."""
        decoding, queued = self.engine.decoding, more or bool(self._waiting)
        ends = [
            len(r.prompt) + min(r.transcript.count + decoding.steps_per_dispatch, r.limit) for r in self.live.values()
        ]
        idle = max(1, int(decoding.slots * decoding.refill)) if queued or self._asked else None
        began, weights = time.perf_counter(), self.engine.weights
        assert self._state is not None  # `_fill` has allocated it
        with weights.lock:
            version = weights.version
            self._state, parts = self.engine.generate(self._state, idle=idle, attend_length=max(ends))
        drawn = self.engine.fetch(parts)
        for slot, row in self.live.items():
            count = drawn.counts[slot]
            experts = None if drawn.experts is None else drawn.experts[slot, :count].copy()
            tokens, logprobs = drawn.tokens[slot, :count].copy(), drawn.logprobs[slot, :count].copy()
            row.transcript.extend(tokens, logprobs, version, experts)
        steps, tokens, usage = int(drawn.counts.max()), int(drawn.counts.sum()), self._usage
        usage.decode_s += time.perf_counter() - began
        usage.steps += steps
        usage.tokens += tokens
        usage.queued_steps += steps * queued
        usage.queued_tokens += tokens * queued
        return drawn

    def _settle(self, drawn: DecodeResult) -> None:
        """Takes the rows that `drawn` shows inactive out of `live`. An environment is asked for its reply to its row.
        Rows without an environment have ended, and so have cancelled rows."""
        for slot, row in [(slot, row) for slot, row in self.live.items() if not drawn.active[slot]]:
            del self.live[slot]
            if row.environment is not None and not row.cancelled:
                self._asked[slot] = _PendingReply(row, row.ask(), time.perf_counter())
            else:
                self._end(row, slot)

    def _resume(self) -> None:
        """Continues the rows whose replies have come, or ends them. Does not wait for replies."""
        in_slots = {slot: asked for slot, asked in self._asked.items() if asked.over}
        without = [asked for asked in self._without_slot if asked.over]
        self._asked = {slot: asked for slot, asked in self._asked.items() if slot not in in_slots}
        self._without_slot = [asked for asked in self._without_slot if asked not in without]
        extended: list[tuple[int, Row]] = []
        version = self.engine.weights.version
        for slot, (row, reply, _) in [*in_slots.items(), *((None, asked) for asked in without)]:
            if row.cancelled or not row.take(reply.result(), version):
                self._end(row, slot)
            elif slot is None:
                self._prefill_again(row)
            else:
                extended.append((slot, row))
        self._extend(extended)

    def _lend(self, slot: int) -> int:
        """Takes `slot` from the row that waits for its reply there, and returns `slot`."""
        self._without_slot.append(self._asked.pop(slot))
        return slot

    def _prefill_again(self, row: Row) -> None:
        context = row.context
        tokens = np.zeros((1, prompt_bucket(len(context), self.engine.decoding.capacity)), np.int32)
        tokens[0, : len(context)] = context
        row.prompt_row = 0
        prefix = self.engine.prefill(tokens=tokens, lengths=np.array([len(context)], np.int32))
        self._waiting.appendleft((prefix, row))
        self._usage.again_tokens += len(context)

    def _extend(self, rows: Sequence[tuple[int, Row]]) -> None:
        """Appends each row's observation to its slot, `EXTENSION_TOKENS` at a time; the rows then are in `live`."""
        decoding = self.engine.decoding
        by_round: dict[tuple[int, int], list[Extension]] = {}
        for slot, row in rows:
            observation = row.transcript.tokens[-1]
            for first in range(0, len(observation), EXTENSION_TOKENS):
                piece, start = observation[first : first + EXTENSION_TOKENS], row.length - len(observation) + first
                bucket, last = prompt_bucket(len(piece), decoding.capacity), first + len(piece) == len(observation)
                own = slot, piece, start, last, row.transcript.count, row.limit
                by_round.setdefault((first, bucket), []).append(own)
            self._usage.extended_tokens += len(observation)
        for (_, bucket), pieces in sorted(by_round.items()):
            most = min(EXTENSION_ROWS, max(1, EXTENSION_TOKENS // bucket))
            for i in range(0, len(pieces), most):
                assert self._state is not None  # the rows are in slots
                self._state = self.engine.extend(self._state, pieces[i : i + most], (most, bucket))
        self.live.update(rows)
