"""A run of supervised training alone: its updates, and around them evaluations, checkpoints, logs and signals.

A step of such a run is one update. Its folder is that of a training run: `evaluate`, `sample`, `serve` and `export`
take it, and the same command continues it.
"""

import contextlib
import sys
import time
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rpg_jax import losses, storage
from rpg_jax.parallel import hosts
from rpg_jax.report import curves, summary
from rpg_jax.report.progress import Progress
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import cli, inputs, run_folder
from rpg_jax.runs.evaluation import set_scores, with_mean
from rpg_jax.runs.experiment import (
    Experiment,
    entered,
    evaluation_generator,
    init_params,
    make_rollout,
    make_scorer,
    no_params,
)
from rpg_jax.runs.logs import RunLog, host_metrics
from rpg_jax.runs.stopping import StopRequest, watch_machine
from rpg_jax.runs.supervised import Demonstrations, held_out_loss, several, supervised_learner
from rpg_jax.runs.trackers import trackers_of
from rpg_jax.runs.watchdog import Watchdog
from rpg_jax.storage.checkpoints import Checkpoints
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


class Session:
    """One run in progress; `closing` ends what it starts."""

    def __init__(self, experiment: Experiment, folder: storage.Folder, closing: contextlib.ExitStack):
        c = experiment.config
        self.experiment, self.folder = experiment, folder
        self.watchdog = Watchdog(folder.files, c.run.stall_seconds, last_words=folder.push)
        options = {"keep": c.checkpoint.keep, "permanent_every": c.checkpoint.permanent_every}
        self.checkpoints = Checkpoints(folder.home / "checkpoints", **options, identity=run_folder.identity(c))
        closing.callback(self.checkpoints.close)
        new = self.checkpoints.latest_step() is None
        inputs.check(experiment, folder.files, begins=new)
        self.batches = Demonstrations(experiment, c.warm_start.epochs)
        self.total = Demonstrations(experiment, c.warm_start.epochs).count()
        learner, self.programs = supervised_learner(experiment, self.total)
        self.learning_rate = learner.optimizer.learning_rate
        params = (init_params if new else no_params)(experiment.layout)
        self.accuracy = Accuracy(experiment, params, closing, self.watchdog.beat)
        self.log = RunLog(folder.files, samples=c.log.samples_per_step)
        closing.callback(self.log.close)
        self.step, self.nonfinite = 0, 0
        self.state = learner.create(params) if new else self._resumed(learner.like)
        self.log.trackers = trackers_of(c, folder.files, after=self.step) if hosts.is_first() else []

    def to_the_end(self) -> int:
        """Updates until the last pass, or until a signal asks to stop; returns the exit code."""
        c, stop = self.experiment.config, StopRequest(self.experiment.config.run.stop_seconds, self._out_of_time)
        watch_machine(c.run.preemption_url, stop)
        with stop.listening(), self.watchdog, Progress(self.total, first=self.step, title="sft", unit="update") as bar:
            if self.step == 0:
                self.log.rewind(-1)
                self.log.append(0, start := self._evaluated())
                bar.note(f"before the first update: {_in_words(start)}")
            while self.step < self.total:
                values = self._update()
                if self._is_due(c.evaluation.every):
                    values |= self._evaluated()
                self.log.append(self.step, values)
                bar.update(self.step, values)
                if self.nonfinite >= c.log.max_nonfinite_updates:
                    raise cli.RunLost(
                        f"update {self.step}: {self.nonfinite} in a row had a non-finite loss or gradient and were "
                        "skipped; lower warm_start.learning_rate"
                    )
                stopped = stop.agreed()
                if stopped or self._is_due(c.checkpoint.every):
                    self._save()
                if stopped:
                    break
            self.checkpoints.wait()
            stop.saved()
        if self.step < self.total:
            print(f"stopped after update {self.step} and saved; the same command continues")
            return 128 + (stop.signal or 0)
        return self._finish()

    def _update(self) -> dict[str, float]:
        """One update, and its metrics."""
        began, self.step = time.perf_counter(), self.step + 1
        self.watchdog.beat(f"update {self.step}")
        rate = float(self.learning_rate(int(self.state.updates)))

        def update(state: TrainState, batch: Any) -> tuple[TrainState, losses.Metrics]:
            return self.programs.update(state, batch, self.watchdog.beat)

        self.state, [metrics] = several(self.state, update, self.batches, 1)
        tokens = float(metrics["loss"][1])
        values = losses.divided(metrics)
        values["nll"] = values.pop("loss")
        self.nonfinite = self.nonfinite + 1 if values["nonfinite_updates"] else 0
        seconds = time.perf_counter() - began
        values |= {"learning_rate": rate, "epoch": self.batches.epoch, "seconds": seconds}
        return values | {"tokens_per_second": tokens / seconds, **host_metrics()}

    def _evaluated(self) -> dict[str, float]:
        """The loss on held-out demonstrations, and scores where problems have answers."""
        e, params = self.experiment, self.state.params
        found: dict[str, float] = {}
        for name, problems in e.task.held_out.items():
            self.watchdog.beat(f"the evaluation of {name} after update {self.step}")
            loss = held_out_loss(e, self.programs, params, problems)
            found |= {} if loss is None else {f"held_out_nll/{name}": loss}
        mean = {"held_out_nll": float(np.mean([*found.values()]))} if found else {}
        return {**mean, **found, **self.accuracy.of(params, self.step, self.log)}

    def _save(self) -> None:
        self.watchdog.beat(f"the checkpoint of update {self.step}")
        self.folder.push()
        record = {"supervised": self.batches.state(), "nonfinite_in_a_row": self.nonfinite}
        self.checkpoints.save(self.step, self.state, record)

    def _resumed(self, like: TrainState) -> TrainState:
        last = self.checkpoints.restore_last(like)
        assert last is not None, "there was a checkpoint a moment ago"
        self.step, state, record = last
        self.batches.restore(record["supervised"])
        self.nonfinite = int(record["nonfinite_in_a_row"])
        self.log.rewind(self.step)
        print(f"continuing {self.folder.home} after update {self.step}")
        return state

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total

    def _out_of_time(self) -> None:
        seconds = self.experiment.config.run.stop_seconds
        print(
            f"error: update {self.step} did not end within run.stop_seconds={seconds:g} s; the same command continues",
            file=sys.stderr,
        )

    def _finish(self) -> int:
        checksum = weights_checksum(self.state.params)
        if hosts.is_first():
            files = self.folder.files
            curves.draw_curves(files)
            summary.write_summary(files)
            print(self.folder.shown(summary.closing_message(files)))
            print(f"weights checksum: {checksum:016x}")
        return 0


class Accuracy:
    """Scores completions of the held-out problems that have an answer; without such problems it measures nothing."""

    def __init__(self, e: Experiment, params: Any, closing: contextlib.ExitStack, beat: Any):
        self._sets = {name: kept for name, own in e.task.held_out.items() if (kept := [p for p in own if p.answer])}
        if not self._sets:
            return
        self._scorer = closing.enter_context(make_scorer(e.config))
        self._rollout = make_rollout(e.layout, params)
        closing.callback(self._rollout.close)
        self._generate = evaluation_generator(e, self._rollout, self._scorer, beat)

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


def _in_words(values: dict[str, float]) -> str:
    named = {"held_out_nll": "held-out nats per token", "eval/accuracy": "held-out accuracy"}
    return ", ".join(f"{name} {values[key]:.3f}" for key, name in named.items() if key in values) or "nothing held out"
