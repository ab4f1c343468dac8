"""`rpg_jax.train` for Python programs: the run of the command, with rows, rewards and losses as Python objects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import losses, models
from rpg_jax.data import encode_prompt, load, load_tokenizer
from rpg_jax.models.sizes import parameter_count
from rpg_jax.parallel import hosts
from rpg_jax.report.run_files import read_metrics
from rpg_jax.rewards import callables
from rpg_jax.runs import cli, config_files, processes, reinforcement, run_folder
from rpg_jax.runs.policy import Policy
from rpg_jax.runs.problems import Row, Rows, listed_rows, split_rows, write_rows
from rpg_jax.runs.resolve import with_method
from rpg_jax.runs.run_names import shown

if TYPE_CHECKING:
    from rpg_jax.runs.session import OnStep

Reward = Callable[..., Any] | str

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "task.template": "none",  # a question is the prompt, inside the chat template of the model
        "rewards.right_above": 0.5,
        "rewards.overlong_shaping": False,
        "dynamic_sampling.enabled": False,
        "train.updates_per_step": 1,  # one pass less: the update itself has the sampling policy's log-probs
        "optimizer.warmup": "3 updates",
        "optimizer.weight_decay": 0.0,
        "evaluation.problems": 64,
        "evaluation.k": 1,
    }
)
"""Fields that are the same for every model. A method that is asked for by name brings its own shaping and sampling."""
_SMALL: Mapping[str, Any] = {"rollout.prompts_per_step": 8, "rollout.max_tokens": 64, "train.steps": 40}
_LARGE: Mapping[str, Any] = {"rollout.prompts_per_step": 64, "rollout.max_tokens": 512, "train.steps": 100}
_ROW = 2048  # tokens of a row that completions share, unless one completion needs more
_CPU_TOKENS = 1024  # of a micro-batch on a CPU: a few GB of activations for models that a CPU trains
_COVERED = 0.99  # of the prompts are within the limit
_LARGEST_RATE = 2e-4  # good for 0.1 million weights (docs/tables/reasoning.md)
_ADAPTERS = 10  # the rate of adapters in units of the rate of all weights; docs/lora.md found 4 and 10 to be best


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
        After a run with adapters: base and adapters merged, in `model.compute_dtype`."""
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

    `train(model="HuggingFaceTB/SmolLM2-135M-Instruct", data=rows, reward=function)` is enough. The other fields then
    fit the model, the rows and the device, and ten lines print the main choices.

    It does what `python -m rpg_jax.train` does with the same config, prints the same, and leaves the same folder. It
    returns after the last step, with the run's folder, metrics and policy. During the steps, the first SIGINT or
    SIGTERM saves and returns; a second one ends the process.

    Args:
      config: the name of a shipped config, a file (with its variant, as "configs/x.py:tiny"), or a `ConfigDict` with
        all fields. None: the fields fit the model, which `model` names.
      model: the weights to begin with: a folder, OWNER/NAME on the hub, FILE.gguf. None: the config's `model.path`.
      data: problems to train on, a list, an iterator, a Hugging Face data set, or the path of a JSONL or parquet file:
        dicts with "question" and "answer", which is any text if the reward reads none (docs/own_data.md has more keys).
        They are kept in `run.dir`/rows. None: the config's task.
      held_out: problems to evaluate on, or several sets of them by name; needs `data`. None: a tenth of `data`, and at
        most `evaluation.problems` rows. Training then leaves these rows out.
      reward: a function, "FILE.py:function", a part of `rewards.parts`, or weights by function or part. The reward is
        not shaped, unless `rewards.overlong_shaping` is set or `overrides` names a method. A function is called in this
        process as function(completion, answer, prompt), or as function(completion, answer) if it takes two, with
        strings, and returns a number. A completion is right if the part `rewards.accuracy` (default: the first
        verifier) is above `rewards.right_above`; None: at least 1. Calls of an async function run together; each may
        take `rewards.deadline_seconds`. The config knows a function as "module:qualname"; a function with another name
        makes another run. None: the config's rewards.
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
      RuntimeError: the run was open and could not go on; the message says why. The same call continues the run. If the
        error's `code` is 3, the run is lost: the same call would end the same way."""
    cli.prepare_libraries()
    _check_kinds(config, overrides, on_step)
    given = {"held_out": held_out, "reward": reward, "environment": environment, "loss": loss, "advantage": advantage}
    chosen, functions = prepared(config, overrides, model=model, data=data, **given)
    finished = reinforcement.run(chosen, functions, on_step) == 0
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
    """(the config of a call of `train`, with a run's name; the objects that the call handed over, by their names in
    the config). The arguments are those of `train`; `given` has held_out, reward, environment, loss, advantage. Writes
    rows to `run.dir`/rows and declares a loss and an advantage. If `config` is None, joins the other processes, and
    chooses and prints fields. Raises ValueError if an argument is wrong."""
    fits, held_out = config is None, given.pop("held_out")
    if model is not None:
        _refuse(overrides, "model", "model.path")
        overrides = {"model.path": fspath(model), **overrides}
    elif fits and "model.path" not in overrides:
        raise ValueError('which model? model=FOLDER or "OWNER/NAME" of the hub, or a config, as rpg_jax.train("tiny")')
    chosen, file = _opened("base" if config is None else config, overrides)
    if fits:
        chosen = config_files.changed(chosen, neutral(overrides) | dict(overrides))
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
        found = fitted(chosen, {*overrides, *fields}, chosen.task.train.split(","))
        if hosts.is_first():
            print("chosen for this run, each with the field that changes it:", *found.lines, sep="\n", flush=True)
        chosen = config_files.changed(chosen, found.fields)
    for line in config_files.unread(with_method(chosen), overrides):
        print(line, flush=True)
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
    """What a run needs of the objects that a call of `train` handed over. Declares a loss and an advantage."""
    fields, named, functions = _Handed({}, {}, {})
    if reward is not None:
        weights, functions = callables.named(reward)
        _refuse(overrides, "reward", "rewards.parts")
        fields["rewards.parts"] = ",".join(f"{part}:{weight!r}" for part, weight in weights.items())
        named["reward"] = "+".join(part.rpartition(":")[2] for part in weights)
    for argument, handed in others.items():
        if handed is None:
            continue
        field = "loss.advantage" if argument == "advantage" else f"{argument}.name"
        _refuse(overrides, argument, field)
        name = fields[field] = handed if isinstance(handed, str) else callables.name_of(handed, argument)
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
    """Declares a loss that was handed over. Returns the field `loss.arguments` with a partial's keywords, else {}."""
    fields = {}
    if isinstance(loss, functools.partial):
        if loss.args or not inspect.isfunction(loss.func):
            raise ValueError(f"the loss {name!r}: give functools.partial a function and keywords alone")
        _refuse(overrides, "loss=functools.partial(…)", "loss.arguments")
        fields["loss.arguments"], loss = json.dumps(loss.keywords), loss.func
    losses.declare_own_loss(name, loss)
    return fields


def _opened(config: str | PathLike[str] | ConfigDict, overrides: Mapping[str, Any]) -> tuple[ConfigDict, str]:
    """(the config with its overrides, the file after which its runs are named; "config" for a ConfigDict)."""
    if isinstance(config, ConfigDict):
        return config_files.changed(config, overrides), "config"
    loaded = config_files.load(fspath(config))
    return config_files.changed(loaded.config, overrides), loaded.file


def _task(config: ConfigDict, data: Rows | None, held_out: Any) -> dict[str, Any]:
    """The fields of a task whose problems are `data` and `held_out`, as in `train`. Writes both to `run.dir`/rows."""
    if data is None:
        raise ValueError("held_out=[…] needs data=[…] to train on")
    train = _listed(config, data, "data")
    if held_out is None:
        train, held_out = split_rows(train, config.evaluation.problems)
    sets = held_out if isinstance(held_out, Mapping) else {"held out": held_out}
    if strange := [name for name in sets if set(name) & set(",=")]:
        raise ValueError(f"held_out: the name of a set has no comma and no equals sign, got {strange[0]!r}")
    listed = {name: _listed(config, rows, f"held_out[{name!r}]") for name, rows in sets.items()}
    written = {name: write_rows(rows, config.run.dir) for name, rows in listed.items()}
    return {
        "task.name": "files",
        "task.train": write_rows(train, config.run.dir),
        "task.held_out_sets": ",".join(f"{name}={file}" for name, file in written.items()),
    }


def _listed(config: ConfigDict, rows: Rows, name: str) -> list[Row]:
    """The rows of an argument. A bad row of a file is an error that names this file, and not the copy in `run.dir`."""
    found = listed_rows(rows, name)
    if isinstance(rows, str | PathLike):
        load(fspath(rows), template=config.task.template, bad_rows=config.task.bad_rows)
    return found


def _refuse(overrides: Mapping[str, Any], argument: str, *fields: str) -> None:
    if both := [field for field in fields if field in overrides]:
        raise ValueError(f"{argument}=… and overrides of {', '.join(both)} say the same thing twice: leave one out")


class Fitted(NamedTuple):
    """`fields`: values, by dotted name, for fields that the caller has not set. `lines`: what the run has, by
    choice or by the caller, and which field changes it."""

    fields: dict[str, Any]
    lines: list[str]


def neutral(asked: Collection[str]) -> dict[str, Any]:
    """The fields of `NEUTRAL` that are not among the names `asked`. If "method" is among them,
    `rewards.overlong_shaping` and `dynamic_sampling.enabled` are left out too: the method sets them."""
    kept = ("rewards.overlong_shaping", "dynamic_sampling.enabled") if "method" in asked else ()
    return {name: value for name, value in NEUTRAL.items() if name not in asked and name not in kept}


def fitted(config: ConfigDict, asked: Collection[str], rows: Sequence[str]) -> Fitted:
    """Chooses values for the fields that the caller has not set, by the model, the rows and the device: the limits of
    prompts and completions, the sizes of a step and of a packed row, the number of steps, the time of evaluations,
    the numbers' dtype, the learning rate, and on a CPU micro-batch, slots, remat and the steps between checkpoints.

    Args:
      config: holds `model.path`, the values of `NEUTRAL` and what the caller has set. It is not changed.
      asked: dotted names of the fields that the caller has set.
      rows: the files or data sets of the problems to train on; they are read.

    Raises ValueError if the model is missing or its architecture is not supported, or if a row is bad.
    """
    folder = models.local_folder(config.model.path, weights=False)
    model = models.read_config(folder)  # before anything else: an architecture that is not supported is refused
    tokenizer = load_tokenizer(models.local_folder(config.model.tokenizer or config.model.path, weights=False))
    on_cpu, kept = processes.platform() == "cpu", dict[str, Any]()

    def choose(name: str, value: Any) -> Any:
        if name in asked:
            return config[name]
        kept[name] = value
        return value

    problems = load(rows, template=config.task.template, bad_rows=config.task.bad_rows)[0]
    lengths = [len(encode_prompt(p, tokenizer, thinking=config.task.thinking)) for p in problems]
    size, context = _SMALL if on_cpu else _LARGE, model.rope.max_position_embeddings
    wanted = config.rollout.max_tokens if "rollout.max_tokens" in asked else size["rollout.max_tokens"]
    most = max(context // 2, context - wanted)  # prompts that leave no room for a completion are not trained
    prompt = choose("task.max_prompt_tokens", min(most, int(np.quantile(lengths, _COVERED, method="higher"))))
    longest = choose("rollout.max_tokens", max(1, min(size["rollout.max_tokens"], context - prompt)))
    prompts, group = choose("rollout.prompts_per_step", size["rollout.prompts_per_step"]), config.rollout.group_size
    steps = choose("train.steps", size["train.steps"])
    every = choose("evaluation.every", min(10, max(1, steps // 4)))  # a short run has a curve too
    weights = parameter_count(model)
    (dtype, why), (rate, reason) = processes.fast_dtype(), _rate(weights, adapters=bool(config.model.lora.rank))
    dtype, rate = choose("model.compute_dtype", dtype), choose("optimizer.learning_rate", rate)
    row = choose("train.packed_length", max(prompt + longest, min(prompt + group * longest, _ROW)))
    if on_cpu:
        choose("rollout.slots", min(prompts * group, 128))
        micro, devices = min(max(1, _CPU_TOKENS // row), prompts * group), jax.device_count()
        choose("train.microbatch_size", -(-micro // devices) * devices)
        choose("model.remat", "none")
        choose("checkpoint.every", 1)  # a step may outlast the time that a signal leaves
    final = with_method(config)
    shaped = "with" if final.rewards.overlong_shaping else "without"
    inside = "as they are" if tokenizer.chat is None else "inside the model's chat template"
    within = f"{sum(n <= prompt for n in lengths)} of {len(lengths)} rows (longest {max(lengths)})"
    why, reason = why * ("model.compute_dtype" in kept), reason * ("optimizer.learning_rate" in kept)
    lines = [
        f"model: {config.model.path}, {weights / 1e6:,.3g} million weights  [model.path]",
        f"numbers: {dtype}{why}  [model.compute_dtype]",
        f"prompts: {inside}; at most {prompt} tokens, {within}  [task.template, task.max_prompt_tokens]",
        f"completions: at most {longest} tokens, stop token included  [rollout.max_tokens]",
        f"reward: {final.rewards.parts.replace(':1.0', '')}, {shaped} overlong shaping  [rewards.overlong_shaping]",
        f"right, for accuracy: a score above {config.rewards.right_above}  [rewards.right_above]",
        f"method: {config.method}, KL coefficient {shown(final.loss.kl_coef or 0.0)}  [method, loss.kl_coef]",
        f"learning rate: {shown(rate)}{reason}  [optimizer.learning_rate]",
        f"a step: {prompts} prompts x {group} completions  [rollout.prompts_per_step, rollout.group_size]",
        f"length: {steps} steps, the first compiles; an evaluation every {every}  [train.steps, evaluation.every]",
    ]
    return Fitted(kept, [f"  {line}" for line in lines])


def _rate(weights: int, *, adapters: bool) -> tuple[float, str]:
    """(a learning rate, with one digit, for a pretrained model of so many `weights`; the reason, to end a sentence).
    At 3e-5 in place of 1e-5 SmolLM2-135M learned sums in six steps, and lost some of them again in six more."""
    rate = min(max(1e-6 * (4e9 / weights) ** (2 / 3), 1e-6), _LARGEST_RATE)
    reason = ", because 4 billion weights learn at 1e-6 (the paper), 0.135 at 1e-5; the power -2/3 of the size has both"
    if adapters:
        rate, reason = rate * _ADAPTERS, f"{reason}; {_ADAPTERS} times as much for adapters"
    return float(f"{rate:.0e}"), reason
