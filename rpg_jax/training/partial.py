"""Partial rollouts: a step draws at most S tokens of a completion, and later steps draw the rest under their weights.

So no step waits for its longest completion. A completion of at most M tokens has K = ceil(M / S) parts. The groups that
step s trains begin in step s - K + 1, and each step until s draws one part of each. The first step of a run draws all
parts of its own groups, and the first parts of the groups of the K - 1 steps after it. Nothing begins for steps beyond
the last one, so a run that is made longer later differs from a run that was long from the start.

Nothing that is drawn decides which step trains a group. Other systems train the groups that are complete first, and so
favour short completions.

Every token keeps the log-probability with which it was drawn. So the importance weight of a completion is exact,
although several weights have drawn it. The random numbers of a completion are those of the step that trains it: as long
as the weights do not change, all groups are the same as without this module.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from rpg_jax.data import Problem
from rpg_jax.data.groups import decode_groups, encode_groups, unscored
from rpg_jax.training.ahead import sampled
from rpg_jax.training.collect import Collector, DynamicSampling, Sampled
from rpg_jax.training.generate import GroupGenerator, Part
from rpg_jax.types import Completion


@dataclasses.dataclass
class _Batch:
    """Groups that have begun.

    Attributes:
      problems: of the groups.
      draws: of each group, see `GroupGenerator`.
      completions: of each group, so far; [] before the first part.
    """

    problems: list[Problem]
    draws: list[int]
    completions: list[list[Completion]]


@dataclasses.dataclass(eq=False, kw_only=True)
class PartialCollector(Collector):
    """Collects the groups of a step, whose first parts earlier steps have drawn.

    With dynamic sampling, a step's first batch is drawn in parts. If too few of its groups are informative, further
    batches are drawn whole. The groups are scored once all parts of the step are drawn.

    Attributes:
      collect, take_errors, rollout, stream: as in `Collector`.
      generator: draws the parts.
      prompts_per_step: groups that a step trains.
      dynamic: dynamic sampling, or None; surplus groups are dropped.
      max_tokens: M, the most tokens of a completion.
      part_tokens: S, the most tokens of a completion in a step.
      steps: the number of steps of the run; nothing begins for later steps.
    """

    generator: GroupGenerator
    prompts_per_step: int
    dynamic: DynamicSampling | None
    max_tokens: int
    part_tokens: int
    steps: int
    lags = True

    def __post_init__(self) -> None:
        self._parts = math.ceil(self.max_tokens / self.part_tokens)
        self._batches: dict[int, _Batch] = {}  # by the step that trains them

    def take(self, step: int, params: Any, version: int) -> Sampled:
        """Draws a part of every group that has begun, and returns the groups of `step` (from 0), complete then.

        `version` is the trainer's number of updates; `params` is not read: `publish` has brought the weights.
        """
        due = range(step, min(step + self._parts, self.steps))
        for number in due:
            if number not in self._batches:
                self._batches[number] = self._next_batch()
        self._draw(step, due)
        batch = self._batches.pop(step)
        collected = self._next(step, begun=self.generator.judge(batch.problems, batch.completions))
        return sampled(collected, self.take_errors(), version)

    def record(self) -> dict[str, Any]:
        """Everything that a resume needs, JSON-able; "partial" has the batches whose groups have begun, by step. A
        batch has its draws, and its groups without scores, with the completions so far."""

        def kept(batch: _Batch) -> dict[str, Any]:
            given = zip(batch.problems, batch.completions, strict=True)
            groups = [unscored(problem, self.generator.encode(problem), begun) for problem, begun in given]
            return {"draws": batch.draws, "groups": encode_groups(groups)}

        return super().record() | {"partial": {str(number): kept(batch) for number, batch in self._batches.items()}}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes back to the state that `record` returned. Raises ValueError if a collector sampling ahead wrote it."""
        super().restore(record)
        self._batches = {}
        for number, batch in record["partial"].items():
            groups = decode_groups(batch["groups"])
            completions = [group.completions for group in groups]
            self._batches[int(number)] = _Batch([group.problem for group in groups], batch["draws"], completions)

    def _next_batch(self) -> _Batch:
        """The next problems. With dynamic sampling a problem is in a batch once; without, its n-th group is draw n."""
        count, dynamic = self.prompts_per_step, self.dynamic
        if dynamic is not None:
            count = dynamic.batch_size(count, missing=count, share=self.share)
        seen: collections.Counter[int] = collections.Counter()
        problems, draws = [], []
        for problem in self.stream.take(count):
            if dynamic is None or not seen[problem.prompt_id]:
                problems.append(problem)
                draws.append(seen[problem.prompt_id])
            seen[problem.prompt_id] += 1
        return _Batch(problems, draws, [[] for _ in problems])

    def _draw(self, step: int, due: range) -> None:
        """Draws the next part of every completion of the steps `due` that has not ended."""
        parts: list[Part] = []
        groups: list[list[Completion]] = []
        for number in due:
            batch = self._batches[number]
            most = min(self.max_tokens, (self._parts - number + step) * self.part_tokens)
            for problem, draw, group in zip(batch.problems, batch.draws, batch.completions, strict=True):
                fresh = Part(problem, number, draw, most)
                cut = [(i, one) for i, one in enumerate(group) if one.finish_reason == "length"]
                going_on = [(i, one) for i, one in cut if len(one.tokens) < most]
                own = [dataclasses.replace(fresh, index=i, begun=one) for i, one in going_on] if group else [fresh]
                parts += own
                groups += [group] * len(own)
        drawn = self.generator.draw(parts, step=step) if parts else []
        for part, group, completions in zip(parts, groups, drawn, strict=True):
            first = part.index or 0
            group[first : first + len(completions)] = completions
