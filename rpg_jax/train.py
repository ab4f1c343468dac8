"""Trains a policy by regularized policy gradients.

  python -m rpg_jax.train --config=configs/tiny.py --config.method=RPG-REINFORCE-URKL --config.seed=1

The same command continues an interrupted run from its last checkpoint. A run leaves in runs/NAME: config.json,
versions.json, metrics.jsonl, samples.jsonl, curves.png, summary.md, checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict, config_flags

from rpg_jax import command_line, run_folder
from rpg_jax.experiment import Experiment
from rpg_jax.methods import resolve
from rpg_jax.report import curves, scores, summary
from rpg_jax.report.progress import Progress
from rpg_jax.training import evaluation
from rpg_jax.training import state as state_lib
from rpg_jax.training import step as step_lib
from rpg_jax.training.checkpoints import Checkpoints, Snapshots, abstract, bit_checksum
from rpg_jax.training.compilations import CompilationCounter
from rpg_jax.training.experience import Group
from rpg_jax.training.metrics import JsonLines
from rpg_jax.training.warm_start import Target, warm_start

_CONFIG = command_line.define_config("configs/tiny.py")


def main() -> int:
    """Names the run, resolves its config and trains."""
    config = _CONFIG.value
    if config.run.name is None:
        holder = flags.FLAGS["config"]
        file, overrides = config_flags.get_config_filename(holder), config_flags.get_override_values(holder)
        config.run.name = run_folder.default_name(file, config, overrides)
    return train(resolve(config))


def train(config: ConfigDict) -> int:
    """Runs or resumes `config` to its last step; returns the exit code."""
    run_dir = run_folder.open_run(config)
    if config.run.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.run.compilation_cache)
    experiment = Experiment.open(config, run_dir)
    print("".join(f"{note}\n" for note in experiment.notes), end="")
    with experiment.activate():
        run = Run(experiment, run_dir)
        try:
            return run.to_the_end()
        finally:
            run.close()


class Run:
    """One training run: the trainer, its files and its display."""

    def __init__(self, experiment: Experiment, run_dir: Path):
        self.experiment, self.config, self.run_dir = experiment, experiment.config, run_dir
        self.metrics, self.samples = JsonLines(run_dir / "metrics.jsonl"), JsonLines(run_dir / "samples.jsonl")
        self.checkpoints = Checkpoints(run_dir / "checkpoints", keep=self.config.checkpoint.keep)
        self.signal: int | None = None
        self.compilations = CompilationCounter()
        self.references = {
            step: self.checkpoints.record(step)["reference"]["number"] for step in self.checkpoints.steps()
        }
        self.optimizer = experiment.make_optimizer()
        resumed = self.checkpoints.latest_step()
        params = experiment.init_params()
        self.rollout, self.scorer = experiment.make_rollout(params), experiment.make_scorer()
        self.evaluation_sampler = experiment.evaluation_sampler(self.rollout, self.scorer)
        if resumed is None and self.config.warm_start.enabled:
            params = self._warm_start(params)
        self.trainer = experiment.make_trainer(params, self.optimizer, self.rollout, self.scorer, run_dir)
        if resumed is None:
            self.trainer.reference.start(self.trainer.state.params)
        else:
            self._resume(resumed)

    def to_the_end(self) -> int:
        """Steps until `train.steps`, or until a signal asks to stop; returns the exit code."""
        trainer, steps = self.trainer, self.config.train.steps
        trainer.sync_rollout()
        with self._stop_on_signals(), Progress(steps, first=trainer.step) as progress:
            if trainer.step == 0:
                self._rewind(-1)
                self.metrics.append({"step": 0, **(start := self.evaluate())})
                progress.note(f"held-out accuracy before the first step: {start['eval/accuracy']:.3f}")
            while trainer.step < steps and self.signal is None:
                values, groups = trainer.run_step()
                if trainer.step % self.config.evaluation.every == 0 or trainer.step == steps:
                    values |= self.evaluate()
                programs, seconds = self.compilations.take()
                values |= {"time/compilations": len(programs), "time/compiling": seconds}
                self._write_samples(groups)
                self.metrics.append({"step": trainer.step, **values})
                progress.update(trainer.step, values)
                if trainer.step % self.config.checkpoint.every == 0 or trainer.step == steps or self.signal:
                    self.save()
        if self.signal:
            print(f"stopped after step {trainer.step} and saved; the same command continues")
            return 128 + self.signal
        return self._finish()

    def evaluate(self) -> dict[str, float]:
        """Scores of every held-out set, with the optimizer's evaluation weights; "eval/accuracy" is their mean."""
        trainer = self.trainer
        params = self.optimizer.evaluation_params(trainer.state.opt_state, trainer.state.params)
        if params is not trainer.state.params:
            self.rollout.sync_weights(params, int(trainer.state.updates))
        values = {}
        for name, problems in self.experiment.task.held_out.items():
            groups = self.evaluation_sampler(problems, step=trainer.step)
            found = scores.metrics(evaluation.records(name, groups, self.scorer))
            values |= {f"eval/{name}/{key}": value for key, value in found.items()}
        trainer.sync_rollout()
        means = [value for key, value in values.items() if key.endswith("/mean_at_k")]
        return {"eval/accuracy": float(np.mean(means)), **values}

    def save(self) -> None:
        """Starts a checkpoint of everything that a resume needs."""
        record = self.trainer.record()
        self.references[self.trainer.step] = record["reference"]["number"]
        self.checkpoints.save(self.trainer.step, self.trainer.state, record)
        # The save that `keep` makes room for may still be under way: one more reference than checkpoints survives.
        recent = sorted(self.references)[-self.config.checkpoint.keep - 1 :]
        self.trainer.reference.prune(self.references[step] for step in recent)

    def close(self) -> None:
        self.checkpoints.close()
        self.rollout.close()
        self.scorer.close()

    def _resume(self, step: int) -> None:
        trainer = self.trainer
        where = self.experiment.state_sharding(self.optimizer, self.experiment.make_critic())
        like = abstract(trainer.state, where)
        trainer.restore(self.checkpoints.restore(step, like), self.checkpoints.record(step))
        self._rewind(step)
        print(f"continuing {self.run_dir} after step {step}")

    def _rewind(self, step: int) -> None:
        for log in (self.metrics, self.samples):
            log.rewind(step)

    def _write_samples(self, groups: list[Group]) -> None:
        for group in groups[: self.config.log.samples_per_step]:
            for text, completion, reward, accuracy in zip(
                group.texts, group.completions, group.rewards, group.accuracy, strict=True
            ):
                self.samples.append(
                    {
                        "step": self.trainer.step,
                        "prompt": group.problem.prompt,
                        "completion": text,
                        "answer": group.problem.answer,
                        "reward": reward,
                        "accuracy": accuracy,
                        "tokens": len(completion.tokens),
                        "finish_reason": completion.finish_reason,
                    }
                )

    def _finish(self) -> int:
        self.checkpoints.wait()
        if not (self.run_dir / "summary.md").exists() or self.trainer.step:
            curves.draw_curves(self.run_dir)
            summary.write_summary(self.run_dir)
        print(summary.closing_message(self.run_dir))
        print(f"weights checksum: {bit_checksum(self.trainer.state.params)[:16]}")
        return 0

    @contextlib.contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the run after the step in progress, with a checkpoint; the second one at once."""

        def stop(number: int, _: Any) -> None:
            if self.signal is not None:
                raise SystemExit(128 + number)
            self.signal = number

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _warm_start(self, params: Any) -> Any:
        """Weights at the configured accuracy: from the shared cache, or trained now and put there."""
        c, e = self.config.warm_start, self.experiment
        folder = Path(c.dir) / warm_start_key(self.config)
        cache = Snapshots(folder)
        if cache.exists(0):
            print(f"warm start from {folder}")
            return cache.restore(0, e.abstract_params)
        optimizer = e.make_optimizer(
            name="adamw", learning_rate=c.learning_rate, warmup_updates=20, weight_decay=0.0, max_grad_norm=1.0
        )
        update = e.make_programs(optimizer, step_lib.supervised_loss, 1.0).fused
        sampler = e.make_sampler(
            self.rollout, self.scorer, temperature=self.config.evaluation.temperature, group_size=1, seed=c.seed
        )

        problems = [p for held_out in e.task.held_out.values() for p in held_out]

        def accuracy(params: Any) -> float:
            self.rollout.sync_weights(params, 0)
            return float(np.mean([g.accuracy.mean() for g in sampler(problems, step=0)]))

        target = Target(c.min_accuracy, c.max_accuracy, c.check_every, c.max_updates)
        with Progress(goal=c.min_accuracy, title="warm start") as progress:
            state, reached = warm_start(
                state_lib.create(params, optimizer, e.state_sharding(optimizer)),
                update,
                e.supervised_batches(c.batch_size),
                accuracy,
                target,
                on_check=lambda updates, value: progress.update(updates, {"accuracy": value}),
            )
        cache.save(0, state.params)
        cache.wait()
        shutil.copy(self.run_dir / "tokenizer.model", folder)
        return state.params


def warm_start_key(config: ConfigDict) -> str:
    """Names a warm start by what it depends on: model, task, tokenizer text, seed and its own settings."""
    parts = {"model": config.model.to_dict(), "task": config.task.to_dict(), "warm_start": config.warm_start.to_dict()}
    parts |= {"max_tokens": config.rollout.max_tokens, "evaluation": config.evaluation.to_dict()}
    parts["warm_start"].pop("dir")
    parts["model"].pop("remat")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


if __name__ == "__main__":
    command_line.run(main, __doc__)
