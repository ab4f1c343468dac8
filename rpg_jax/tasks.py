"""What is trained on and what is held out: from the task fields of a config to problems whose prompts fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rpg_jax import data

NAMES = ("arithmetic", "files")


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems by split.

    Attributes:
      train: problems to learn from.
      held_out: problems to evaluate on, by the name of their set.
      texts: with every character that a prompt or an answer has, for training a tokenizer.
      examples: (prompt, target) pairs of problems for a supervised warm start, where the task can write them.
    """

    train: list[data.Problem]
    held_out: dict[str, list[data.Problem]]
    texts: Iterable[str]
    examples: Callable[[Sequence[data.Problem]], list[tuple[str, str]]] | None = None

    @classmethod
    def from_config(cls, config: ConfigDict, *, train: bool = True) -> Task:
        """The task that `task.name` names; without its training problems where nobody will train.

        Raises:
          ValueError: an unknown name, missing sources, or bad rows in them.
        """
        name = config.task.name
        if name not in NAMES:
            raise ValueError(f"unknown task.name {name!r}; known: {', '.join(NAMES)}")
        return _arithmetic(config) if name == "arithmetic" else _files(config, train)

    def encoded(self, tokenizer: data.Tokenizer, config: ConfigDict) -> tuple[Task, list[str]]:
        """The task without the problems whose prompts are too long, and a line on each split that lost some."""
        notes = []

        def fitting(name: str, problems: list[data.Problem]) -> list[data.Problem]:
            options = {"max_tokens": config.task.max_prompt_tokens, "too_long": config.task.too_long}
            kept = data.encode_prompts(problems, tokenizer, thinking=config.task.thinking, **options)
            if kept.dropped or kept.truncated:
                notes.append(
                    f"{name}: of {len(problems)} prompts {kept.dropped} dropped and {kept.truncated} truncated "
                    f"(longer than task.max_prompt_tokens={config.task.max_prompt_tokens})"
                )
            if not kept.problems:
                raise ValueError(f"{notes[-1]}: nothing is left; raise task.max_prompt_tokens")
            return kept.problems

        held_out = {name: fitting(name, problems) for name, problems in self.held_out.items()}
        train = fitting("train", self.train) if self.train else []
        return dataclasses.replace(self, train=train, held_out=held_out), notes


def encoder(tokenizer: data.Tokenizer, config: ConfigDict) -> Callable[[data.Problem], np.ndarray]:
    """Token ids of a prompt, its last `task.max_prompt_tokens` where it is longer."""
    limit, thinking = config.task.max_prompt_tokens, config.task.thinking
    return lambda problem: data.encode_prompt(problem, tokenizer, thinking=thinking)[-limit:]


def _arithmetic(config: ConfigDict) -> Task:
    t = config.task
    task = data.Arithmetic(
        operators=t.operations,
        digits=t.digits,
        reverse=t.reverse,
        chain_of_thought=t.chain_of_thought,
        held_out=t.held_out,
    )
    held_out = task.problems("held_out")
    sets = {name: [p for p in held_out if task.belongs(p, name)] for name in _listed(t.held_out_sets or "held out")}
    return Task(
        train=task.problems("train", t.generated),
        held_out={name: problems[: config.evaluation.problems] for name, problems in sets.items()},
        texts=task.texts(),
        examples=task.examples,
    )


def _files(config: ConfigDict, train: bool) -> Task:
    t = config.task
    if (train and not t.train) or not t.held_out_sets:
        raise ValueError('task.name="files" needs task.train=SOURCE[,SOURCE] and task.held_out_sets=NAME=SOURCE[,...]')
    options: dict[str, Any] = {"bad_rows": t.bad_rows, "template": t.template, "seed": config.seed}
    if t.generated:
        options["count"] = t.generated
    problems = data.load(_listed(t.train), **options)[0] if train else []
    held_out = {}
    for entry in _listed(t.held_out_sets):
        name, separator, source = entry.partition("=")
        if not separator:
            raise ValueError(f"task.held_out_sets: {entry!r} is not of the form NAME=SOURCE")
        held_out[name] = data.load(source, **options)[0][: config.evaluation.problems]
    everything = [*problems, *(p for each in held_out.values() for p in each)]
    return Task(problems, held_out, [f"{p.system}{p.prompt}{p.answer}" for p in everything])


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
