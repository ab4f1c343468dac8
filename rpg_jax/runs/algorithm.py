"""Makes the training algorithm of a run from its experiment: collector, loss, programs, reference."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax

from rpg_jax import data, losses, models, rewards, rollout, storage
from rpg_jax.runs.drift import Drift
from rpg_jax.runs.experiment import Experiment, make_generator, make_rollout
from rpg_jax.runs.layout import Layout, packing_shape
from rpg_jax.runs.learner import Learner, learner_programs, offloaded, policy_objective, reference_rule
from rpg_jax.runs.resolve import loss_arguments, reward_arguments
from rpg_jax.runs.rollout_files import RolloutFiles, token_numbers
from rpg_jax.storage.checkpoints import Snapshots
from rpg_jax.training.ahead import AheadCollector
from rpg_jax.training.collect import Collector, DynamicSampling, collect
from rpg_jax.training.loop import Algorithm
from rpg_jax.training.objective import advantages_fn, token_rewards
from rpg_jax.training.reference import Reference
from rpg_jax.training.routing import Routing


def make_algorithm(
    experiment: Experiment,
    learner: Learner,
    own: rollout.Rollout,
    scorer: rewards.Scorer,
    folder: storage.Folder,
    base: models.Base | None = None,
    journal: rollout.GroupJournal | None = None,
) -> Algorithm:
    """The parts of the config's training step; `base` are the frozen weights beside adapters."""
    c, layout = experiment.config, experiment.layout
    programs = learner_programs(layout, learner, policy_objective(c, learner.critic), base)
    packed = {
        "pad_id": experiment.tokenizer.pad_id,
        "mask_truncated": c.rewards.overlong_masking,
        "sharding": layout.row_sharding,
    }
    (name, hyperparameters), files = loss_arguments(c), None
    weights = reward_arguments(c)[0]
    credit = {"credit": c.loss.credit, "environment_weight": weights.get(rewards.ENVIRONMENT, 0.0)}
    if c.log.rollouts_every:
        numbers = token_numbers(losses.find_loss(name), **hyperparameters)
        files = RolloutFiles(folder.files, experiment.tokenizer, programs.logprobs, numbers, c.log.rollouts_every)
    return Algorithm(
        collector=make_collector(experiment, own, scorer, journal),
        pack=lambda groups, minibatches: data.pack(groups, packing_shape(layout), minibatches=minibatches, **packed),
        advantages=None
        if learner.critic
        else advantages_fn(c.loss.advantage, name, [*weights.values()], **credit, **hyperparameters),
        token_rewards=functools.partial(token_rewards, **credit),
        programs=programs,
        reference=make_reference(layout, folder),
        decoupled=c.rollout.max_staleness > 0 and losses.carried_ratio(c.loss.sampler_correction) is not None,
        updates_per_step=c.train.updates_per_step,
        epochs=c.train.epochs,
        after_updates=None if files is None else files.after_updates,
        routing=make_routing(experiment, own),
    )


def make_routing(experiment: Experiment, own: rollout.Rollout) -> Routing | None:
    """What measures the routers of a model with experts; None for a dense model.

    Sampler and trainer are compared at the steps of `log.rollouts_every`, where one process samples by an engine of its
    own with the weights that it trains.
    """
    c, experts, every = experiment.config, experiment.layout.model.experts, experiment.config.log.rollouts_every
    if experts is None:
        return None
    if own.engine is None or c.rollout.max_staleness or jax.process_count() > 1 or not every:
        return Routing(experts.count)
    sampling = experiment.sampling(c.rollout.temperature)
    replay = functools.partial(rollout.replay, own.engine, sampling=sampling)
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    return Routing(experts.count, every, own.engine.decoding.slots, replay, cuts)


def make_training_rollout(experiment: Experiment, params: Any, base: models.Base | None = None) -> rollout.Rollout:
    """The rollout of the config's driver: in this process, or by servers.

    With a base, `params` are the adapters beside it. Raises ValueError if the fields of servers contradict each other.
    """
    if not rollout.find_driver(experiment.config.rollout.driver).remote:
        return make_rollout(experiment.layout, params, base)
    from rpg_jax.runs.served_trainer import make_served  # not every installation has what it needs

    return make_served(experiment, params, base)


def make_drift(experiment: Experiment, algorithm: Algorithm, folder: storage.Folder) -> Drift:
    """The measure of the policy's distance to the policy before the first step, which the run's folder keeps.

    Raises:
      ValueError: evaluations draw from another distribution than the log-probabilities are of.
    """
    c = experiment.config
    r, exact = c.rollout, (c.rollout.temperature, 1.0, 0, 0.0)
    if (c.evaluation.temperature, r.top_p, r.top_k, r.min_p) != exact:
        raise ValueError(
            "evaluation.drift needs evaluation.temperature=rollout.temperature, rollout.top_p=1, top_k=0 and min_p=0: "
            "otherwise completions are no samples of the policy that the log-probabilities are of"
        )
    snapshots, like = Snapshots(folder.home / "initial"), experiment.layout.abstract_trained
    return Drift(snapshots, like, lambda groups: algorithm.pack(groups, 1), algorithm.programs.logprobs)


def make_collector(
    experiment: Experiment,
    own: rollout.Rollout,
    scorer: rewards.Scorer,
    journal: rollout.GroupJournal | None,
) -> Collector:
    """The collector of a step's groups, which samples in turn with training or ahead of it.

    Raises:
      ValueError: sampling ahead is impossible here.
    """
    c, dynamic = experiment.config, experiment.config.dynamic_sampling
    stream = data.PromptStream(experiment.task.train, seed=c.seed)
    sizes = {"temperature": c.rollout.temperature, "group_size": c.rollout.group_size, "seed": c.seed}
    generator = make_generator(experiment, own, scorer, **sizes, journal=journal)
    rule = None
    if dynamic.enabled:
        rule = DynamicSampling(dynamic.oversample, dynamic.max_batches, dynamic.surplus)

    def collected(step: int, carried: Sequence[data.Group], share: float):
        return collect(
            stream.take,
            generator,
            prompts_per_step=c.rollout.prompts_per_step,
            step=step,
            dynamic=rule,
            pending=carried,
            share=share,
            overprovision=c.rollout.overprovision,
            max_failures=c.rewards.max_failures,
        )

    parts = collected, generator.take_errors, own, stream
    if not c.rollout.max_staleness:
        return Collector(*parts)
    return AheadCollector(
        *parts,
        max_staleness=c.rollout.max_staleness,
        steps=c.train.steps,
        swap=c.rollout.swap,
    )


def make_reference(layout: Layout, folder: storage.Folder) -> Reference:
    """The config's reference policy, with its snapshots in the run's folder."""
    c, snapshots = layout.config, Snapshots(folder.home / "reference")
    memory: Literal["disk", "device", "host"] = "device" if c.reference.resident else "disk"
    if "reference" in offloaded(c):
        memory = "host"
    return Reference(reference_rule(c), snapshots=snapshots, like=layout.abstract_trained, memory=memory)
