"""The tasks whose problems are generated: from the task fields of a config to problems and demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from rpg_jax import data
from rpg_jax.data.guessing import DIGITS
from rpg_jax.environments import Environment, Message, Posed
from rpg_jax.environments.calculator import Calculator
from rpg_jax.environments.demonstrations import played
from rpg_jax.environments.narrowing import Narrowing

Demonstration = str | Sequence[Message]
"""What supervised training imitates: one turn, or the messages after a prompt, of which it imitates the assistant's."""
Examples = Callable[[Sequence[data.Problem]], list[tuple[data.Problem, Demonstration]]]
_CHAINS = 50_000


class Generated(NamedTuple):
    """The fields of a `problems.Task`."""

    train: list[data.Problem]
    held_out: dict[str, list[data.Problem]]
    texts: Iterable[str]
    notes: Sequence[str]
    examples: Examples


def _arithmetic(config: ConfigDict) -> Generated:
    t = config.task
    task = data.Arithmetic(
        operators=t.operations,
        digits=t.digits,
        reverse=t.reverse,
        chain_of_thought=t.chain_of_thought,
        held_out=t.held_out,
    )
    held_out = task.problems("held_out")
    sets = {name: [p for p in held_out if task.belongs(p, name)] for name in _held_out_sets(config)}
    if empty := [name for name, problems in sets.items() if not problems]:
        raise ValueError(
            f"set {empty[0]!r} has no problem of task.operations={t.operations!r} and task.digits={t.digits}: leave it "
            "out of task.held_out_sets"
        )
    sets, notes = cut(sets, config.evaluation.problems)
    return Generated(task.problems("train", t.generated), sets, task.texts(), notes, _written_by(task.examples))


def _chains(config: ConfigDict) -> Generated:
    t, count = config.task, config.evaluation.problems
    fewest, _, most = t.links.partition("-")
    if not (fewest.isdigit() and most.isdigit()):
        raise ValueError(f"task.links must be FEWEST-MOST, as 5-8; got {t.links!r}")
    task = data.Chains(operators=t.operations, links=(int(fewest), int(most)), held_out=t.held_out)
    held_out = {name: task.problems(name, count) for name in _held_out_sets(config)}
    train = task.problems("train", t.generated or _CHAINS)
    return Generated(train, held_out, task.texts(), (), _written_by(task.examples))


def _guessing(config: ConfigDict) -> Generated:
    task = data.Guessing(held_out=config.task.held_out)
    return _game(config, task, _played_by(task.guess, Narrowing(base=len(DIGITS)), config.environment.max_turns))


def _calculator(config: ConfigDict) -> Generated:
    task = data.Calculations(held_out=config.task.held_out)
    return _game(config, task, _played_by(task.turn, Calculator(), config.environment.max_turns))


def _game(config: ConfigDict, task: data.Guessing | data.Calculations, examples: Examples) -> Generated:
    sets, notes = cut({name: task.problems(name) for name in _held_out_sets(config)}, config.evaluation.problems)
    return Generated(task.problems("train", config.task.generated), sets, task.texts(), notes, examples)


GENERATED: Mapping[str, Callable[[ConfigDict], Generated]] = {
    "arithmetic": _arithmetic,
    "chains": _chains,
    "guessing": _guessing,
    "calculator": _calculator,
}
"""What makes a generated task, by `task.name`."""


def _written_by(examples: Callable[[Sequence[data.Problem]], list[tuple[str, str]]]) -> Examples:
    """The pairs that a generated task writes; it may ask for another prompt in a problem's place."""

    def pairs(problems: Sequence[data.Problem]) -> list[tuple[data.Problem, Demonstration]]:
        written = zip(problems, examples(problems), strict=True)
        return [(dataclasses.replace(p, prompt=prompt), target) for p, (prompt, target) in written]

    return pairs


def _played_by(pupil: Callable[[data.Problem, Sequence[str]], str], environment: Environment, turns: int) -> Examples:
    """The conversations of a pupil, who takes a turn for a problem and the observations so far."""

    def conversation(problem: data.Problem) -> Demonstration:
        return played(environment, Posed.of(problem), lambda heard: pupil(problem, heard), turns=turns)[-1]

    return lambda problems: [(problem, conversation(problem)) for problem in problems]


def _held_out_sets(config: ConfigDict) -> list[str]:
    return listed(config.task.held_out_sets or "held out")


def cut(sets: Mapping[str, Sequence[data.Problem]], count: int) -> tuple[dict[str, list[data.Problem]], list[str]]:
    """The first `count` problems of each set, and a line on each set that has more."""
    notes = [
        f"{name}: the first {count} of {len(problems)} problems; evaluation.problems={len(problems)} takes all"
        for name, problems in sets.items()
        if len(problems) > count
    ]
    return {name: [*problems[:count]] for name, problems in sets.items()}, notes


def listed(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
