"""A run: the steps of its trainer, and around them evaluations, checkpoints, logs, signals and the watchdog. The end of
the file measures what steps cost: compilations, traces of chosen steps, and memory.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.monitoring

from rpg_jax import storage
from rpg_jax.parallel import hosts
from rpg_jax.report import plots, summary
from rpg_jax.report.progress import Progress
from rpg_jax.report.run_files import Run
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import cli
from rpg_jax.runs.checkpointing import Checkpointing
from rpg_jax.runs.experiment import Experiment
from rpg_jax.runs.inputs import check_inputs, note_start
from rpg_jax.runs.learner import Learner
from rpg_jax.runs.logs import RunLog, chosen_steps, plain, trackers_of
from rpg_jax.runs.processes import StopRequest, Watchdog
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.loop import Step
from rpg_jax.training.measures import Guard
from rpg_jax.training.reference import Reference
from rpg_jax.training.state import TrainState

OnStep = Callable[[Step], None]
"""A user's function, which receives the record of each step once the step is evaluated and its line is written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer(abc.ABC):
    """How a run trains: by reinforcement learning or by supervised training. A `Session` calls the methods.

    Attributes:
      title, unit: the names of the run's work and of a step on the screen, as "training" and "step".
      learner: the optimizer, and the layout of the state.
      guard: stops the run because of its metrics, and counts the skipped updates, which a checkpoint keeps.
      last: the number of the last step that the run is to take, done or not. The first step is 1.
      reference: the KL anchor, whose snapshots a checkpoint needs; None without a reference.
    """

    title: ClassVar[str]
    unit: ClassVar[str]
    learner: Learner
    guard: Guard
    last: int
    reference: Reference | None = None

    def begin(self, state: TrainState) -> None:  # noqa: B027, a trainer whose steps do not sample has nothing to do
        """Prepares for the first step, for instance hands the weights of `state` to the rollout. Called once."""

    @abc.abstractmethod
    def step(self, state: TrainState, number: int) -> Step:
        """Takes step `number`, from 1, in order; donates `state`. Returns its record; the caller saves and logs."""

    @abc.abstractmethod
    def evaluate(self, state: TrainState, number: int) -> dict[str, float]:
        """Returns the held-out scores of the weights after step `number`, as metrics by name. `state` stays usable."""

    @abc.abstractmethod
    def record(self) -> dict[str, Any]:
        """Returns the position of the data, JSON-able, for a checkpoint. May wait for what moves the position."""

    @abc.abstractmethod
    def restore(self, record: Mapping[str, Any]) -> None:
        """Moves the data, and the reference if there is one, to the position that the method `record` returned."""


class Session:
    """A run in progress. After each step it logs the step, saves a checkpoint and evaluates if due, and may stop. Make
    the trainer with the session, and call `begin`, then `to_the_end`. The session's files and threads end with
    `closing`. With `journaled`, the folder keeps groups between checkpoints. `on_step` receives the record of each
    step. All processes of a run make their session together. Raises ValueError if an input has changed, or if the run
    of `run.start_from` does not fit.

    Attributes:
      now: the record of the last finished step; before the first step a record with number 0, or the parent's step.
      owes: whether the step of `now` is saved and not yet evaluated, so that its metrics are not yet written.
    """

    trainer: Trainer
    now: Step

    def __init__(
        self,
        experiment: Experiment,
        folder: storage.Folder,
        closing: contextlib.ExitStack,
        *,
        journaled: bool = False,
        on_step: OnStep | None = None,
    ):
        self.config, self.folder, self.on_step = (config := experiment.config), folder, on_step
        self.watchdog = Watchdog(folder.files, config.run.stall_seconds, last_words=folder.push)
        self.stop = StopRequest(config.run.stop_seconds, self._out_of_time)
        self.log = RunLog(folder.files, samples=config.log.samples_per_step)
        self.closing, self.owes = closing, False
        closing.callback(self.log.close)
        self.checkpointing = Checkpointing(config, folder, journaled=journaled)
        inputs = check_inputs(experiment, folder.files, begins=self.checkpointing.is_new)
        if self.checkpointing.parent is not None:
            self.checkpointing.parent.check(config, inputs)

    def begin(self, trainer: Trainer, params: Any) -> None:
        """Takes the trainer, and makes the state: a new one from `params`, the first trained arrays; or the parent's,
        or the newest checkpoint's. Raises ValueError if a checkpoint or the parent's state does not fit."""
        self.closing.callback(self.checkpointing.close)
        self.trainer, parent = trainer, self.checkpointing.parent
        if parent is not None:
            self.now = Step(parent.step, parent.state(trainer.learner.like), {})
            note_start(self.folder.files, weights_checksum(self.now.state.params), parent)
        elif self.checkpointing.is_new:
            self.now = Step(0, trainer.learner.create(params), {})
        else:
            self.now = self._resumed()
        after = self.now.number
        self.log.trackers = trackers_of(self.config, self.folder.files, after=after) if hosts.is_first() else []

    @cli.run_is_open()
    def to_the_end(self) -> int:
        """Takes steps until the last step, or until SIGTERM or SIGINT asks to stop (heard in the main thread only), and
        then saves. Blocks meanwhile. A second signal, a late save or a stall ends the process. Returns 0, or 128 plus
        the signal's number if steps or an evaluation are left. After the last step it writes curves and summary. Raises
        `cli.Ended`, with the code `GAVE_UP` if the guard stops the run or a device is out of memory. Call it once."""
        trainer, stopped = self.trainer, None
        trainer.begin(self.now.state)
        shown = Progress(trainer.last, first=self.now.number, title=trainer.title, unit=trainer.unit)
        traced = chosen_steps(self.config.profile.steps)
        with self.stop.listening(), self.watchdog, shown as progress:
            self._evaluate_at_start(progress)
            while self.now.number < trainer.last and not stopped:
                number = self.now.number + 1
                beat(f"{trainer.unit} {number}")
                with watched(number, traced, self.folder.files):
                    step = trainer.step(self.now.state, number)
                stopped = self._after(step, progress)
            self.checkpointing.finish(self.now.number)
            self.stop.saved()
        if stopped and (self.now.number < trainer.last or self.owes):
            print(f"stopped after {trainer.unit} {self.now.number} and saved; the same command continues")
            return 128 + stopped
        return self._finish()

    def save(self, owed: Mapping[str, float] | None = None) -> None:
        """Starts a checkpoint of the present step, and returns while the storage still writes it. `owed` are metrics of
        this step that no log has yet, because the step is not evaluated; None if the log has them. The checkpoint
        keeps them, and the process that evaluates the step, this one or a resumed one, logs them."""
        beat(f"the checkpoint of {self.trainer.unit} {self.now.number}")
        record = {
            "step": self.now.number,
            **self.trainer.record(),  # waits for what moves the data's position
            "nonfinite_in_a_row": self.trainer.guard.nonfinite_in_a_row,
            "owed": plain(owed),
        }
        self.checkpointing.save(self.now.number, self.now.state, record, self.trainer.reference)

    def _resumed(self) -> Step:
        """Takes trainer and logs back to the newest undamaged checkpoint. Returns the record of its step."""
        trainer = self.trainer
        number, state, record = self.checkpointing.restore(trainer.learner.like, trainer.reference)
        trainer.restore(record)
        trainer.guard.nonfinite_in_a_row = int(record["nonfinite_in_a_row"])
        self.log.rewind(number)
        ended = number >= trainer.last
        said = f"{self.folder.home} finished already; nothing is trained" if ended else f"continuing {self.folder.home}"
        print(f"{said} after {trainer.unit} {number}")
        owed = None if self.log.has(number) else record.get("owed")
        self.owes = owed is not None
        return Step(number, state, owed or {})

    def _evaluate_at_start(self, progress: Progress) -> None:
        """Evaluates before the first step, or after the step that an earlier process saved and did not evaluate."""
        if self.checkpointing.is_new:
            self.log.rewind(-1)
            start = self.trainer.evaluate(self.now.state, self.now.number)
            self.log.append(dataclasses.replace(self.now, metrics=start))
            progress.note(f"before the first {self.trainer.unit}: {_in_words(start)}")
        elif self.owes:
            self._evaluate()
            self._tell(progress)

    def _after(self, step: Step, progress: Progress) -> int | None:
        """Logs a step, and saves and evaluates it if due. Returns the signal that ends the run after it, or None."""
        self.now = step
        self.log.append_samples(step.number, step.groups)
        if step.fault is not None:
            self.log.append(step)
            raise cli.Ended(step.fault, cli.GAVE_UP)
        for warning in self.trainer.guard.warnings(step.number, step.metrics):
            progress.note(warning)
        stopped = self.stop.agreed()
        evaluates, saves = self._is_due(self.config.evaluation.every), self._is_due(self.config.checkpoint.every)
        if not evaluates:
            self.log.append(step)
        if saves or stopped:  # after the line of the step, or before an evaluation, which may take too long
            self.save(owed=step.metrics if evaluates else None)
        self.owes = bool(evaluates and stopped)
        if evaluates and not stopped:
            self._evaluate()
            stopped = self.stop.agreed()
            if stopped and not saves:
                self.save()
        self._tell(progress)
        return stopped

    def _is_due(self, every: int) -> bool:
        """Whether periodic work is due after this step: every `every` steps, and after the last step of the run."""
        return self.now.number % every == 0 or self.now.number == self.trainer.last

    def _evaluate(self) -> None:
        """Evaluates the present step, adds the scores to the step's metrics, and writes the step's line of metrics."""
        started = time.perf_counter()
        scores = self.trainer.evaluate(self.now.state, self.now.number)
        seconds = {"time/evaluation": time.perf_counter() - started}
        self.now = dataclasses.replace(self.now, metrics={**self.now.metrics, **scores, **seconds})
        self.log.append(self.now)
        self.owes = False

    def _tell(self, progress: Progress) -> None:
        """Shows the present step, and calls `on_step`, unless a resumed run has to evaluate the step first."""
        progress.update(self.now.number, self.now.metrics)
        if self.on_step is not None and not self.owes:
            self.on_step(self.now)

    def _out_of_time(self) -> None:
        saved, seconds = self.checkpointing.checkpoints.latest_step(), self.config.run.stop_seconds
        unit = self.trainer.unit
        stands = f"the checkpoint of {unit} {saved} stands, and the same command continues from it"
        print(
            f"error: the work after {unit} {self.now.number} did not end within run.stop_seconds={seconds:g} s; "
            + (stands if saved is not None else "there is no checkpoint yet, and the same command begins again"),
            file=sys.stderr,
        )

    def _finish(self) -> int:
        state, optimizer = self.now.state, self.trainer.learner.optimizer
        checksum = weights_checksum(optimizer.evaluation_params(state.opt_state, state.params))
        averages = bool(optimizer.evaluation_slots)
        if not hosts.is_first():
            return 0
        run = Run.read(self.folder.files)
        if not (self.folder.files / "summary.md").exists() or self.now.number:
            plots.draw_curves(run)
            summary.write_summary(run)
        print(self.folder.shown(summary.closing_message(run)))
        print(f"weights checksum: {checksum:016x}" + averages * " (of the average, which evaluate and export use)")
        return 0


def _in_words(values: Mapping[str, float]) -> str:
    sets = sum(key.endswith("/mean_at_k") for key in values)
    accuracy = f"held-out accuracy, mean of {sets} sets," if sets > 1 else "held-out accuracy"
    named = {"held_out_nll": "held-out nats per token", "eval/accuracy": accuracy}
    return ", ".join(f"{name} {values[key]:.3f}" for key, name in named.items() if key in values) or "nothing held out"


class CompilationCounter:
    """Counts the programs that this process compiles, or fetches from the cache, after the counter was made."""

    def __init__(self) -> None:
        self._programs: list[str] = []
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._programs.append(str(details.get("fun_name", "")))
            self._seconds += duration_secs

    def take(self) -> tuple[list[str], float]:
        """(names of the programs in their order, seconds in all) since the last call, or since the counter was made."""
        taken = self._programs, self._seconds
        self._programs, self._seconds = [], 0.0
        return taken


@contextlib.contextmanager
def watched(step: int, traced: range, folder: Path) -> Iterator[None]:
    """A context for step number `step`. If `traced` has the number, JAX writes a trace of the block into
    `folder`/profile, for TensorBoard or Perfetto. If the devices run out of memory in the block, writes what filled
    them to `folder`/memory.prof and raises `cli.Ended`."""
    trace = jax.profiler.trace(str(folder / "profile")) if step in traced else contextlib.nullcontext()
    try:
        with trace, jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        profile = folder / "memory.prof"
        jax.profiler.save_device_memory_profile(str(profile))
        reason = (
            f"step {step}: the devices are out of memory ({str(error).splitlines()[0][:200]}). In this order: a "
            "smaller train.microbatch_size, model.remat=full or offload, fewer rollout.slots, a larger mesh.fsdp; "
            f"python -m rpg_jax.plan tells what fits before it is run. What filled them: pprof {profile}"
        )
        raise cli.Ended(reason, cli.GAVE_UP) from error


def host_metrics() -> dict[str, float]:
    """The process's "host/rss_mib", resident memory in MiB, and "host/open_files"; {} if the system does not say."""
    status, descriptors = Path("/proc/self/status"), Path("/proc/self/fd")
    if not status.exists():
        return {}
    lines = status.read_text(encoding="utf-8").splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return {"host/rss_mib": resident / 1024, "host/open_files": len(list(descriptors.iterdir()))}
