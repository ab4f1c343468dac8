"""A training run: the loop, and around it evaluations, checkpoints, logs, signals and the watchdog."""

import abc
import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from rpg_jax import rewards, storage
from rpg_jax.parallel import hosts
from rpg_jax.report import plots, summary
from rpg_jax.report.progress import Progress
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import cli, inputs
from rpg_jax.runs.algorithm import make_algorithm, make_drift, make_training_rollout
from rpg_jax.runs.evaluation import HeldOut
from rpg_jax.runs.experiment import Experiment, entered, evaluation_generator, make_scorer
from rpg_jax.runs.keeper import Keeper
from rpg_jax.runs.learner import make_learner
from rpg_jax.runs.logs import RunLog, host_metrics, plain
from rpg_jax.runs.profiling import CompilationCounter, chosen_steps, watched
from rpg_jax.runs.stopping import StopRequest, watch_machine
from rpg_jax.runs.trackers import trackers_of
from rpg_jax.runs.warm_start import drawn_base, warm_started
from rpg_jax.runs.watchdog import Watchdog
from rpg_jax.runs.weights import first_adapters, init_params, no_params, open_base
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.loop import Step, train
from rpg_jax.training.measures import SAMPLER_GAPS, Guard
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.training.state import TrainState


def run(config: ConfigDict, functions: rewards.Functions = rewards.NO_FUNCTIONS) -> int:
    """Runs or resumes the training run of a resolved config to its last step; returns the exit code.

    `functions` are what a Python program handed over: rewards by their names in `rewards.parts`, and an environment by
    `environment.name`.
    """
    with entered(config, handed=functions) as opened:
        session = Session(*opened, functions)
        with cli.run_is_open():
            return session.to_the_end()


@dataclasses.dataclass
class Position:
    """How far a run is: its `state` after `step` steps; `owed` are the metrics of a saved step, not yet evaluated."""

    state: TrainState
    step: int = 0
    owed: dict[str, Any] | None = None


class BaseSession(abc.ABC):
    """A run in progress, and the order of what follows each of its steps: its line, checkpoint, evaluation and stop.

    A subclass takes the steps, saves and evaluates. Its constructor sets `guard`, `last` and `optimizer`, then calls
    `_begin`, which sets `now`.

    Attributes:
      last: the number of the last step.
      title, unit: names of the run and of a step on the screen.
    """

    guard: Guard
    last: int
    optimizer: Optimizer
    now: Position
    title, unit = "training", "step"

    def __init__(
        self, config: ConfigDict, folder: storage.Folder, closing: contextlib.ExitStack, checkpoints: Checkpoints
    ):
        self.config, self.folder, self.checkpoints = config, folder, checkpoints
        self.watchdog = Watchdog(folder.files, config.run.stall_seconds, last_words=folder.push)
        self.stop = StopRequest(config.run.stop_seconds, self._out_of_time)
        self.log = RunLog(folder.files, samples=config.log.samples_per_step)
        closing.callback(self.log.close)

    @abc.abstractmethod
    def _steps(self) -> Iterator[Step]:
        """Takes and yields the steps after the present one, each with its metrics."""

    @abc.abstractmethod
    def _write(self, record: dict[str, Any]) -> None:
        """Starts a checkpoint of the present step with `record` and what else a resume needs."""

    @abc.abstractmethod
    def _held_out_scores(self) -> dict[str, float]:
        """Evaluates the present weights."""

    def to_the_end(self) -> int:
        """Steps until the last, or until a signal asks to stop; returns the exit code."""
        now, stopped = self.now, None
        watch_machine(self.config.run.preemption_url, self.stop)
        shown = Progress(self.last, first=now.step, title=self.title, unit=self.unit)
        with self.stop.listening(), self.watchdog, shown as progress:
            self._evaluate_at_start(progress)
            for step in self._steps():
                if stopped := self._after(step, progress):
                    break
            self._finish_saving()
            self.stop.saved()
        if stopped and (now.step < self.last or now.owed):
            print(f"stopped after {self.unit} {now.step} and saved; the same command continues")
            return 128 + stopped
        return self._finish()

    def save(self, owed: dict[str, float] | None = None) -> None:
        """Starts a checkpoint.

        Args:
          owed: metrics of this step. The process that evaluates the step, this one or one that resumes, writes them.
        """
        beat(f"the checkpoint of {self.unit} {self.now.step}")
        self._write({"nonfinite_in_a_row": self.guard.nonfinite_in_a_row, "owed": plain(owed)})

    def _begin(self, now: Position) -> None:
        self.now = now
        self.log.trackers = trackers_of(self.config, self.folder.files, after=now.step) if hosts.is_first() else []

    def _continued(self, step: int, state: TrainState, record: dict[str, Any]) -> Position:
        """The position of a checkpoint, to which the log goes back."""
        self.guard.nonfinite_in_a_row = int(record["nonfinite_in_a_row"])
        self.log.rewind(step)
        print(f"continuing {self.folder.home} after {self.unit} {step}")
        return Position(state, step, None if self.log.has(step) else record.get("owed"))

    def _evaluate_at_start(self, progress: Progress) -> None:
        """Evaluates before the first step, or after the step that an earlier process saved and did not evaluate."""
        if self.now.step == 0:
            self.log.rewind(-1)
            self.log.append(0, start := self._held_out_scores())
            progress.note(f"before the first {self.unit}: {_in_words(start)}")
        elif self.now.owed is not None:
            progress.update(self.now.step, self._evaluated(self.now.owed))

    def _after(self, step: Step, progress: Progress) -> int | None:
        """Logs, saves and evaluates a step; returns the signal that ends the run, if there is one."""
        self.now.state, self.now.step, values = step.state, step.number, step.values
        self.log.append_samples(step.number, step.generated)
        if fault := self.guard.fault(step.number, values, step.updates):
            self.log.append(step.number, values)
            raise cli.RunLost(fault)
        if told := self.guard.warning(step.number, values):
            progress.note(told)
        stopped = self.stop.agreed()
        evaluates, saves = self._is_due(self.config.evaluation.every), self._is_due(self.config.checkpoint.every)
        if not evaluates:
            self.log.append(step.number, values)
        if saves or stopped:  # after the line of the step, or before an evaluation, which may take too long
            self.save(owed=values if evaluates else None)
        if evaluates and stopped:
            self.now.owed = values
        elif evaluates:
            values = self._evaluated(values)
            stopped = self.stop.agreed()
            if stopped and not saves:
                self.save()
        progress.update(step.number, values)
        return stopped

    def _is_due(self, every: int) -> bool:
        """Whether work is due now that is done every `every` steps and after the last step."""
        return self.now.step % every == 0 or self.now.step == self.last

    def _evaluated(self, values: dict[str, float]) -> dict[str, float]:
        """Evaluates the step whose other metrics are `values`, writes its line, and returns all its metrics."""
        started = time.perf_counter()
        values = values | self._held_out_scores()
        values["time/evaluation"] = time.perf_counter() - started
        self.log.append(self.now.step, values)
        self.now.owed = None
        return values

    def _finish_saving(self) -> None:
        """Waits for the last checkpoint of this process."""
        self.checkpoints.wait()

    def _out_of_time(self) -> None:
        saved, seconds = self.checkpoints.latest_step(), self.config.run.stop_seconds
        stands = f"the checkpoint of {self.unit} {saved} stands, and the same command continues from it"
        print(
            f"error: the work after {self.unit} {self.now.step} did not end within run.stop_seconds={seconds:g} s; "
            + (stands if saved is not None else "there is no checkpoint yet, and the same command begins again"),
            file=sys.stderr,
        )

    def _finish(self) -> int:
        state, averages = self.now.state, bool(self.optimizer.evaluation_slots)
        checksum = weights_checksum(self.optimizer.evaluation_params(state.opt_state, state.params))
        if not hosts.is_first():
            return 0
        files = self.folder.files
        if not (files / "summary.md").exists() or self.now.step:
            plots.draw_curves(files)
            summary.write_summary(files)
        print(self.folder.shown(summary.closing_message(files)))
        print(f"weights checksum: {checksum:016x}" + averages * " (of the average, which evaluate and export use)")
        return 0


class Session(BaseSession):
    """One run of reinforcement learning in progress; `closing` ends what it starts."""

    def __init__(
        self,
        experiment: Experiment,
        folder: storage.Folder,
        closing: contextlib.ExitStack,
        functions: rewards.Functions = rewards.NO_FUNCTIONS,
    ):
        config = experiment.config
        self.compilations, self.keeper = CompilationCounter(), Keeper(config, folder)
        super().__init__(config, folder, closing, self.keeper.checkpoints)
        inputs.check(experiment, folder.files, begins=self.keeper.is_new)
        r = config.rollout
        usual, most = SAMPLER_GAPS["bfloat16" if r.int8 or r.int8_kv else config.model.compute_dtype]
        if r.max_sampler_gap is not None:
            usual, most = math.inf, r.max_sampler_gap
        self.guard = Guard(most, usual)
        learner, new = make_learner(experiment.layout), self.keeper.is_new
        self.optimizer, self.last = learner.optimizer, config.train.steps
        scorer = closing.enter_context(make_scorer(config, functions, begins=new))
        started = experiment, scorer, folder.files
        base = open_base(experiment.layout, folder, functools.partial(drawn_base, *started), begins=new)
        first = init_params if base is None else first_adapters
        params = (first if new else no_params)(experiment.layout)  # a resume reads weights once
        self.rollout = rollout = make_training_rollout(experiment, params, base)
        closing.callback(rollout.close)
        if new and config.warm_start.enabled and base is None:
            params = warm_started(experiment, params, rollout, *started[1:])
        if new:
            inputs.note_start(folder.files, weights_checksum(params if base is None else base.weights))
        journal = self.keeper.group_journal(experiment.layout)
        self.algorithm = make_algorithm(experiment, learner, rollout, scorer, folder, base, journal)
        closing.callback(self.algorithm.collector.close)
        generator = evaluation_generator(experiment, rollout, scorer)
        parts = generator, scorer, rollout, self.optimizer
        drift = make_drift(experiment, self.algorithm, folder) if config.evaluation.drift else None
        self.held_out = HeldOut(experiment.task.held_out, *parts, drift)
        closing.callback(self.keeper.close)
        self._begin(Position(learner.create(params)) if new else self._resumed(learner.like))

    def to_the_end(self) -> int:
        self.algorithm.collector.sync(self.now.state.params, int(self.now.state.updates))
        return super().to_the_end()

    def _steps(self) -> Iterator[Step]:
        for step in train(self.algorithm, self.now.state, self.now.step + 1, self.last, self._around):
            rate = float(self.optimizer.learning_rate(max(step.values["updates"] - 1, 0)))
            yield dataclasses.replace(step, values=step.values | self._costs() | {"learning_rate": rate})

    @contextlib.contextmanager
    def _around(self, step: int) -> Iterator[None]:
        """Tells the watchdog about a step, and traces the step where it was chosen."""
        beat(f"step {step}")
        with watched(step, chosen_steps(self.config.profile.steps), self.folder.files):
            yield

    def _costs(self) -> dict[str, float]:
        """Compilations of the step, the host's memory and journal, seconds to start the checkpoint before the step."""
        programs, seconds = self.compilations.take()
        saving = self.keeper.take_seconds()
        counted = {"time/compilations": len(programs), "time/compiling": seconds, "time/checkpoint": saving}
        journal = {} if self.keeper.journal is None else self.keeper.journal.take_counts()
        return counted | journal | self.rollout.take_counts() | host_metrics()

    def _held_out_scores(self) -> dict[str, float]:
        return self.held_out.evaluate(self.now.step, self.now.state, self.algorithm.collector)

    def _write(self, record: dict[str, Any]) -> None:
        stream = self.algorithm.collector.record()  # waits for what moves the stream
        record = {"step": self.now.step, **stream, **record}
        self.keeper.save(self.now.step, self.now.state, record, self.algorithm.reference)

    def _resumed(self, like: TrainState) -> Position:
        """The position of the newest checkpoint that can be trusted, to which everything else goes back."""
        step, state, record = self.keeper.restore(like, self.algorithm.reference)
        self.algorithm.collector.restore(record)
        self.algorithm.reference.restore(record["reference"])
        return self._continued(step, state, record)

    def _finish_saving(self) -> None:
        self.keeper.finish(self.now.step)


def _in_words(values: dict[str, float]) -> str:
    named = {"held_out_nll": "held-out nats per token", "eval/accuracy": "held-out accuracy"}
    return ", ".join(f"{name} {values[key]:.3f}" for key, name in named.items() if key in values) or "nothing held out"
