"""Makes the parts of a run from a resolved config. Config ends here: everything below takes arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from rpg_jax import data, models, rewards, rollout, storage
from rpg_jax.parallel import hosts
from rpg_jax.runs import processes
from rpg_jax.runs.adapters import decoding_base
from rpg_jax.runs.drift import Drift
from rpg_jax.runs.layout import Layout, make_layout, row_shape
from rpg_jax.runs.learner import Learner, learner_programs, offloaded, policy_objective
from rpg_jax.runs.problems import Task, encoder
from rpg_jax.runs.resolve import loss_arguments, reward_arguments
from rpg_jax.runs.rollout_files import RolloutFiles, token_numbers
from rpg_jax.runs.sampling_layout import fitting_layout, make_decoding
from rpg_jax.storage.snapshots import Snapshots
from rpg_jax.training.ahead import AheadCollector
from rpg_jax.training.collect import Collector, collect
from rpg_jax.training.dynamic_sampling import DynamicSampling
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.loop import Algorithm
from rpg_jax.training.objective import advantages_fn
from rpg_jax.training.reference import Reference
from rpg_jax.training.reference_rules import Rule, make_rule
from rpg_jax.types import Count, Sampling

Beat = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What train, evaluate, sample, serve and export share of one config.

    `layout` has the model, the meshes and the config. `notes` are lines for people on splits that lost problems.
    """

    layout: Layout
    tokenizer: data.Tokenizer
    task: Task
    notes: list[str]

    @property
    def config(self) -> ConfigDict:
        """The resolved config; without training problems it may have another mesh, see `fitting_layout`."""
        return self.layout.config

    def sampling(self, temperature: float) -> Sampling:
        """How the config draws completions, at `temperature`."""
        c = self.config.rollout
        return Sampling(temperature, c.top_p, c.top_k, c.max_tokens, tuple(self.tokenizer.stop_token_ids), c.min_p)


def open_experiment(
    config: ConfigDict, run_dir: Path, *, train: bool = True, held_out: bool = True, answers: bool = True
) -> Experiment:
    """Makes everything but weights; keeps the tokenizer in `run_dir`.

    Args:
      train: with the training problems. Without them the layout is one that fits these devices, see `fitting_layout`.
      held_out: with the problems of evaluations.
      answers: without problems that have no answer, where the rewards need answers.

    Raises:
      ValueError: there is no device, or the task, the tokenizer or the layout refuses the config.
    """
    processes.platform()
    task = Task.from_config(config, train=train, held_out=held_out)
    tokenizer = open_tokenizer(config, task, run_dir)
    task, notes = (task.with_answers(config) if answers else task).encoded(tokenizer, config)
    layout = (make_layout if train else fitting_layout)(config, tokenizer.vocab_size)
    return Experiment(layout, tokenizer, task, notes)


def open_tokenizer(config: ConfigDict, task: Task, run_dir: Path) -> data.Tokenizer:
    """The tokenizer of the model's folder; without one, a SentencePiece model trained on the task's texts."""
    if address := config.model.tokenizer or config.model.path:
        return data.load_tokenizer(models.local_folder(address, weights=False))
    file = run_dir / "tokenizer.model"
    if hosts.is_first() and not file.exists():
        data.train_sentencepiece(task.texts, file)
    content = hosts.all_gather_bytes(file.read_bytes() if hosts.is_first() else b"")[0]
    if not file.exists():  # a local copy of a folder in a bucket
        file.write_bytes(content)
    return data.load_tokenizer(file)


def init_params(layout: Layout) -> Any:
    """The weights of `model.path`, or random ones; straight into their shards."""
    m, dtype = layout.config.model, jnp.dtype(layout.config.model.param_dtype)
    if m.path:
        folder = models.local_folder(m.path)
        return models.load(folder, layout.model, param_dtype=dtype, shardings=layout.param_shardings)
    seed = layout.config.warm_start.seed
    return models.init(layout.model, seed=seed, param_dtype=dtype, shardings=layout.param_shardings)[1]


def no_params(layout: Layout) -> Any:
    """Zeros in place of what is trained, which a run's checkpoint has: `model.path` is not read, not even fetched."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.trained_shapes)

    return jax.jit(zeros, out_shardings=layout.trained_shardings)()


def make_rollout(layout: Layout, params: Any, base: models.Base | None = None) -> rollout.Rollout:
    """A rollout in this process with the policy's weights, by the config's driver, or by a worker's usual one.

    With a base, `params` are the adapters beside it.
    """
    chosen, decoding, merge = layout.config.rollout.driver, make_decoding(layout), layout.config.model.lora.merged
    driver = "orchestrator" if rollout.find_driver(chosen).remote else chosen
    if base is not None and not merge:
        base = decoding_base(layout, decoding, base)
    return rollout.make_rollout(driver, layout.model, layout.graphdef, params, decoding, base=base, merge=merge)


def make_scorer(config: ConfigDict, functions: rewards.Functions = rewards.NO_FUNCTIONS) -> rewards.Scorer:
    """The config's rewards; `functions` has those that a Python program handed over."""
    c = config.rewards
    weights, options = reward_arguments(config)
    how: dict[str, Any] = {"workers": c.workers, "deadline_s": c.deadline_seconds, "functions": functions}
    return rewards.make_scorer(weights, options=options, accuracy=c.accuracy, right_above=c.right_above, **how)


def make_generator(
    experiment: Experiment,
    own: rollout.Rollout,
    scorer: rewards.Scorer,
    *,
    temperature: float,
    group_size: int,
    seed: int,
    beat: Beat = lambda: None,
) -> GroupGenerator:
    """The generator of groups of `group_size` completions, which the rollout `own` draws and `scorer` scores."""
    return GroupGenerator(
        own,
        encoder(experiment.tokenizer, experiment.config),
        experiment.tokenizer.decode,
        scorer,
        group_size=group_size,
        sampling=experiment.sampling(temperature),
        seed=seed,
        spans_hosts=rollout.find_driver(experiment.config.rollout.driver).spans_hosts,
        beat=beat,
    )


def evaluation_generator(
    experiment: Experiment, own: rollout.Rollout, scorer: rewards.Scorer, beat: Beat = lambda: None
) -> GroupGenerator:
    """A generator with noise of its own, so that evaluating more or less never changes training."""
    c = experiment.config.evaluation
    seed = (experiment.config.seed + 0x5EED) % 2**31
    sizes = {"temperature": c.temperature, "group_size": c.k}
    return make_generator(experiment, own, scorer, **sizes, seed=seed, beat=beat)


def make_algorithm(
    experiment: Experiment,
    learner: Learner,
    own: rollout.Rollout,
    scorer: rewards.Scorer,
    folder: storage.Folder,
    beat: Beat,
    base: models.Base | None = None,
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
    weights = list(reward_arguments(c)[0].values())
    if c.log.rollouts_every:
        numbers, sizes = token_numbers(name, **hyperparameters), (c.log.rollouts_every, c.log.rollouts_groups)
        files = RolloutFiles(folder.files, experiment.tokenizer, programs.logprobs, numbers, *sizes)
    return Algorithm(
        collector=make_collector(experiment, own, scorer, beat),
        pack=lambda groups, minibatches: data.pack(groups, row_shape(c), minibatches=minibatches, **packed),
        advantages=None if learner.critic else advantages_fn(c.loss.advantage, name, weights, **hyperparameters),
        programs=programs,
        reference=make_reference(layout, folder),
        updates_per_step=c.train.updates_per_step,
        epochs=c.train.epochs,
        after_updates=None if files is None else files.after_updates,
        beat=beat,
    )


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


def make_collector(experiment: Experiment, own: rollout.Rollout, scorer: rewards.Scorer, beat: Beat) -> Collector:
    """The collector of a step's groups, which samples in turn with training or ahead of it.

    Raises:
      ValueError: sampling ahead is impossible here.
    """
    c, dynamic = experiment.config, experiment.config.dynamic_sampling
    stream = data.PromptStream(experiment.task.train, seed=c.seed)
    sizes = {"temperature": c.rollout.temperature, "group_size": c.rollout.group_size, "seed": c.seed}
    generator = make_generator(experiment, own, scorer, **sizes, beat=beat)
    rule = None
    if dynamic.enabled:
        rule = DynamicSampling(dynamic.oversample, dynamic.max_batches, dynamic.on_shortage, dynamic.surplus)

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
        )

    parts = collected, generator.take_errors, own, stream
    if not c.rollout.max_staleness:
        return Collector(*parts)
    return AheadCollector(
        *parts,
        max_staleness=c.rollout.max_staleness,
        steps=c.train.steps,
        swap=c.rollout.swap,
        decoupled=c.loss.sampler_correction not in (None, "anchor"),
    )


def make_reference(layout: Layout, folder: storage.Folder) -> Reference:
    """The config's reference policy, with its snapshots in the run's folder."""
    c, snapshots = layout.config, Snapshots(folder.home / "reference")
    memory: Literal["disk", "device", "host"] = "device" if c.reference.resident else "disk"
    if "reference" in offloaded(c):
        memory = "host"
    return Reference(reference_rule(c), snapshots=snapshots, like=layout.abstract_trained, memory=memory)


def reference_rule(config: ConfigDict) -> Rule:
    """When the config's reference moves."""
    c = config.reference
    every = Count.parse(c.every, "reference.every")
    return make_rule(c.rule, every=every, kl_threshold=c.kl_threshold, kl_decay=c.kl_decay)
