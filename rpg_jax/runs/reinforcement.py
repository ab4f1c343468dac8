"""Reinforcement learning from a config: makes the parts of a step from an experiment, and trains with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from rpg_jax import data, losses, models, rollout, storage
from rpg_jax.rewards.callables import NOTHING, Handed
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.rewards.verifiers import ENVIRONMENT
from rpg_jax.rollout import weights_checksum
from rpg_jax.runs import processes
from rpg_jax.runs.arguments import loss_arguments, reward_arguments
from rpg_jax.runs.checkpointing import Checkpointing
from rpg_jax.runs.evaluation import Drift, HeldOut
from rpg_jax.runs.experiment import Experiment, entered, evaluation_generator, make_generator, make_rollout, make_scorer
from rpg_jax.runs.inputs import note_start
from rpg_jax.runs.layout import packing_shape, teacher_folder
from rpg_jax.runs.learner import (
    Learner,
    first_adapters,
    init_params,
    is_on_policy,
    learner_programs,
    make_learner,
    no_params,
    open_base,
    open_teacher,
)
from rpg_jax.runs.rehearsal import open_rehearsal
from rpg_jax.runs.resolve import check_sampling, lags, resolve
from rpg_jax.runs.rollout_files import RolloutFiles, token_numbers
from rpg_jax.runs.session import CompilationCounter, OnStep, Session, Trainer, host_metrics
from rpg_jax.runs.warm_start import drawn_base, warm_started
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training.ahead import AheadCollector
from rpg_jax.training.collect import Collector, DynamicSampling
from rpg_jax.training.loop import Algorithm, Step, take_step
from rpg_jax.training.measures import SAMPLER_GAPS, Guard
from rpg_jax.training.objective import advantages_fn, token_rewards
from rpg_jax.training.partial import PartialCollector
from rpg_jax.training.reference import Reference, Taught, make_rule
from rpg_jax.training.state import TrainState


def run(config: ConfigDict, handed: Handed = NOTHING, on_step: OnStep | None = None) -> int:
    """Joins the other processes of the run, resolves `config`, which must name the run, and trains to the last step,
    from the last checkpoint if the run's folder has one. Returns 0, or 128 plus the number of the signal that stopped
    the run after it saved.

    Args:
      handed: a Python program's rewards, environment, loss and advantage, by their names in the config. The loss and
        the advantage must be declared already: here their source texts alone are read, so that a resume can compare.
      on_step: receives the record of each step once the step is evaluated, if that is due, and its line is written.

    Raises ValueError if config, folder or data do not fit, and `cli.Ended` if the open run cannot go on.
    """
    processes.join(config)
    config = resolve(config)
    check_sampling(config)
    check_rows(config)
    with entered(config, handed=handed) as (experiment, folder, closing):
        if config.rewards.overlong_shaping:
            buffer, limit = config.rewards.overlong_buffer, config.rollout.max_tokens
            print(
                f"the reward is shaped: a completion loses up to 1 over the last {buffer} of {limit} tokens; without "
                "shaping: rewards.overlong_shaping=False"
            )
        session = Session(experiment, folder, closing, journaled=True, on_step=on_step)
        session.begin(*make_trainer(experiment, session))
        return session.to_the_end()


def make_trainer(experiment: Experiment, session: Session) -> tuple[_ReinforcementTrainer, Any]:
    """Returns (the trainer of a run, its trained arrays before the first step: all weights or the adapters; zeros if a
    checkpoint has them). A new run loads or draws its weights here, and may train its warm start; inputs.json gets the
    checksum of the weights, or of the base of adapters. The rollout, the scorer, the collector and a teacher's threads
    end with the session. Raises ValueError if a part refuses the config."""
    folder, checkpointing, closing = session.folder, session.checkpointing, session.closing
    config, compilations, parent = experiment.config, CompilationCounter(), checkpointing.parent
    new, needs_weights = checkpointing.is_new, checkpointing.needs_weights
    guard, learner = _make_guard(config), make_learner(experiment.layout)
    scorer = closing.enter_context(make_scorer(config, experiment.handed, begins=new))
    draw = functools.partial(drawn_base, experiment, scorer, folder.files)
    first = init_params if experiment.layout.lora is None else first_adapters  # before a warm start: they may not fit
    params = (first if needs_weights else no_params)(experiment.layout)  # a resume reads weights once
    base = open_base(experiment.layout, folder, draw, begins=new, parent=parent)
    own = make_training_rollout(experiment, params, base)
    closing.callback(own.close)
    if needs_weights and config.warm_start.enabled and base is None:
        params = warm_started(experiment, params, own, scorer, folder.files)
    if needs_weights:
        note_start(folder.files, weights_checksum(params if base is None else base.weights))
    journal = checkpointing.group_journal(experiment.layout)
    reference = _make_reference(experiment, folder, closing)
    algorithm = _make_algorithm(experiment, learner, own, scorer, reference, folder, base, journal)
    algorithm = dataclasses.replace(algorithm, fault=guard.fault)
    closing.callback(algorithm.collector.close)
    if parent is not None:
        print(parent.move(config, algorithm.collector, algorithm.reference))
    held_out = HeldOut(
        experiment.task.held_out,
        evaluation_generator(experiment, own, scorer),
        learner.optimizer,
        make_drift(experiment, algorithm, folder, parent.step if parent else 0) if config.evaluation.drift else None,
    )
    trainer = _ReinforcementTrainer(
        learner=learner,
        guard=guard,
        last=config.train.steps,
        reference=reference,
        algorithm=algorithm,
        held_out=held_out,
        checkpointing=checkpointing,
        compilations=compilations,
    )
    return trainer, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReinforcementTrainer(Trainer):
    """Trains by reinforcement learning."""

    title = "training"
    unit = "step"
    algorithm: Algorithm
    held_out: HeldOut
    checkpointing: Checkpointing
    compilations: CompilationCounter

    def begin(self, state: TrainState) -> None:
        """Gives the rollout the weights of `state`."""
        self.algorithm.collector.sync(state.params, int(state.updates))

    def step(self, state: TrainState, number: int) -> Step:
        """Takes a step of the algorithm, and adds its costs and its last learning rate to the metrics."""
        step = take_step(self.algorithm, state, number)
        rate = float(self.learner.optimizer.learning_rate(max(step.metrics["updates"] - 1, 0)))
        return dataclasses.replace(step, metrics={**step.metrics, **self._costs(), "learning_rate": rate})

    def evaluate(self, state: TrainState, number: int) -> dict[str, float]:
        return self.held_out.evaluate(number, state, self.algorithm.collector)

    def record(self) -> dict[str, Any]:
        return self.algorithm.collector.record()

    def restore(self, record: Mapping[str, Any]) -> None:
        self.algorithm.collector.restore(record)
        self.algorithm.reference.restore(record["reference"])

    def _costs(self) -> dict[str, float]:
        """Metrics of a step, by name: compilations, seconds to start the checkpoint before the step, the host's memory
        and open files, groups of the journal, and what the servers that sample count."""
        programs, seconds = self.compilations.take()
        saving, journal = self.checkpointing.take_seconds(), self.checkpointing.journal
        counted = {"time/compilations": len(programs), "time/compiling": seconds, "time/checkpoint": saving}
        counted |= {} if journal is None else journal.take_counts()
        return counted | self.held_out.generate.rollout.take_counts() | host_metrics()


def _make_guard(config: ConfigDict) -> Guard:
    """The guard of the run. Its gaps are those of bfloat16 if the sampler or the trainer has bfloat16 or 8 bits. If
    `rollout.max_sampler_gap` is set, this gap stops the run, and no gap warns."""
    r = config.rollout
    usual, most = SAMPLER_GAPS["bfloat16" if r.int8 or r.int8_kv else config.model.compute_dtype]
    if r.max_sampler_gap is not None:
        usual, most = math.inf, r.max_sampler_gap
    return Guard(most, usual, limit=r.max_tokens, needs_rewards=not config.reference.path)


def _make_algorithm(
    experiment: Experiment,
    learner: Learner,
    own: rollout.Rollout,
    scorer: Scorer,
    reference: Reference,
    folder: storage.Folder,
    base: models.Base | None = None,
    journal: rollout.GroupJournal | None = None,
) -> Algorithm:
    """The parts of the training step, with the rollout `own`. `base` has the frozen weights beside adapters. `journal`
    keeps the groups of a step as they end. Rollout files go into `folder`."""
    c, layout = experiment.config, experiment.layout
    programs = learner_programs(layout, learner, base=base)
    pack = functools.partial(
        data.pack,
        shape=packing_shape(layout),
        pad_id=experiment.tokenizer.pad_id,
        mask_truncated=c.rewards.overlong_masking,
        sharding=layout.row_sharding,
    )
    (name, hyperparameters), files = loss_arguments(c), None
    weights = reward_arguments(c)[0]
    credit = {"credit": c.loss.credit, "environment_weight": weights.get(ENVIRONMENT, 0.0)}
    if c.log.rollouts_every:
        numbers = token_numbers(losses.find_loss(name), **hyperparameters)
        how = {"every": c.log.rollouts_every, "parts": weights}
        files = RolloutFiles(folder.files, experiment.tokenizer, programs.logprobs, numbers, **how)
    return Algorithm(
        collector=_make_collector(experiment, own, scorer, journal),
        pack=pack,
        advantages=None
        if learner.critic
        else advantages_fn(c.loss.advantage, name, [*weights.values()], **credit, **hyperparameters),
        token_rewards=functools.partial(token_rewards, **credit),
        programs=programs,
        reference=reference,
        rehearsal=open_rehearsal(experiment),
        decoupled=lags(c) and losses.carried_ratio(c.loss.sampler_correction) is not None,
        updates_per_step=c.train.updates_per_step,
        epochs=c.train.epochs,
        on_policy=is_on_policy(layout),
        exact=c.loss.estimator == "exact",
        after_updates=None if files is None else files.after_updates,
        is_recorded=lambda step: files is not None and files.is_due(step),
        reward_parts=weights,
        experts=0 if layout.model.experts is None else layout.model.experts.count,
    )


def make_training_rollout(experiment: Experiment, params: Any, base: models.Base | None = None) -> rollout.Rollout:
    """The rollout of `rollout.driver`: in this process, or by servers, which need not run yet. `params` are all
    weights, or the adapters of the frozen `base`. Raises ValueError if the fields of servers do not fit, or if
    `model.replay_experts` is True and the experts of some tokens would not be recorded."""
    c = experiment.config
    remote = rollout.find_driver(c.rollout.driver).remote
    unknown = {
        "the model has no experts": experiment.layout.model.experts is None,
        f"rollout.driver={c.rollout.driver} samples on servers, whose replies have no experts": remote,
        f"the experts of what environment.name={c.environment.name} writes are not recorded": c.environment.name,
    }
    if c.model.replay_experts and (found := [reason for reason, holds in unknown.items() if holds]):
        raise ValueError(f"model.replay_experts=True: {found[0]}; leave it False")
    if not remote:
        return make_rollout(experiment.layout, params, base)
    from rpg_jax.runs.served_trainer import make_served  # not every installation has what it needs

    return make_served(experiment, params, base)


def check_rows(config: ConfigDict) -> None:
    """Raises ValueError if `train.packed_length` is less than `task.max_prompt_tokens` + `rollout.max_tokens`: a long
    prompt with its completion would stop the run later. None, rows without packing, always passes."""
    length, longest = config.train.packed_length, config.task.max_prompt_tokens + config.rollout.max_tokens
    if length is not None and length < longest:
        raise ValueError(
            f"train.packed_length={length} cannot hold a prompt with its completion, of {longest} tokens at most: set "
            f"train.packed_length={longest}, or lower task.max_prompt_tokens or rollout.max_tokens"
        )


def make_drift(experiment: Experiment, algorithm: Algorithm, folder: storage.Folder, start: int) -> Drift:
    """A measure of how far the policy moves from the start policy. The start policy is the policy after step `start` of
    the run's parent; with `start` 0, the first policy of a run without a parent. The trained arrays of the start policy
    are kept in `initial`, in the home of `folder`. Raises ValueError if `evaluation.temperature` is not
    `rollout.temperature`, at which log-probabilities are computed."""
    c = experiment.config
    if c.evaluation.temperature != c.rollout.temperature:
        raise ValueError(
            "evaluation.drift needs evaluation.temperature=rollout.temperature: otherwise completions are no samples "
            "of the policy that the log-probabilities are of"
        )
    snapshots, like = Snapshots(folder.home / "initial"), experiment.layout.trained
    return Drift(snapshots, like, algorithm.pack, algorithm.programs.logprobs, start)


def _make_collector(
    experiment: Experiment, own: rollout.Rollout, scorer: Scorer, journal: rollout.GroupJournal | None
) -> Collector:
    """The collector of a step's groups, which samples by `own` and scores by `scorer`: between updates or ahead of
    them, whole completions or parts. Raises ValueError if several processes would sample ahead without servers."""
    c, dynamic = experiment.config, experiment.config.dynamic_sampling
    sizes = {"temperature": c.rollout.temperature, "group_size": c.rollout.group_size, "seed": c.seed}
    parts: dict[str, Any] = {
        "generator": make_generator(experiment, own, scorer, **sizes, journal=journal),
        "stream": data.PromptStream(experiment.task.train, seed=c.seed),
        "prompts_per_step": c.rollout.prompts_per_step,
        "max_failures": c.rewards.max_failures,
    }
    if dynamic.enabled:
        parts["dynamic"] = DynamicSampling(dynamic.oversample, dynamic.max_batches, dynamic.surplus)
    if c.rollout.max_staleness:
        return AheadCollector(**parts, max_staleness=c.rollout.max_staleness, steps=c.train.steps)
    if not c.rollout.partial_tokens:
        return Collector(**parts)
    limits = {"max_tokens": c.rollout.max_tokens, "part_tokens": c.rollout.partial_tokens}
    return PartialCollector(**parts, **limits, steps=c.train.steps)


def _make_reference(experiment: Experiment, folder: storage.Folder, closing: contextlib.ExitStack) -> Reference:
    """The config's reference policy: a policy of the run, with snapshots in `folder`/reference, or a teacher. `closing`
    ends the threads that ask a teacher's servers."""
    c, layout, offload = experiment.config, experiment.layout, "reference" in experiment.config.offload
    memory: Literal["disk", "device", "host"] = "host" if offload else "device" if c.reference.resident else "disk"
    how: dict[str, Any] = {"snapshots": Snapshots(folder.home / "reference"), "like": layout.trained}
    how["teacher"] = open_teacher(layout, experiment.tokenizer, offload=offload)
    if c.reference.path and not teacher_folder(c):
        from rpg_jax.runs.served_trainer import make_served_teacher  # not every installation has what it needs

        served = make_served_teacher(experiment)
        closing.callback(served.close)
        how["teacher"] = Taught(scores=served.logprobs)
    return Reference(make_rule(c.reference), memory=memory, **how)
