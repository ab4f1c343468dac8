"""Evaluations on the held-out sets: their scores in training, or all completions in a file that survives a kill."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rpg_jax.data import Group, Problem
from rpg_jax.data.dialogue import last_shown
from rpg_jax.parallel import hosts
from rpg_jax.report import scores
from rpg_jax.rewards import Scorer
from rpg_jax.rollout import Rollout
from rpg_jax.runs.drift import Drift
from rpg_jax.runs.logs import told
from rpg_jax.storage import json_files
from rpg_jax.training.collect import Collector
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.state import TrainState

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Scores the optimizer's evaluation weights on every held-out set, in the middle of training.

    Attributes:
      sets: problems by the name of their set.
      generate: draws groups by `rollout`, with noise that training does not use.
      doing: receives a line on the evaluation that begins.
      drift: measures how far the policy is from the policy before the first step; None measures nothing.
    """

    sets: Mapping[str, Sequence[Problem]]
    generate: GroupGenerator
    scorer: Scorer
    rollout: Rollout
    optimizer: Optimizer
    doing: Callable[[str], None]
    drift: Drift | None = None

    def evaluate(self, step: int, state: TrainState, collector: Collector) -> dict[str, float]:
        """Scores by set, and the means of `with_mean`; gives the rollout back with the weights of `state`."""
        values: dict[str, float] = {}
        version = int(state.updates)
        with collector.exclusive():
            params = self.optimizer.evaluation_params(state.opt_state, state.params)
            if params is not state.params or collector.lags:
                self.rollout.sync_weights(params, version)
            if self.drift is not None and step == 0:
                self.drift.begin(params)
            for name, problems in self.sets.items():
                self.doing(f"the evaluation of {name} after step {step}")
                groups = self.generate(problems, step=step)
                far = {} if self.drift is None else self.drift.metrics(groups, params)
                values |= set_scores(name, groups, self.scorer, far)
            collector.sync(state.params, version)
        return with_mean(values)


def set_scores(
    name: str, groups: Sequence[Group], scorer: Scorer, more: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """The scores of the groups of a held-out set, and `more` of them, as metrics "eval/<set>/<score>"."""
    own = records(name, groups, scorer)
    if hosts.is_first() and (note := scores.without_verdict(name, own)):
        print(note, file=sys.stderr)
    found = {**scores.metrics(own), **more}
    return {f"eval/{name}/{key}": value for key, value in found.items()}


def with_mean(values: Mapping[str, float]) -> dict[str, float]:
    """The `set_scores` of all sets, and means over sets: of accuracy "eval/accuracy", of rewards "eval/reward"."""

    def mean(score: str) -> float:
        return float(np.mean([value for key, value in values.items() if key.endswith(f"/{score}")]))

    return {"eval/accuracy": mean("mean_at_k"), "eval/reward": mean("reward"), **values}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Problems of one set that are sampled together, `samples` completions each."""

    set: str
    problems: Sequence[Problem]
    samples: int

    @property
    def keys(self) -> list[tuple[str, int, int]]:
        """(set, prompt_id, index) of every record, in order."""
        return [(self.set, p.prompt_id, i) for p in self.problems for i in range(self.samples)]


def plan(sets: Mapping[str, Sequence[Problem]], samples: Callable[[Problem], int], *, completions: int) -> list[Chunk]:
    """Chunks of about `completions` completions, in the order of the sets and their problems."""
    chunks: list[Chunk] = []
    for name, problems in sets.items():
        waiting: list[Problem] = []
        for problem in problems:
            k = samples(problem)
            if waiting and (k != samples(waiting[0]) or (len(waiting) + 1) * k > completions):
                chunks.append(Chunk(name, waiting, samples(waiting[0])))
                waiting = []
            waiting.append(problem)
        if waiting:
            chunks.append(Chunk(name, waiting, samples(waiting[0])))
    return chunks


def complete(
    file: Path, chunks: Sequence[Chunk], generate: GroupGenerator, scorer: Scorer, *, step: int
) -> Iterator[tuple[Chunk, list[Record]]]:
    """Yields each chunk with its records, which are in `file` by then, one JSON object a line.

    It reads the chunks that the file holds whole, cuts off what a kill left behind them, then samples and appends the
    rest. Every chunk has a call of its own, so the bytes are those of an evaluation that was not killed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    size = 0
    for chunk in chunks:
        own = [record for record in map(_parsed, lines[: len(chunk.keys)]) if record is not None]
        if [(r["set"], r["prompt_id"], r["index"]) for r in own] == chunk.keys:
            size += sum(map(len, lines[: len(own)]))
            lines = lines[len(own) :]
        else:
            lines = []
            own = records(chunk.set, generate(chunk.problems, step=step, group_size=chunk.samples), scorer)
            text = "".join(json_files.dumps(record) + "\n" for record in own).encode()
            with file.open("r+b" if file.exists() else "wb") as out:
                out.truncate(size)
                out.seek(size)
                out.write(text)
            size += len(text)
        yield chunk, own


def records(name: str, groups: Sequence[Group], scorer: Scorer) -> list[Record]:
    """One record for each completion of the groups of a held-out set."""
    found = []
    given = scorer.answers([group.problem for group in groups], [[*map(last_shown, g.texts)] for g in groups])
    for group, answers in zip(groups, given, strict=True):
        right = [bool(a > 0.5) for a in group.accuracy]
        failures = group.failures or [None] * len(right)
        found += [
            {
                "set": name,
                "prompt_id": group.problem.prompt_id,
                "index": i,
                "prompt": group.problem.prompt,
                "reference": group.problem.answer,
                "completion": group.texts[i],
                "answer": answers[i],
                "verdict": "right" if right[i] else failures[i] or "wrong",
                "reward": float(group.rewards[i]),
                **told(completion),
            }
            for i, completion in enumerate(group.completions)
        ]
    return found


def _parsed(line: bytes) -> Record | None:
    """The record of a whole line; None for one that a kill cut short."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None
