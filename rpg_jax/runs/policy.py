"""A policy that is sampled and not trained: the checkpoint of a run, or the weights that a config names."""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import data, models, storage
from rpg_jax.models import hf_adapters
from rpg_jax.models.lora import merged
from rpg_jax.rollout import Request
from rpg_jax.runs import inputs, run_folder
from rpg_jax.runs.adapters import first_adapters, new_base, open_base
from rpg_jax.runs.experiment import Experiment, init_params, make_rollout, open_experiment
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.resolve import resolve
from rpg_jax.storage import integrity
from rpg_jax.storage.checkpoints import committed_steps
from rpg_jax.training.state import for_evaluation

Changes = Mapping[str, Any]
NONE: Changes = MappingProxyType({})


class Policy(NamedTuple):
    """Tokenizer, problems, model and mesh; the weights, if loaded; and the checkpoint's step, 0 without one."""

    experiment: Experiment
    params: Any
    step: int


def of_run(
    folder: storage.Folder,
    step: int | None = None,
    changes: Changes = NONE,
    held_out: bool = False,
    weights: bool = True,
    merge: bool = True,
) -> Policy:
    """The policy of a run's checkpoint, by default the last.

    `changes` are values of config fields, by dotted name, that replace the run's. `held_out` loads the problems of
    evaluations, and `weights` the weights. `merge` adds adapters to their base; without it, they are the params.

    Raises:
      ValueError: the folder holds no run, or not that checkpoint; the message lists the checkpoints.
    """
    config = run_folder.read_config(folder.files)
    config.update_from_flattened_dict(changes)
    experiment = open_experiment(config, folder.files, train=False, held_out=held_out)
    if not weights:
        return Policy(experiment, None, step or 0)
    only = dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, train=[], held_out={}))
    inputs.check(only, folder.files, begins=False)  # the tokenizer and the model; problems may be any
    directory = storage.absolute(folder.home / "checkpoints")
    kept = committed_steps(directory)
    if not kept:
        first = min(config.checkpoint.every, config.train.steps)
        raise ValueError(f"{folder.home} has no checkpoint yet; the first comes at step {first}")
    if step not in (None, *kept):
        raise ValueError(f"{folder.home} does not have the checkpoint of step {step}; it keeps steps {kept}")
    step = kept[-1] if step is None else step
    with experiment.layout.activate():
        learner = make_learner(experiment.layout)
        needed = for_evaluation(learner.like, learner.optimizer)  # the optimizer's moments are twice the weights
        restored = integrity.restored(directory / str(step) / "state", needed)
        params = learner.optimizer.evaluation_params(restored.opt_state, restored.params)
        if merge and experiment.layout.lora is not None:
            base = open_base(experiment.layout, folder, init_params, begins=False)
            experiment, params = _merged(experiment, base, params)
        return Policy(experiment, params, step)


def _merged(experiment: Experiment, base: models.Base | None, adapters: Any) -> tuple[Experiment, Any]:
    """The experiment without adapters, and its weights in the compute dtype; `base` is taken over."""
    layout = experiment.layout
    whole = layout.without_adapters(dtype=layout.config.model.compute_dtype)

    def merge(base: models.Base, adapters: Any) -> Any:
        return merged(base.policy(adapters))

    params = jax.jit(merge, out_shardings=whole.param_shardings, donate_argnums=0)(base, adapters)
    return dataclasses.replace(experiment, layout=whole), params


def of_config(
    config: ConfigDict, scratch: Path, changes: Changes = NONE, held_out: bool = False, weights: bool = True
) -> Policy:
    """The policy of `model.path`, or one with random weights, in `model.compute_dtype`: no optimizer needs more.

    The adapters of `model.lora.path` are merged into it; new adapters would change nothing, and are left out.
    `scratch` receives the tokenizer where one is trained. The other arguments are those of `of_run`.
    """
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict({"model.param_dtype": config.model.compute_dtype, **changes})
    if not changed.model.lora.path:
        changed.model.lora.rank = 0
    experiment = open_experiment(resolve(changed), scratch, train=False, held_out=held_out)
    with experiment.layout.activate():
        if not weights:
            return Policy(experiment, None, 0)
        if experiment.layout.lora is None:
            return Policy(experiment, init_params(experiment.layout), 0)
        base = new_base(experiment.layout, init_params)
        return Policy(*_merged(experiment, base, first_adapters(experiment.layout)), 0)


def sample(
    run: str,
    prompts: Sequence[str],
    *,
    k: int = 4,
    temperature: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    note: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> list[list[str]]:
    """`k` completions of each prompt, without special tokens, from a run's checkpoint (default: its last).

    The prompts pass the run's chat template, where its tokenizer has one. Temperature 0 is greedy. `note` is called
    with a line on each surprise: characters that the tokenizer does not know, and answers that are written backwards.

    Raises:
      ValueError: no such run or checkpoint, or a prompt with more tokens than the run's `task.max_prompt_tokens`.
    """
    with run_folder.opened(run) as folder:
        experiment, params, step = of_run(folder, step)
    tokenizer, task = experiment.tokenizer, experiment.config.task
    problems = [data.Problem(i, text, answer="", source="prompt") for i, text in enumerate(prompts)]
    tokens = [data.encode_prompt(p, tokenizer, thinking=task.thinking) for p in problems]
    for text, ids in zip(prompts, tokens, strict=True):
        if len(ids) > task.max_prompt_tokens:
            raise ValueError(
                f"{text!r} has {len(ids)} tokens, more than task.max_prompt_tokens={task.max_prompt_tokens}"
            )
        if unknown := tokenizer.unknown(text):
            note(f"{text!r}: the run's tokenizer does not know {', '.join(map(repr, unknown))}")
    if task.name == "arithmetic" and task.reverse:
        note("answers are written from the lowest digit (task.reverse): 24 is 42")
    with experiment.layout.activate():
        rollout = make_rollout(experiment.layout, params)
        try:
            sampling = experiment.sampling(temperature)
            groups = rollout.generate(Request(tokens, range(len(tokens)), k, sampling, seed, step))
        finally:
            rollout.close()
    stops = set(tokenizer.stop_token_ids)
    return [[tokenizer.decode([t for t in c.tokens.tolist() if t not in stops]) for c in group] for group in groups]


def export_adapters(run: str | Path, out: Path, *, step: int | None = None) -> int:
    """Writes the adapters of a checkpoint (default: the last) to `out`, as peft reads them, and returns its step.

    Raises:
      ValueError: `out` holds an adapter, the run trains all weights, or it has no such checkpoint.
    """
    if (out / hf_adapters.CONFIG).exists():
        raise ValueError(f"{out} already holds an adapter; choose another --out")
    with run_folder.opened(str(run)) as folder:
        experiment, adapters, step = of_run(folder, step, merge=False)
        layout = experiment.layout
        if layout.lora is None:
            raise ValueError(f"{run} trains all weights (model.lora.rank=0) and has no adapters; leave --adapter out")
        hf_adapters.save_adapters(out, layout.model, layout.lora, adapters, base=experiment.config.model.path)
    return step


def export(run: str | Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> int:
    """Writes the policy of a checkpoint (default: the last) to `out`, adapters merged, and returns its step.

    Raises:
      ValueError: `out` holds a model, or the run has no such checkpoint; the message lists the checkpoints.
    """
    if (out / "config.json").exists():
        raise ValueError(f"{out} already holds a model; choose another --out")
    with run_folder.opened(str(run)) as folder:
        experiment, params, step = of_run(folder, step)
        path, tokenizer = experiment.config.model.path, experiment.tokenizer
        base = models.local_folder(path, weights=False) if path else None
        ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        with experiment.layout.activate():
            models.save(
                out,
                experiment.layout.model,
                params,
                dtype=dtype and jnp.dtype(dtype),
                base=base,
                fields=ids if base is None else None,
            )
        if base is None:
            shutil.copyfile(folder.files / "tokenizer.model", out / "tokenizer.model")
    return step
