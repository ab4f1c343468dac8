"""A run of supervised training alone: its updates, and around them evaluations, checkpoints, logs and signals.

A step of such a run is one update. Its folder is that of a training run: `evaluate`, `sample`, `serve` and `export`
take it, and the same command continues it.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rpg_jax import losses, storage
from rpg_jax.runs import cli, inputs, run_folder
from rpg_jax.runs.evaluation import set_scores, with_mean
from rpg_jax.runs.experiment import Experiment, entered, evaluation_generator, make_rollout, make_scorer
from rpg_jax.runs.logs import RunLog, host_metrics
from rpg_jax.runs.session import BaseSession, Position
from rpg_jax.runs.supervised import Demonstrations, held_out_loss, supervised_learner
from rpg_jax.runs.weights import init_params, no_params
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.loop import Step
from rpg_jax.training.measures import Guard
from rpg_jax.training.state import TrainState

PASSES = 3  # over the demonstrations, where warm_start.epochs is not set


def run(config: ConfigDict) -> int:
    """Runs or resumes supervised training by a `supervised_config` to its last update; returns the exit code.

    Raises ValueError if the config has adapters: all weights are trained here.
    """
    if config.model.lora.rank:
        raise ValueError(
            f"model.lora.rank={config.model.lora.rank}: supervised training changes all weights; set it to 0 here, and "
            "train adapters on the result by --config.model.path"
        )
    with entered(config, answers=False) as opened:
        session = Session(*opened)
        with cli.run_is_open():
            return session.to_the_end()


class Session(BaseSession):
    """One run in progress; `closing` ends what it starts."""

    title, unit = "sft", "update"

    def __init__(self, experiment: Experiment, folder: storage.Folder, closing: contextlib.ExitStack):
        c = experiment.config
        options: dict[str, Any] = {"keep": c.checkpoint.keep, "permanent_every": c.checkpoint.permanent_every}
        known: dict[str, Any] = {"identity": run_folder.identity(c), "renewed": run_folder.renewed}
        checkpoints = Checkpoints(folder.home / "checkpoints", **options, **known)
        closing.callback(checkpoints.close)
        super().__init__(c, folder, closing, checkpoints)
        self.experiment = experiment
        self.guard = Guard(math.inf, remedy="lower warm_start.learning_rate")
        new = checkpoints.latest_step() is None
        inputs.check(experiment, folder.files, begins=new)
        self.batches = Demonstrations(experiment, c.warm_start.epochs)
        self.last = Demonstrations(experiment, c.warm_start.epochs).count()
        learner, self.programs = supervised_learner(experiment, self.last)
        self.optimizer = learner.optimizer
        params = (init_params if new else no_params)(experiment.layout)
        self.accuracy = Accuracy(experiment, params, closing)
        self._begin(Position(learner.create(params)) if new else self._resumed(learner.like))

    def _steps(self) -> Iterator[Step]:
        while self.now.step < self.last:
            began, number = time.perf_counter(), self.now.step + 1
            beat(f"update {number}")
            rate = float(self.optimizer.learning_rate(int(self.now.state.updates)))
            state, metrics = self.programs.update(self.now.state, next(self.batches))
            tokens = float(metrics["loss"][1])  # waits for the update
            values = losses.divided(metrics)
            values["nll"] = values.pop("loss")
            seconds = time.perf_counter() - began
            values |= {"learning_rate": rate, "epoch": self.batches.epoch, "seconds": seconds}
            values |= {"tokens_per_second": tokens / seconds, **host_metrics()}
            yield Step(number, state, values, [values], [])

    def _held_out_scores(self) -> dict[str, float]:
        """The loss on held-out demonstrations, and scores where problems have answers."""
        e, params, step = self.experiment, self.now.state.params, self.now.step
        found: dict[str, float] = {}
        for name, problems in e.task.held_out.items():
            beat(f"the evaluation of {name} after update {step}")
            loss = held_out_loss(e, self.programs, params, problems)
            found |= {} if loss is None else {f"held_out_nll/{name}": loss}
        mean = {"held_out_nll": float(np.mean([*found.values()]))} if found else {}
        return {**mean, **found, **self.accuracy.of(params, step, self.log)}

    def _write(self, record: dict[str, Any]) -> None:
        self.folder.push()
        self.checkpoints.save(self.now.step, self.now.state, {"supervised": self.batches.state(), **record})

    def _resumed(self, like: TrainState) -> Position:
        last = self.checkpoints.restore_last(like)
        assert last is not None, "there was a checkpoint a moment ago"
        step, state, record = last
        self.batches.restore(record["supervised"])
        now = self._continued(step, state, record)
        if now.owed is not None:  # an evaluation that did not end may have left completions
            self.log.drop_samples(step)
        return now


class Accuracy:
    """Scores completions of the held-out problems that have an answer; without such problems it measures nothing."""

    def __init__(self, e: Experiment, params: Any, closing: contextlib.ExitStack):
        self._sets = {name: kept for name, own in e.task.held_out.items() if (kept := [p for p in own if p.answer])}
        if not self._sets:
            return
        self._scorer = closing.enter_context(make_scorer(e.config))
        self._rollout = make_rollout(e.layout, params)
        closing.callback(self._rollout.close)
        self._generate = evaluation_generator(e, self._rollout, self._scorer)

    def of(self, params: Any, step: int, log: RunLog) -> dict[str, float]:
        """The scores of every set, and their mean; some completions go to `log`."""
        if not self._sets:
            return {}
        self._rollout.sync_weights(params, step)
        values: dict[str, float] = {}
        for name, problems in self._sets.items():
            groups = self._generate(problems, step=step)
            log.append_samples(step, groups)
            values |= set_scores(name, groups, self._scorer)
        return with_mean(values)
