"""Partial rollouts: a step draws at most S tokens of a completion, and later steps draw the rest under their weights.

So no step waits for its longest completion. A completion of at most M tokens has K = ceil(M / S) parts. The groups that
step s trains begin in step s - K + 1, and each step until s draws one part of each. The first step of a run draws all
parts of its own groups, and the first K - j parts of the groups of the j-th step after it, j < K. Nothing begins for
steps beyond the last one, so a run that is made longer later differs from a run that was long from the start.

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

from rpg_jax.data.groups import decode_groups, encode_groups, unscored
from rpg_jax.training.ahead import aged
from rpg_jax.training.collect import Collected, Collector
from rpg_jax.training.generate import Part


@dataclasses.dataclass(eq=False, kw_only=True)
class PartialCollector(Collector):
    """Collects the groups of a step, whose first parts earlier steps have drawn.

    A step draws the next part of every completion that goes on; the first step of a run draws several parts. A step
    scores its own groups when they are complete. With dynamic sampling, only its first batch is drawn in parts.

    Attributes:
      generator, stream, prompts_per_step, dynamic: as in `Collector`. The `surplus` of `dynamic` must be "drop".
      max_tokens: M, the most tokens of a completion.
      part_tokens: S, the most tokens of a part; a completion has at most K = ceil(M / S) parts.
      steps: the number of steps of the run; nothing begins for later steps.
    """

    max_tokens: int
    part_tokens: int
    steps: int
    lags = True

    def __post_init__(self) -> None:
        self._parts = math.ceil(self.max_tokens / self.part_tokens)
        self._batches: dict[int, list[Part]] = {}  # the groups that have begun, by the step that trains them

    def take(self, step: int, params: Any, version: int) -> Collected:
        """Begins the groups of steps up to `step` + K - 1, draws the next part of every completion, and returns the
        groups of `step` (from 0), complete and scored. Called once a step, in order. `version` is the trainer's number
        of updates; `params` is not read: `publish` has brought the weights. Raises the errors of `Collector.take`."""
        due = range(step, min(step + self._parts, self.steps))
        for number in due:
            if number not in self._batches:
                self._batches[number] = self._next_batch(number)
        self._draw(step, due)
        groups = [one.group for one in self._batches.pop(step)]
        return aged(self._next(step, begun=self.generator.judge(groups)), version)

    def record(self) -> dict[str, Any]:
        """Returns everything that a resume needs, JSON-able; "partial" has the batches whose groups have begun, by
        step. A batch has its draws, and its groups without scores, with the completions so far."""
        kept = {
            str(number): {"draws": [one.draw for one in own], "groups": encode_groups([one.group for one in own])}
            for number, own in self._batches.items()
        }
        return super().record() | {"partial": kept}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes back to the state that `record` returned. Raises ValueError if an `AheadCollector` wrote the record, or
        if the stream has other problems or another seed; KeyError if a plain `Collector` wrote the record."""
        super().restore(record)
        self._batches = {}
        for number, own in record["partial"].items():
            groups = zip(decode_groups(own["groups"]), own["draws"], strict=True)
            self._batches[int(number)] = [Part(group, int(number), draw) for group, draw in groups]

    def _next_batch(self, step: int) -> list[Part]:
        """Returns the next problems as groups of `step` without completions. With dynamic sampling a problem is in a
        batch once; without dynamic sampling its n-th group is draw n - 1."""
        count, dynamic = self.prompts_per_step, self.dynamic
        if dynamic is not None:
            count = dynamic.batch_size(count, missing=count, share=self.share)
        seen: collections.Counter[int] = collections.Counter()
        batch: list[Part] = []
        for problem in self.stream.take(count):
            if dynamic is None or not seen[problem.prompt_id]:
                group = unscored(problem, self.generator.encode(problem), [])
                batch.append(Part(group, step, seen[problem.prompt_id]))
            seen[problem.prompt_id] += 1
        return batch

    def _draw(self, step: int, due: range) -> None:
        """Draws the next part of every completion of the steps `due` that has not ended."""
        parts: list[Part] = []
        places: list[tuple[list[Part], int]] = []
        for number in due:
            batch = self._batches[number]
            most = min(self.max_tokens, (self._parts - number + step) * self.part_tokens)
            for place, begun in enumerate(batch):
                made = begun.group.completions
                going_on = [i for i, c in enumerate(made) if c.finish_reason == "length" and len(c.tokens) < most]
                chosen = going_on if made else [None]
                parts += [dataclasses.replace(begun, max_tokens=most, index=i) for i in chosen]
                places += [(batch, place)] * len(chosen)
        drawn = self.generator.draw(parts, step=step) if parts else []
        for part, (batch, place), completions in zip(parts, places, drawn, strict=True):
            first, group = part.index or 0, batch[place].group
            joined = [*group.completions]
            joined[first : first + len(completions)] = completions
            batch[place] = dataclasses.replace(batch[place], group=unscored(group.problem, group.prompt, joined))
