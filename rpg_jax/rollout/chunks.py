"""The host's side of a rollout: it plans which prompts are prefilled together, and collects the completions."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rpg_jax.rollout.decoding import power_of_two, prompt_bucket, prompts_per_prefill
from rpg_jax.rollout.engine import QwenEngine
from rpg_jax.rollout.interface import Request
from rpg_jax.rollout.row import Row
from rpg_jax.rollout.weights import RolloutError
from rpg_jax.types import Completion


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """Prompts that are prefilled in one forward pass, and the completions that start from them.

    Attributes:
      tokens: i32[P, T], right-padded. lengths: i32[P].
      rows: completions; each names its prompt's row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rows: list[Row]


class Finish:
    """Counts down the rows of a request, `groups`. After the first `enough` complete groups, it cancels all others.

    A group that is done already has no rows.
    """

    def __init__(self, request: Request, groups: Sequence[Sequence[Row]]):
        self._groups, self._left, self._on_group = groups, [len(rows) for rows in groups], request.on_group
        self._wanted = sum(map(bool, groups)) if request.enough is None else request.enough

    @property
    def over(self) -> bool:
        """Whether all wanted groups are complete."""
        return self._wanted == 0

    def completed(self, row: Row) -> None:
        """Notes that `row` has ended. Call it from one thread at a time, in the order in which rows end."""
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


class Planner:
    """Turns requests into rows and chunks, and complete rows into completions."""

    def __init__(self, engine: QwenEngine):
        self._vocab_size, self._decoding = engine.config.vocab_size, engine.decoding

    def plan(self, request: Request) -> tuple[list[list[Row]], list[Chunk]]:
        """Rows [P][G] in the order of the prompts, and chunks in the request's order.

        A prompt that is done has no rows, but its place in a chunk; a chunk without rows is left out. Where no group is
        wanted there are no rows.

        Raises:
          ValueError: the engine cannot serve the request.
        """
        request.check_fits(capacity=self._decoding.capacity, vocab_size=self._vocab_size)
        done = range(len(request.prompts)) if request.enough == 0 else request.done
        groups = [
            [
                Row(prompt, request.counters(place, index), request.sampling, place, environment=request.environment)
                for index in range(0 if place in done else request.group_size)
            ]
            for place, prompt in enumerate(request.prompts)
        ]
        return groups, self._chunks(request.prompts, request.order, groups)

    def completions(self, request: Request, groups: Sequence[Sequence[Row]], version: int) -> list[list[Completion]]:
        """The completions of complete rows that began under weights of `version`; [] for each group that
        is done already or cancelled.

        Raises:
          RolloutError: log-probabilities that are not finite, or tokens of other weights where `mixed` does not allow
            them.
        """
        groups = [[] if group and group[0].cancelled else group for group in groups]
        others = {v for group in groups for row in group for v, _ in row.written.spans} - {version}
        if others and not self._decoding.mixed:
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
                        f"the weights (version {row.written.spans[-1][0]}) give non-finite logits"
                    )
        return made

    def _chunks(
        self, prompts: Sequence[np.ndarray], order: Sequence[int], groups: Sequence[Sequence[Row]]
    ) -> list[Chunk]:
        """Chunks of one length bucket each, with as many prompts as a prefill takes.

        The number of a prefill's rows is a power of two, and unused rows are padding. So prompts of any number and
        length need few compiled shapes.
        """
        buckets = {i: prompt_bucket(len(prompts[i]), self._decoding.capacity) for i in order}
        chunks, pending = [], list(order)
        while pending:
            width = buckets[pending[0]]
            most = prompts_per_prefill(width, self._decoding.prefill_tokens)
            taken = [i for i in pending if buckets[i] == width][:most]
            pending = [i for i in pending if i not in taken]
            height = power_of_two(len(taken))
            tokens, lengths = np.zeros((height, width), np.int32), np.ones(height, np.int32)
            for row, i in enumerate(taken):
                tokens[row, : len(prompts[i])], lengths[row] = prompts[i], len(prompts[i])
                for completion in groups[i]:
                    completion.prompt_row = row
            chunks.append(Chunk(tokens, lengths, [row for i in taken for row in groups[i]]))
        return [chunk for chunk in chunks if chunk.rows]
