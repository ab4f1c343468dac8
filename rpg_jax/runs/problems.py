"""The problems of a run: its training and held-out problems, made from the task fields of a config. The end of the file
keeps the rows that a program hands over in files, which the task fields then name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rpg_jax import data, storage
from rpg_jax.environments import Message
from rpg_jax.environments.stage import Stage
from rpg_jax.rewards import verifiers
from rpg_jax.rewards.callables import load
from rpg_jax.runs.arguments import reward_arguments
from rpg_jax.runs.resolve import named_in_errors

Demonstration = str | Sequence[Message]
"""One turn as text, or the messages after a prompt, of which supervised training imitates the assistant's."""
Examples = Callable[[Sequence[data.Problem]], list[tuple[data.Problem, Demonstration]]]
Row = Mapping[str, Any]
Rows = Iterable[Row] | str | PathLike[str]
_FOLDER = "rows"  # the subfolder of `run.dir` with the rows that programs have handed over
_CHAINS = 50_000
# The seed of procedural held-out sets, whatever `config.seed` is. Generators seed problem i with seed + i, and training
# problems count from `config.seed`, so the two never meet.
_HELD_OUT_SEED = 2**30


def _shown(problems: Sequence[data.Problem]) -> list[tuple[data.Problem, Demonstration]]:
    return [(problem, text) for problem in problems for text in problem.demonstrations]


@dataclasses.dataclass(frozen=True)
class Task:
    """The problems of a run by split, and what supervised training and a new tokenizer learn from.

    Attributes:
      train: problems to learn from; [] if they are not loaded.
      held_out: problems to evaluate on, by the name of their set; {} if they are not loaded.
      texts: texts to train a tokenizer on, to be read once. They have every character of the prompts and answers.
      notes: lines for people on sets that are cut, and on rows and training problems that are left out.
      examples: problems -> (problem, demonstration) pairs for supervised training; by default a pair for each entry of
        `Problem.demonstrations`. The problem of a pair may have another prompt.
      demonstrated: the problems that supervised training learns from; None: the problems of `train`.
    """

    train: list[data.Problem]
    held_out: dict[str, list[data.Problem]]
    texts: Iterable[str]
    notes: Sequence[str] = ()
    examples: Examples = _shown
    demonstrated: Sequence[data.Problem] | None = None

    @property
    def to_imitate(self) -> Sequence[data.Problem]:
        """The problems that supervised training learns from: `demonstrated`, or `train` if `demonstrated` is None."""
        return self.train if self.demonstrated is None else self.demonstrated

    @classmethod
    def from_config(cls, config: ConfigDict, *, train: bool = True, held_out: bool = True) -> Task:
        """The task that `task.name` names: "files", a generated task, or a class "module:Class", which is imported.
        Without `train` or `held_out`, the files of these problems are not read; other tasks make all. Raises ValueError
        for an unknown name, a missing source, a bad row without `task.bad_rows` "skip", an empty set, or if
        `warm_start.train` has no demonstration."""
        name = config.task.name
        if name == "files":
            return _files(config, train, held_out)
        if name not in GENERATED and ":" not in name:
            raise ValueError(f"unknown task.name {name!r}; known: {', '.join([*GENERATED, 'files', 'module:Class'])}")
        with named_in_errors(f"task.name={name}"):
            task = GENERATED.get(name, _own)(config)
        notes = [*task.notes]
        own = _demonstrations(config, task.held_out, notes) if train and config.warm_start.enabled else None
        if own is None:
            return task
        texts = [*task.texts, *_texts(own)]
        return dataclasses.replace(task, texts=texts, notes=notes, examples=_shown, demonstrated=own)

    def with_answers(self, config: ConfigDict) -> Task:
        """A copy whose `train` and `held_out` have only problems with an answer; the task itself if the config's
        rewards need no answers. `notes` count what each split has lost. Raises ValueError if a split loses all."""
        if not verifiers.needs_answers(reward_arguments(config)[0]):
            return self
        notes = [*self.notes]

        def answered(name: str, problems: list[data.Problem]) -> list[data.Problem]:
            kept = [p for p in problems if p.answer]
            if len(kept) < len(problems):
                notes.append(f"{name}: {len(problems) - len(kept)} of {len(problems)} problems have no answer")
            if problems and not kept:
                raise ValueError(
                    f"{notes[-1]}: give rows an `answer`, or name a reward that needs none (rewards.parts=module:"
                    "function); python -m rpg_jax.sft learns from demonstrations alone"
                )
            return kept

        held_out = {name: answered(name, problems) for name, problems in self.held_out.items()}
        return dataclasses.replace(self, train=answered("train", self.train), held_out=held_out, notes=notes)

    def opened(self, stage: Stage) -> Task:
        """A copy whose problems begin with the messages with which the environment of `stage` opens them. `texts` get
        the messages too. Blocks until all are opened. Raises ValueError if the environment fails on a problem."""
        train, shown = stage.opened(self.train), self.demonstrated
        held_out = {name: stage.opened(problems) for name, problems in self.held_out.items()}
        shown = shown and stage.opened(shown)
        said = (m["content"] for p in (*train, *(p for each in held_out.values() for p in each)) for m in p.messages)
        texts = [*self.texts, *dict.fromkeys(said)]
        return dataclasses.replace(self, train=train, held_out=held_out, texts=texts, demonstrated=shown)

    def encoded(self, tokenizer: data.Tokenizer, config: ConfigDict) -> Task:
        """A copy without problems whose prompts have more than `task.max_prompt_tokens` tokens. `notes` gets a line on
        each split that had long prompts. With `task.too_long` "truncate" the copy keeps these problems as they are:
        prompts are cut later. Raises ValueError if a split keeps no problem."""
        notes = [*self.notes]

        def fitting(name: str, problems: list[data.Problem]) -> list[data.Problem]:
            limit, thinking = config.task.max_prompt_tokens, config.task.thinking
            kept, longer = data.filter_length(problems, tokenizer, limit, thinking=thinking)
            if longer:
                truncates = config.task.too_long == "truncate"
                dropped, truncated = (0, len(longer)) if truncates else (len(longer), 0)
                kept = problems if truncates else kept
                notes.append(
                    f"{name}: of {len(problems)} prompts {dropped} dropped and {truncated} truncated "
                    f"(longer than task.max_prompt_tokens={limit})"
                )
            if not kept:
                shortest = min((data.encode_prompt(p, tokenizer, thinking=thinking) for p in problems), key=len)
                raise ValueError(
                    f"{notes[-1]}: nothing is left. The shortest has {len(shortest)} tokens and begins "
                    f"{tokenizer.decode(shortest[:12].tolist())!r}: raise task.max_prompt_tokens, or choose a shorter "
                    "task.template"
                )
            return kept

        held_out = {name: fitting(name, problems) for name, problems in self.held_out.items()}
        train = fitting("train", self.train) if self.train else []
        shown = fitting("demonstrations", [*self.demonstrated]) if self.demonstrated else self.demonstrated
        return dataclasses.replace(self, train=train, held_out=held_out, notes=notes, demonstrated=shown)


def _arithmetic(config: ConfigDict) -> Task:
    t = config.task
    task = data.Arithmetic(operators=t.operations, digits=t.digits, reverse=t.reverse, held_out=t.held_out)
    held_out = task.problems("held_out")
    sets = {name: [p for p in held_out if task.belongs(p, name)] for name in _held_out_sets(config)}
    if empty := [name for name, problems in sets.items() if not problems]:
        raise ValueError(
            f"set {empty[0]!r} has no problem of task.operations={t.operations!r} and task.digits={t.digits}: leave it "
            "out of task.held_out_sets"
        )
    sets, notes = cut(sets, config.evaluation.problems)
    return Task(task.problems("train", t.generated), sets, task.texts(), notes, _written_by(task.examples))


def _chains(config: ConfigDict) -> Task:
    t, count = config.task, config.evaluation.problems
    fewest, _, most = t.links.partition("-")
    if not (fewest.isdecimal() and most.isdecimal()):
        raise ValueError(f"task.links must be FEWEST-MOST, as 5-8; got {t.links!r}")
    task = data.Chains(operators=t.operations, links=(int(fewest), int(most)), held_out=t.held_out)
    held_out = {name: task.problems(name, count) for name in _held_out_sets(config)}
    train = task.problems("train", t.generated or _CHAINS)
    return Task(train, held_out, task.texts(), (), _written_by(task.examples))


def _own(config: ConfigDict) -> Task:
    """A task of the user's own: the class "module:Class" of `task.name`, made with `held_out=task.held_out`. The class
    has `problems(name, count=None)`, for "train" with `task.generated` and for each held-out set without a count;
    `texts()`, with every character of the task; for a warm start, `examples(problems, turns=environment.max_turns)`: a
    text or the messages of a conversation for each. Raises ValueError for a wrong class, and for an empty set."""
    make = load(config.task.name, "task")
    task = make(held_out=config.task.held_out)
    if missing := [name for name in ("problems", "texts") if not callable(getattr(task, name, None))]:
        raise ValueError(f"task.name={config.task.name}: it has no {missing[0]}(); docs/environments.md has an example")
    sets, notes = cut({name: task.problems(name) for name in _held_out_sets(config)}, config.evaluation.problems)
    if empty := [name for name, problems in sets.items() if not problems]:
        raise ValueError(f"task.name={config.task.name} has no problem in the set {empty[0]!r} of task.held_out_sets")

    def examples(problems: Sequence[data.Problem]) -> list[tuple[data.Problem, Demonstration]]:
        shown = task.examples(problems, turns=config.environment.max_turns) if hasattr(task, "examples") else ()
        return list(zip(problems, shown, strict=bool(shown)))

    train = list(task.problems("train", config.task.generated))
    for problem in itertools.chain(train, *sets.values()):
        texts = (problem.prompt, problem.answer) if isinstance(problem, data.Problem) else (None,)
        if not all(isinstance(text, str) for text in texts):
            name = config.task.name
            raise ValueError(f"task.name={name}: {problem!r:.80} is no Problem whose prompt and answer are texts")
    known = list(task.texts() or ())
    if wrong := [text for text in known if not isinstance(text, str)]:
        raise ValueError(f"task.name={config.task.name}: texts() has {wrong[0]!r:.80}, which is no text")
    return Task(train, sets, known, notes, examples)


GENERATED: Mapping[str, Callable[[ConfigDict], Task]] = {"arithmetic": _arithmetic, "chains": _chains}
"""The functions that make a generated task, by `task.name`."""


def _written_by(examples: Callable[[Sequence[data.Problem]], list[tuple[str, str]]]) -> Examples:
    """Makes `Task.examples` from a generated task's `examples`, which gives each problem a (prompt, text)."""

    def pairs(problems: Sequence[data.Problem]) -> list[tuple[data.Problem, Demonstration]]:
        written = zip(problems, examples(problems), strict=True)
        return [(dataclasses.replace(p, prompt=prompt), target) for p, (prompt, target) in written]

    return pairs


def _held_out_sets(config: ConfigDict) -> list[str]:
    return listed(config.task.held_out_sets or "held out")


def cut(sets: Mapping[str, Sequence[data.Problem]], count: int) -> tuple[dict[str, list[data.Problem]], list[str]]:
    """(the first `count` problems of each set, a line on each set that has more, with the field that takes all)."""
    notes = [
        f"{name}: the first {count} of {len(problems)} problems; evaluation.problems={len(problems)} takes all"
        for name, problems in sets.items()
        if len(problems) > count
    ]
    return {name: [*problems[:count]] for name, problems in sets.items()}, notes


def listed(text: str) -> list[str]:
    """The parts of a text between commas, without blanks around the parts and without empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _files(config: ConfigDict, train: bool, held_out: bool) -> Task:
    t = config.task
    if (train and not t.train) or (held_out and not t.held_out_sets):
        raise ValueError('task.name="files" needs task.train=SOURCE[,SOURCE] and task.held_out_sets=NAME=SOURCE[,...]')
    notes: list[str] = []
    sets = {}
    for entry in listed(t.held_out_sets) if held_out else ():
        name, separator, source = entry.partition("=")
        if not separator or name in sets:
            raise ValueError(f"task.held_out_sets: {entry!r} is not of the form NAME=SOURCE, with a NAME of its own")
        sets[name] = _loaded(config, name, [source], notes, seed=_HELD_OUT_SEED)
    problems: list[data.Problem] = []
    shown: list[data.Problem] = []
    if train:
        problems, lost = _without(sets, _loaded(config, "train", listed(t.train), notes, seed=config.seed))
        notes += lost
        if config.warm_start.enabled:
            own = _demonstrations(config, sets, notes)
            shown = [p for p in problems if p.demonstrations] if own is None else own
    first, cuts = cut(sets, config.evaluation.problems)
    everything = [*problems, *shown, *(p for each in first.values() for p in each)]
    return Task(problems, first, _texts(everything), [*notes, *cuts], demonstrated=shown)


def _demonstrations(
    config: ConfigDict, sets: Mapping[str, Sequence[data.Problem]], notes: list[str]
) -> list[data.Problem] | None:
    """The problems of `warm_start.train` that have demonstrations; None if this field is unset. Problems of the
    held-out `sets` are left out. Raises ValueError if no problem has a demonstration."""
    sources = config.warm_start.train
    if not sources:
        return None
    problems, _ = _without(sets, _loaded(config, "demonstrations", listed(sources), notes, seed=config.seed))
    shown = [p for p in problems if p.demonstrations]
    if not shown:
        raise ValueError(
            f"warm_start.train={sources}: no row has a demonstration: give rows a `demonstration` or `completion`, or "
            "`messages` that end with the assistant's"
        )
    return shown


def _loaded(config: ConfigDict, name: str, sources: list[str], notes: list[str], *, seed: int) -> list[data.Problem]:
    """The problems of `sources`. If bad rows are left out, a line on these rows of the split `name` joins `notes`."""
    t = config.task
    counted = {"count": t.generated} if t.generated else {}
    problems, report = data.load(sources, bad_rows=t.bad_rows, template=t.template, seed=seed, **counted)
    if bad := report.bad:
        notes.append(f"{name}: {len(bad)} of {report.rows} rows are bad and left out, the first is {bad[0]}")
    return problems


def _texts(problems: Iterable[data.Problem]) -> list[str]:
    """The texts of problems that a tokenizer has to know."""
    return [text for p in problems for text in (f"{p.system}{p.prompt}{p.answer}", *p.demonstrations)]


def _without(
    sets: Mapping[str, Sequence[data.Problem]], problems: Sequence[data.Problem]
) -> tuple[list[data.Problem], list[str]]:
    """(the `problems` whose prompts no held-out set has, [a line on the others]). Raises ValueError if none is left."""
    known = {(p.system, p.prompt) for held_out in sets.values() for p in held_out}
    kept = [p for p in problems if (p.system, p.prompt) not in known]
    if not kept:
        raise ValueError(f"all {len(problems)} problems of task.train are in task.held_out_sets too: train on others")
    lost = f"train: {len(problems) - len(kept)} of {len(problems)} problems left out, which are in a held-out set too"
    return kept, [lost] if len(kept) < len(problems) else []


def write_rows(rows: Sequence[Mapping[str, Any]], run_dir: str) -> str:
    """Writes rows to `run_dir`/rows/DIGEST.jsonl, one JSON object a line, and returns the path. Equal rows give the
    same path. If `run_dir` is in a bucket, the file is in the local folder runs/rows: each host reads its own. Raises
    ValueError if a local `run_dir` has a comma, or a row is no dict of JSON values; the message counts rows from 0."""
    content = "".join(_json_line(number, row) + "\n" for number, row in enumerate(rows)).encode()
    folder = Path("runs" if storage.in_bucket(run_dir) else run_dir) / _FOLDER
    if "," in str(folder):
        raise ValueError(f"run.dir={run_dir!r} has a comma, which separates the files of task.train: choose another")
    file = folder / f"{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    if not file.exists() or file.read_bytes() != content:  # somebody may have edited it
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_atomically(file, content)
    return str(file)


def listed_rows(rows: Rows, name: str) -> list[Mapping[str, Any]]:
    """The rows of a list, an iterator, a data set or a JSONL or parquet file, in a list. Raises ValueError if there are
    no rows, if there are splits in place of rows, or if a file cannot be read. The message calls the rows `name`."""
    if isinstance(rows, str | PathLike):
        if not Path(rows).exists():
            raise ValueError(
                f"{name}={fspath(rows)!r}: there is no such file; a data set by name is task.train=NAME with "
                "task.held_out_sets=NAME=SOURCE (docs/own_data.md)"
            )
        rows = data.file_rows(Path(rows))
    if isinstance(rows, Mapping) and rows:
        raise ValueError(f"{name} has the splits {[*rows]}: give the rows of one, as {name}=rows[{next(iter(rows))!r}]")
    if not isinstance(rows, Iterable):
        raise ValueError(f"{name}={rows!r}: give dicts in a list or an iterator, or the path of a file")
    if not (found := list(rows)):
        raise ValueError(f"{name} has no rows")
    return found


def split_rows(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(rows to train on, rows to evaluate on), both in order. A tenth is for evaluation, spread evenly, at least 1 and
    at most `most`. Raises ValueError for fewer than two rows."""
    if len(rows) < 2:
        raise ValueError("data has one row, and one at least is held out: give held_out=[…] too")
    count = max(1, min(len(rows) // 10, most))
    chosen = {i * len(rows) // count for i in range(count)}
    return [row for i, row in enumerate(rows) if i not in chosen], [rows[i] for i in sorted(chosen)]


def _json_line(number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number}: expected a dict, got {type(row).__name__}")
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"row {number}, {name!r}: {error}; leave this column out") from error
    return json.dumps(dict(row), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """A number or an array of numpy as JSON has it, for `json.dumps`. Raises TypeError for another value."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of the type {type(value).__name__} is no JSON")
