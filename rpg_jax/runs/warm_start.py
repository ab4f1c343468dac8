"""Warm starts: supervised training before RL, so that RL has something to reinforce and something to gain.

Training ends at an accuracy, or after some passes over the demonstrations. An equal number of supervised steps can lead
to any accuracy; an equal accuracy is a fair start for every variant. Runs share warm starts: each is trained once per
model, task and settings, and kept in a folder that is named by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from rpg_jax import losses, models, storage
from rpg_jax.parallel import hosts
from rpg_jax.report.progress import Progress
from rpg_jax.rewards.callables import NOTHING, Handed
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rewards.verifiers import JUDGE
from rpg_jax.rollout import Rollout
from rpg_jax.runs.arguments import reward_arguments
from rpg_jax.runs.experiment import Experiment, make_generator, make_rollout
from rpg_jax.runs.inputs import code_digests, files_digest, input_digests
from rpg_jax.runs.layout import Layout
from rpg_jax.runs.learner import init_params
from rpg_jax.runs.supervised import Demonstrations, several, supervised_config, supervised_learner, tell_cuts
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.storage.errors import StorageFailure
from rpg_jax.storage.files import locked
from rpg_jax.storage.integrity import Refused
from rpg_jax.training.state import TrainState

CHECKED = 96  # completions of a check


def warm_started(experiment: Experiment, params: Any, rollout: Rollout, scorer: Scorer, run_dir: Path) -> Any:
    """Weights after supervised training: from the shared folder `home`/`cache_key`, or trained now from `params`, which
    stay valid, and put there with the tokenizer that `run_dir` may keep; a line says if that fails. A run waits while
    another on this machine trains the same. If an accuracy ends the training, `scorer` and `rollout`, which gets other
    weights, measure the accuracy. Collective. Raises ValueError if there are no demonstrations, or no check finds an
    accuracy in the range."""
    layout = dataclasses.replace(experiment.layout, config=supervised_config(experiment.config))
    own_rollout = layout.config.rollout.max_tokens != experiment.config.rollout.max_tokens
    e = dataclasses.replace(experiment, layout=layout)
    batches = Demonstrations(e, e.config.warm_start.epochs)
    read = input_digests(e)
    if e.config.model.path:
        read["weights"] = files_digest(models.local_folder(e.config.model.path))
    folder = home(e.config) / cache_key(e.config, read, e.handed)
    cache = Snapshots(folder)
    with contextlib.ExitStack() as turn:
        if jax.process_count() == 1 and not storage.in_bucket(folder):
            with contextlib.suppress(OSError):  # a folder that cannot be written: the save below says so
                folder.mkdir(parents=True, exist_ok=True)
                turn.enter_context(locked(Path(folder), wait=True))
        if cache.exists(0):
            try:
                params = cache.restore(0, e.layout.weights)
                print(f"warm start from {folder}")
                return params
            except Refused as error:
                print(f"warm start refused: {error}; kept as {cache.move_aside(0)}, trained again", file=sys.stderr)
        if own_rollout:
            rollout = make_rollout(e.layout, params)
            turn.callback(rollout.close)
        params = _train(e, batches, params, rollout, scorer)
        try:
            cache.save(0, params)
            cache.wait()
        except StorageFailure as error:  # as where two runs write it at once in a bucket
            if jax.process_count() > 1:  # the other processes may wait inside the save
                raise
            print(f"warm start not kept for other runs: {error.what}: {error.reason}", file=sys.stderr)
            return params
    if hosts.is_first() and (run_dir / "tokenizer.model").exists():
        (folder / "tokenizer.model").write_bytes((run_dir / "tokenizer.model").read_bytes())
    return params


def drawn_base(experiment: Experiment, scorer: Scorer, run_dir: Path, layout: Layout) -> Any:
    """All weights of `layout`, which has no adapters, to be frozen beside adapters: loaded or random, and after a warm
    start if the config has one. `layout` takes the place of `experiment.layout`. The other arguments, and the errors,
    are those of `warm_started`."""
    params = init_params(layout)
    if not layout.config.warm_start.enabled:
        return params
    rollout = make_rollout(layout, params)
    try:
        return warm_started(dataclasses.replace(experiment, layout=layout), params, rollout, scorer, run_dir)
    finally:
        rollout.close()


def _train(e: Experiment, batches: Demonstrations, params: Any, rollout: Rollout, scorer: Scorer) -> Any:
    """The weights after supervised training from `params`: after `warm_start.epochs` passes, or, if this field is None,
    at an accuracy of at least `CHECKED` completions on the first held-out set."""
    tell_cuts(e)
    c = e.config.warm_start
    total = None if c.epochs is None else Demonstrations(e, c.epochs).count()
    learner, programs = supervised_learner(e, total)
    state = learner.create(params)
    if total is not None:
        return _train_for_epochs(total, batches, state, programs.update)
    problems = next(iter(e.task.held_out.values()))
    each = -(-CHECKED // len(problems))
    drawn = {"temperature": e.config.evaluation.temperature, "group_size": each, "seed": c.seed}
    generate = make_generator(e, rollout, scorer, **drawn)

    def accuracy(params: Any) -> float:
        rollout.sync_weights(params, 0)
        return float(np.mean([g.accuracy.mean() for g in generate(problems, step=0)]))

    target = {name: c[name] for name in ("min_accuracy", "max_accuracy", "check_every")}
    with Progress(goal=c.min_accuracy, title="warm start") as progress:

        def show(updates: int, value: float) -> None:
            progress.update(updates, {"accuracy": value})
            if value > c.max_accuracy:
                progress.note(f"accuracy {value:.2f} is above {c.max_accuracy}: back, and on in steps half as long")

        return train_to_accuracy(state, programs.update, batches, accuracy, **target, on_check=show)[0].params


def _train_for_epochs(
    total: int, batches: Demonstrations, state: TrainState, update: Callable[[TrainState, Any], tuple]
) -> Any:
    """The weights after update `total`, with which the last pass over `batches` ends."""
    done = 0
    with Progress(total, title="warm start", unit="update") as progress:
        while done < total:
            state, metrics = several(state, update, batches, count := min(10, total - done))
            done += count
            progress.update(done, {"nll": losses.divided(losses.merge(metrics))["loss"]})
    return state.params


def train_to_accuracy(
    state: TrainState,
    update: Callable[[TrainState, Any], tuple[TrainState, Any]],
    batches: Iterator[Any],
    accuracy: Callable[[Any], float],
    *,
    min_accuracy: float,
    max_accuracy: float,
    check_every: int,
    max_updates: int = 20_000,
    on_check: Callable[[int, float], None] = lambda updates, accuracy: None,
) -> tuple[TrainState, float]:
    """Updates `state` until a check finds `accuracy(params)` in [`min_accuracy`, `max_accuracy`]. Returns (the state,
    its accuracy). Each update takes the next of `batches` and may donate its state. `on_check` gets the number of
    updates, with the updates that were taken back, and the accuracy. Checks are `check_every` updates apart at first. A
    check above the range takes back the updates since the check before, and half as many follow from then on. So the
    range is hit however steep the curve is. Raises ValueError if the range is empty, not reached in `max_updates`, or
    inside the step of a single update."""
    if not min_accuracy < max_accuracy:
        needs = "a warm start needs 0 <= min_accuracy < max_accuracy <= 1"
        raise ValueError(f"{needs}, got {min_accuracy} and {max_accuracy}")
    interval, done = check_every, 0
    while done < max_updates:
        before = jax.tree.map(jnp.copy, state)
        state, _ = several(state, update, batches, interval)
        done += interval
        reached = accuracy(state.params)
        on_check(done, reached)
        if reached > max_accuracy:
            if interval == 1:
                raise ValueError(
                    f"one supervised update leads past warm_start.max_accuracy={max_accuracy}, "
                    f"to {reached:.3f}: widen the range or lower warm_start.learning_rate"
                )
            state, interval = before, max(interval // 2, 1)
        elif reached >= min_accuracy:
            return state, reached
    above = reached > max_accuracy
    raise ValueError(
        f"no check of the warm start was inside [min_accuracy, max_accuracy]=[{min_accuracy}, "
        f"{max_accuracy}] in {done} updates, the last was {'above' if above else 'below'} it ({reached:.3f}): "
        f"{'lower' if above else 'raise'} warm_start.learning_rate, or widen the range"
    )


def home(config: ConfigDict) -> epath.Path:
    """The folder of shared warm starts: `warm_start.dir`. If only the runs are in a bucket, a folder beside the runs.
    Raises ValueError if `warm_start.dir` or `run.dir` is neither a local path nor gs://BUCKET/FOLDER."""
    chosen, runs = storage.absolute(config.warm_start.dir), storage.absolute(config.run.dir)
    return runs / "warm_starts" if storage.in_bucket(runs) and not storage.in_bucket(chosen) else chosen


def cache_key(config: ConfigDict, read: Mapping[str, str], handed: Handed = NOTHING) -> str:
    """12 hexadecimal digits: a hash of what a warm start depends on. This is the model, the task, the settings and the
    seed of `warm_start`, the evaluation, the row length, the rewards and their judge, the environment, and `read`, the
    digests of problems, tokenizer and weights. A reward in `handed` counts by its source. The places of these inputs do
    not count. `config` comes from `supervised_config`."""
    parts = {"model": config.model.to_dict(), "task": config.task.to_dict(), "warm_start": config.warm_start.to_dict()}
    parts |= {"max_tokens": config.rollout.max_tokens, "evaluation": config.evaluation.to_dict()}
    parts |= {"packed_length": config.train.packed_length, "read": dict(read)}
    if config.environment.name:
        asked = ("name", "options", "max_turns", "turn_tokens")  # the place where an environment runs does not count
        parts["environment"] = {name: config.environment[name] for name in asked}
    r = config.rewards  # rewards decide the accuracy at which a warm start stops
    if (judged := [r.parts or "exact", r.accuracy, r.right_above]) != ["exact", None, None]:
        parts["rewards"] = [*judged, code_digests(config, handed)]
    if judge := reward_arguments(config)[1].get(JUDGE):
        parts["judge"] = {k: v for k, v in judge.items() if k not in ("url", "parallel", "deadline_seconds")}
    apart = {
        "warm_start": ["dir", "max_tokens", "train", "enabled"],
        "evaluation": ["every", "drift"],
        "model": ["remat", "path", "tokenizer", "lora"],
        "task": ["train", "held_out_sets"],
    }
    for section, names in apart.items():
        for name in names:
            del parts[section][name]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
