"""`rpg_jax.train` for Python programs: the run of the command, with rows, rewards and losses as Python objects."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from rpg_jax import losses, rewards, storage
from rpg_jax.data import file_rows
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import read_metrics
from rpg_jax.runs import cli, config_files, fitting, processes, reinforcement, run_folder
from rpg_jax.runs.policy import Policy

if TYPE_CHECKING:
    from rpg_jax.runs.session import OnStep

Row = Mapping[str, Any]
Rows = Iterable[Row] | str | PathLike[str]
Reward = Callable[..., Any] | str
_FOLDER = "rows"  # the subfolder of `run.dir` with the rows that programs have handed over


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that `train` has taken to its end, or that a signal has stopped.

    Attributes:
      folder: the folder of the run, a local path or gs://BUCKET/….
      finished: whether the last step is done. If it is not, the same call continues.
    """

    folder: str
    finished: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, read anew each time: one dict per step, in order. Step 0 is before training."""
        with run_folder.opened(self.folder) as folder:
            return read_metrics(folder.files)

    @functools.cached_property
    def policy(self) -> Policy:
        """The policy of the last checkpoint, opened at the first use. Raises ValueError if there is no checkpoint."""
        return Policy.from_run(self.folder)

    @property
    def params(self) -> Any:
        """The weights of `policy`: a nested dict of arrays in `model.param_dtype`, layers stacked on the first axis.
        Adapters are added to their base, in `model.compute_dtype`.
        """
        return self.policy.params


def train(
    config: str | PathLike[str] | ConfigDict | None = None,
    *,
    model: str | PathLike[str] | None = None,
    data: Rows | None = None,
    held_out: Rows | Mapping[str, Rows] | None = None,
    reward: Reward | Mapping[Reward, float] | None = None,
    environment: Any = None,
    loss: Callable[..., Any] | str | None = None,
    advantage: Callable[..., Any] | str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    on_step: OnStep | None = None,
) -> Result:
    """Trains a policy, or continues the run that an equal call or command has begun.

    `train(model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, reward=function)` is enough. `runs.fitting` then
    chooses the other fields from the model, the rows and the device, and prints each choice with its field.

    It does what `python -m rpg_jax.train` does with the same config, prints the same, and leaves the same folder. It
    returns after the last step, with the run's folder, metrics and policy. The first SIGINT or SIGTERM saves and
    returns; a second one ends the process.

    Args:
      config: the name of a shipped config, a file (with its variant, as "configs/x.py:tiny"), or a `ConfigDict` with
        all fields. None: the fields fit the model, which `model` names.
      model: the weights to begin with: a folder, OWNER/NAME on the hub, FILE.gguf. None: the config's `model.path`.
      data: problems to train on, a list, an iterator, a Hugging Face data set, or the path of a JSONL or parquet file:
        dicts with "question" and, unless the reward does without, "answer" (docs/extending.md has more keys). They are
        kept in `run.dir`/rows. None: the config's task.
      held_out: problems to evaluate on, or several sets of them by name; needs `data`. None: a tenth of `data`, and at
        most `evaluation.problems` rows. Training then leaves these rows out.
      reward: a function, "FILE.py:function", a part of `rewards.parts`, or weights by function or part. The reward is
        not shaped, unless `overrides` names a method or sets `rewards.overlong_shaping`. A function is called in this
        process as function(completion, answer, prompt), or as function(completion, answer) if it takes two, with
        strings, and returns a number. A completion is right if the part `rewards.accuracy` (default: the first
        verifier) is 1, or above `rewards.right_above`. Calls of an async function run together; each may take
        `rewards.deadline_seconds`. The config knows a function as "module:qualname"; a function with another name makes
        another run. None: the config's rewards.
      environment: answers every turn of the policy, see docs/environments.md: a class, which is made with the config's
        `environment.options`, an object with `reset` and `step`, or a name. A class or an object is called in this
        process, and may be async. None: the config's environment, if it has one.
      loss: a loss of your own, a function (tokens, *, hyperparameters) -> `losses.TokenLoss` as docs/library.md
        describes, or its name. The keywords of a `functools.partial` of the loss become `loss.arguments`. The config
        knows a function as "module:qualname", and a resume compares the text of its source. None: the method's loss.
      advantage: an advantage of your own, a function of rewards f[P, G] that returns f[P, G], or the name of one. None:
        the method's advantage.
      overrides: values of config fields by dotted name, {"train.steps": 50, "optimizer.learning_rate": 1e-4}.
      on_step: called with the record of each step, `training.loop.Step`, once the step is evaluated, if an evaluation
        is due, and its line is written. The arrays of `state` live until the function returns. A ValueError of the
        function ends the run, which the same call continues.

    Raises:
      ValueError: an argument does not fit; the message says how to mend it. Training has not begun.
      RuntimeError: the run was open and could not go on; the message says why. The same call continues it.
    """
    cli.prepare_libraries()
    _check_kinds(config, overrides, on_step)
    given = {"held_out": held_out, "reward": reward, "environment": environment, "loss": loss, "advantage": advantage}
    chosen, functions = prepared(config, overrides, model=model, data=data, **given)
    finished = reinforcement.start(chosen, functions, on_step) == 0
    cli.return_pages()  # a notebook may train again
    return Result(str(run_folder.of(chosen).home), finished)


def _check_kinds(config: Any, overrides: Any, on_step: Any) -> None:
    """Raises ValueError for arguments of `train` that are of another kind than it takes."""
    if config is not None and not isinstance(config, str | PathLike | ConfigDict):
        raise ValueError(f'config={config!r}: give the name of a config, as "tiny", a file or a ConfigDict')
    if not isinstance(overrides, Mapping):
        raise ValueError(f'overrides={overrides!r}: give a dict of fields, as {{"train.steps": 50}}')
    if on_step is not None and not callable(on_step):
        raise ValueError(f"on_step={on_step!r}: give a function, which is called with each step")


def prepared(
    config: str | PathLike[str] | ConfigDict | None,
    overrides: Mapping[str, Any],
    *,
    model: Any,
    data: Any,
    **given: Any,
) -> tuple[ConfigDict, dict[str, Any]]:
    """The config of a call of `train`, with a run's name, and the functions that the call handed over, by their names
    in the config. `given` has held_out, reward, environment, loss and advantage. Writes rows to `run.dir`/rows,
    declares a loss and an advantage, and prints the fields that it chose. Raises ValueError if an argument is wrong.
    """
    fits, held_out = config is None, given.pop("held_out")
    if model is not None:
        _refuse(overrides, "model", "model.path")
        overrides = {"model.path": fspath(model), **overrides}
    elif fits and "model.path" not in overrides:
        raise ValueError(
            'which model? Give model=FOLDER or "OWNER/NAME" of the hub, or a config, as rpg_jax.train("tiny")'
        )
    chosen, file = _opened("base" if config is None else config, overrides)
    if fits:
        chosen = config_files.changed(chosen, fitting.neutral(overrides) | dict(overrides))
        file = f"{Path(chosen.model.path).name.removesuffix('.gguf')}.model"
    handed = _handed_over(overrides, **given)
    fields, named = handed.fields, {k: v for k, v in overrides.items() if k != "model.path" or not fits} | handed.named
    if "rewards.parts" in fields and chosen.rewards.overlong_shaping is None and "method" not in overrides:
        fields["rewards.overlong_shaping"] = False  # the reward is the reward that was handed over
    if data is not None or held_out is not None:
        _refuse(overrides, "data", "task.name", "task.train", "task.held_out_sets")
        fields |= _task(chosen, data, held_out)
        named["data"] = Path(fields["task.train"]).stem[:6]
    chosen = config_files.changed(chosen, fields)
    if fits and not chosen.task.train:
        raise ValueError("which problems? Give data=ROWS, or a file: data='rows.jsonl', --data=rows.jsonl")
    if fits:
        processes.join(chosen)
        found = fitting.fitted(chosen, {*overrides, *fields}, chosen.task.train.split(","))
        if hosts.is_first():
            print("chosen for this run, each with the field that changes it:", *found.lines, sep="\n", flush=True)
        chosen = config_files.changed(chosen, found.fields)
    return run_folder.named(chosen, file, named), handed.functions


class _Handed(NamedTuple):
    """The Python objects of a call, as a run needs them.

    Attributes:
      fields: config fields that name the objects, by dotted name.
      named: the parts of the run's name.
      functions: the objects by their names in the config.
    """

    fields: dict[str, Any]
    named: dict[str, Any]
    functions: dict[str, Any]


def _handed_over(overrides: Mapping[str, Any], *, reward: Any, **others: Any) -> _Handed:
    """The fields and functions of the objects of a call, by argument. A loss and an advantage are declared here."""
    fields, named, functions = _Handed({}, {}, {})
    if reward is not None:
        weights, functions = rewards.named(reward)
        _refuse(overrides, "reward", "rewards.parts")
        fields["rewards.parts"] = ",".join(f"{part}:{weight!r}" for part, weight in weights.items())
        named["reward"] = "+".join(part.rpartition(":")[2] for part in weights)
    for argument, field in (
        ("environment", "environment.name"),
        ("loss", "loss.name"),
        ("advantage", "loss.advantage"),
    ):
        if (handed := others.get(argument)) is None:
            continue
        _refuse(overrides, argument, field)
        name = fields[field] = handed if isinstance(handed, str) else rewards.name_of(handed, argument)
        named[argument] = name.rpartition(":")[2]
        if isinstance(handed, str):
            continue
        functions[name] = handed
        if argument == "loss":
            fields |= _declared_loss(name, handed, overrides)
        elif argument == "advantage":
            losses.declare_own_advantage(name, handed)
    return _Handed(fields, named, functions)


def _declared_loss(name: str, loss: Callable[..., Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Declares a loss that was handed over; returns the config fields with the keywords of a `functools.partial`."""
    fields = {}
    if isinstance(loss, functools.partial):
        if loss.args or not inspect.isfunction(loss.func):
            raise ValueError(f"the loss {name!r}: give functools.partial a function and keywords alone")
        _refuse(overrides, "loss=functools.partial(…)", "loss.arguments")
        fields["loss.arguments"], loss = json.dumps(loss.keywords), loss.func
    losses.declare_own_loss(name, loss)
    return fields


def _opened(config: str | PathLike[str] | ConfigDict, overrides: Mapping[str, Any]) -> tuple[ConfigDict, str]:
    """The config with its overrides, and the file that its runs are named after."""
    if isinstance(config, ConfigDict):
        return config_files.changed(config, overrides), "config"
    loaded = config_files.load(fspath(config))
    return config_files.changed(loaded.config, overrides), loaded.file


def _task(config: ConfigDict, data: Rows | None, held_out: Any) -> dict[str, Any]:
    """The fields of a task whose problems are `data` and `held_out`."""
    if data is None:
        raise ValueError("held_out=[…] needs data=[…] to train on")
    train = listed_rows(data, "data")
    if held_out is None:
        train, held_out = split_rows(train, config.evaluation.problems)
    sets = held_out if isinstance(held_out, Mapping) else {"held out": held_out}
    if strange := [name for name in sets if set(name) & set(",=")]:
        raise ValueError(f"held_out: the name of a set has no comma and no equals sign, got {strange[0]!r}")
    written = {
        name: write_rows(listed_rows(rows, f"held_out[{name!r}]"), config.run.dir) for name, rows in sets.items()
    }
    return {
        "task.name": "files",
        "task.train": write_rows(train, config.run.dir),
        "task.held_out_sets": ",".join(f"{name}={file}" for name, file in written.items()),
    }


def _refuse(overrides: Mapping[str, Any], argument: str, *fields: str) -> None:
    if both := [field for field in fields if field in overrides]:
        raise ValueError(f"{argument}=… and overrides of {', '.join(both)} say the same thing twice: leave one out")


def write_rows(rows: Sequence[Mapping[str, Any]], run_dir: str) -> str:
    """Writes rows to `run_dir`/rows/DIGEST.jsonl, one JSON object a line, and returns the path; equal rows are one
    file. Where `run_dir` is in a bucket, the file is in runs/rows here: every host of a run reads its own. Raises
    ValueError if `run_dir` has a comma, or a row is no dict of JSON values; the message has the number of the row.
    """
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
    """The rows of a list, an iterator, a data set or a JSONL or parquet file, in a list. Raises ValueError, in which
    `name` is the argument, if there are no rows, if there are splits in place of rows, or if a file cannot be read.
    """
    if isinstance(rows, str | PathLike):
        if not Path(rows).exists():
            raise ValueError(
                f"{name}={fspath(rows)!r}: there is no such file; a data set by name is task.train=NAME with "
                "task.held_out_sets=NAME=SOURCE (docs/own_data.md)"
            )
        rows = file_rows(Path(rows))
    if isinstance(rows, Mapping) and rows:
        raise ValueError(f"{name} has the splits {[*rows]}: give the rows of one, as {name}=rows[{next(iter(rows))!r}]")
    if not isinstance(rows, Iterable):
        raise ValueError(f"{name}={rows!r}: give dicts in a list or an iterator, or the path of a file")
    if not (found := list(rows)):
        raise ValueError(f"{name} has no rows")
    return found


def split_rows(rows: Sequence[Mapping[str, Any]], most: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(rows to train on, rows to evaluate on), both in order. A tenth is for evaluation, spread evenly, at least 1 and
    at most `most`. Raises ValueError for fewer than two rows.
    """
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
            json.dumps({name: value}, default=_plain)
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number}, {name!r}: {error}; leave this column out") from error
    return json.dumps(dict(row), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """A number or an array of numpy as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of the type {type(value).__name__} is no JSON")
