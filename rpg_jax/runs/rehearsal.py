"""Rehearsal: every update also trains on some completions of the start policy, which an evaluation has written.

Each update adds λ · (−mean log π_θ) of these completions to its loss. In expectation over the rehearsed prompts, the
term is λ KL(π_start‖π_θ) and a constant. A prompt is rehearsed if every completion of the start policy solves it
(DPH-RL, arXiv:2509.07430).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rpg_jax import data, storage
from rpg_jax.parallel import hosts
from rpg_jax.runs.experiment import Experiment
from rpg_jax.runs.layout import packing_shape
from rpg_jax.runs.supervised import packed
from rpg_jax.storage.files import read_object
from rpg_jax.training.step import Rehearsed
from rpg_jax.types import Batch, Completion


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The rehearsed completions, `examples`: each has a prompt and one completion. An update takes `count` of them.
    `coef` is λ, `pack` makes micro-batches, and `seed` decides the order.

    Update u takes the entries u · count … (u + 1) · count − 1 of a sequence of permutations of all examples. So a run
    that continues takes what it would have taken. The weight of a token is λ / (count · mean length in tokens of all
    examples). The sum over an update is then unbiased; a mean over the tokens of a few completions would not be.
    """

    examples: Sequence[data.Group]
    count: int
    coef: float
    pack: Callable[[Sequence[data.Group]], list[Batch]]
    seed: int

    def __call__(self, update: int) -> Rehearsed:
        """The micro-batches of update number `update`, from 0, and the weight of one token (the field `share`)."""
        size, first = len(self.examples), update * self.count
        passes = range(first // size, (first + self.count - 1) // size + 1)
        order = np.concatenate([np.random.default_rng([self.seed, p]).permutation(size) for p in passes])
        chosen = order[first % size : first % size + self.count]
        length = np.mean([len(e.completions[0].tokens) for e in self.examples])
        return Rehearsed(self.pack([self.examples[i] for i in chosen]), float(self.coef / (self.count * length)))


def open_rehearsal(e: Experiment) -> Rehearsal | None:
    """The rehearsal of a config; None if `rehearsal.path` is unset. A line on the screen counts the completions. Raises
    ValueError if the folder has no completions of an evaluation that sampled as the run does, or `kept` finds none."""
    if not e.config.rehearsal.path:
        return None
    c, folder = e.config, storage.local(e.config.rehearsal.path)
    if absent := [name for name in ("completions.jsonl", "settings.json") if not (folder / name).exists()]:
        raise ValueError(f"rehearsal.path={folder} has no {absent[0]}: give the folder that rpg_jax.evaluate wrote")
    check_settings(e, read_object(folder / "settings.json"))
    if not (examples := kept(e, data.file_rows(folder / "completions.jsonl"))):
        raise ValueError(f"rehearsal.path={folder}: no training problem has right completions only; evaluate more")
    if hosts.is_first():
        print(f"rehearsal.path={folder}: {len(examples)} completions, of problems that have right completions only")
    pack = functools.partial(packed, e, shape=packing_shape(e.layout))
    return Rehearsal(examples, c.rollout.prompts_per_step // c.train.updates_per_step, c.rehearsal.coef, pack, c.seed)


def check_settings(e: Experiment, settings: Mapping[str, Any]) -> None:
    """Raises ValueError unless an evaluation sampled with the temperature, thinking and tokenizer of the run's rollout,
    and without top-p, top-k and min-p. `settings` is its settings.json. The message names what differs."""
    wanted = {"temperature": e.config.rollout.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    wanted |= {"thinking": e.config.task.thinking, "tokenizer": e.tokenizer.digest()[:16]}
    if other := [f"{name}={settings.get(name)}, not {x}" for name, x in wanted.items() if settings.get(name) != x]:
        raise ValueError(f"rehearsal.path was sampled with {'; '.join(other)}: evaluate as the rollout samples")


def kept(e: Experiment, rows: Sequence[Mapping[str, Any]]) -> list[data.Group]:
    """The completions of the problems whose completions are all right, an example for each. `rows` are the lines of an
    evaluation's completions.jsonl, in which the completions of a problem stand together. Problems that the run
    evaluates, and problems whose prompts it would cut, are left out. Completions are left out that a limit has cut,
    that are longer than `rollout.max_tokens`, or whose text encodes to other tokens than were sampled. Raises
    ValueError if a row that remains has no digest of its tokens."""
    c, found = e.config, []
    held_out = {(problem.system, problem.prompt) for own in e.task.held_out.values() for problem in own}
    for _, group in itertools.groupby(rows, key=lambda row: (row["set"], row["prompt_id"])):
        own = [*group]
        problem = data.Problem(0, own[0]["prompt"], own[0]["reference"], "", system=own[0].get("system", ""))
        prompt = data.encode_prompt(problem, e.tokenizer, thinking=c.task.thinking)
        trained = len(prompt) <= c.task.max_prompt_tokens and (problem.system, problem.prompt) not in held_out
        if trained and all(row["verdict"] == "right" for row in own):
            whole = [row for row in own if row["finish_reason"] == "stop" and row["tokens"] <= c.rollout.max_tokens]
            found += [data.unscored(problem, prompt, [one]) for row in whole for one in sampled(row, e.tokenizer)]
    return found


def sampled(row: Mapping[str, Any], tokenizer: data.Tokenizer) -> list[Completion]:
    """[the completion of a row, as tokens with the stop token that was sampled]; [] if the text encodes to other tokens
    than were sampled. Raises ValueError for a row without a digest of the tokens."""
    if "digest" not in row:
        raise ValueError("rehearsal.path: an earlier version wrote it, without digests of the tokens; evaluate again")
    ends = [np.array([*tokenizer.encode(row["completion"]), stop], np.int32) for stop in tokenizer.stop_token_ids]
    completions = [Completion(tokens, np.zeros(len(tokens), np.float32), "stop", 0) for tokens in ends]
    return [one for one in completions if one.digest == row["digest"]]
