"""Makes the parts of a run from a resolved config. Config ends here: everything below takes arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rpg_jax import data, models, rollout, storage
from rpg_jax.environments.environment import find as find_environment
from rpg_jax.environments.player import Observations, Player
from rpg_jax.environments.stage import Stage
from rpg_jax.models.weights import quantized
from rpg_jax.parallel import hosts
from rpg_jax.rewards.callables import NOTHING, Handed
from rpg_jax.rewards.scorer import Scorer
from rpg_jax.runs import checkpointing, cli, memory, processes, run_folder
from rpg_jax.runs.arguments import environment_options, reward_arguments
from rpg_jax.runs.layout import Layout, make_layout
from rpg_jax.runs.memory import fitting_layout, make_decoding, with_micro_batch
from rpg_jax.runs.problems import Task
from rpg_jax.training.generate import GroupGenerator
from rpg_jax.training.state import shardings_of
from rpg_jax.types import Sampling


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of one config that train, evaluate, sample, serve and export share. The weights are not among them.

    `layout` has the model, the meshes and the resolved config; `task` has the problems. `stage` plays the config's
    environment; None without an environment. `handed` are the rewards, the environment and the loss of a Python
    program, {name in the config: object}."""

    layout: Layout
    tokenizer: data.Tokenizer
    task: Task
    stage: Stage | None = None
    handed: Handed = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ConfigDict:
        """The resolved config. Its mesh, rollout devices and micro-batch may have been changed to fit the devices."""
        return self.layout.config

    def sampling(self, temperature: float) -> Sampling:
        """How completions are drawn at `temperature` (0: greedy), by the config's top_p, top_k, min_p, max_tokens."""
        c = self.config.rollout
        return Sampling(temperature, c.top_p, c.top_k, c.max_tokens, tuple(self.tokenizer.stop_token_ids), c.min_p)

    def close(self) -> None:
        """Ends the worker processes of the environment, if there are any."""
        if self.stage is not None:
            self.stage.close()


@contextlib.contextmanager
def entered(config: ConfigDict, **how: Any) -> Iterator[tuple[Experiment, storage.Folder, contextlib.ExitStack]]:
    """Opens a run that begins or continues. Yields (the run's experiment, its folder, a stack that the end closes).

    All processes of the run enter together. In the block the run's mesh is active, and no other run writes to the
    folder. The keywords `how` go to `open_experiment`. Prints the experiment's notes. Raises ValueError if the folder
    is in use or belongs to another config, or if `processes.check` or `open_experiment` refuses the config."""
    processes.check(config)
    if processes.platform() == "cpu":
        cli.keep_buffers()
    run_folder.use_compilation_cache(config.run.compilation_cache)
    with run_folder.held(config) as folder:
        checkpointing.adopt_tokenizer(config, folder.files)
        experiment = open_experiment(config, folder.files, **how)
        print("".join(f"{note}\n" for note in experiment.task.notes), end="")
        with contextlib.closing(experiment), experiment.layout.activate(), contextlib.ExitStack() as closing:
            yield experiment, folder, closing


def open_experiment(
    config: ConfigDict,
    run_dir: Path,
    *,
    train: bool = True,
    held_out: bool = True,
    answers: bool = True,
    handed: Handed = NOTHING,
) -> Experiment:
    """Makes everything but weights from the resolved `config`. All processes of a run call together.

    Args:
      run_dir: a local folder. It keeps the tokenizer that is trained without `model.tokenizer` and `model.path`.
      train: loads the training problems, and checks that training fits the memory. False: a mesh that does not fit the
        devices is replaced, with a line on stderr.
      held_out: loads the problems of evaluations. Without `train` and `held_out`, no task or environment is imported.
      answers: drops problems without an answer, if the rewards need answers.
      handed: objects of a Python program, {name in the config: object}; `environment.name` may be among the names.

    Raises ValueError if there is no device, or if task, environment, tokenizer, model or layout refuse the config."""
    processes.platform()
    if train:
        _check_model(config)
    plays = train or held_out
    task = Task.from_config(config, train=train, held_out=held_out) if plays else Task([], {}, ())
    with contextlib.ExitStack() as failing:
        stage = make_stage(config, handed) if plays else None
        if stage is not None:
            task = task.opened(failing.enter_context(stage))
        tokenizer = open_tokenizer(config, task, run_dir)
        task = (task.with_answers(config) if answers else task).encoded(tokenizer, config)
        place = config, tokenizer.vocab_size
        layout = memory.checked(with_micro_batch(make_layout(*place))) if train else fitting_layout(*place)
        failing.pop_all()  # from here on the experiment closes the stage
    return Experiment(layout, tokenizer, task, stage, handed)


def _check_model(config: ConfigDict) -> None:
    """Raises ValueError if the model of `model.path` is not supported, or is too short for prompt and completion."""
    if not config.model.path:
        return
    model = models.read_config(models.local_folder(config.model.path, weights=False))
    prompt, completion, context = config.task.max_prompt_tokens, config.rollout.max_tokens, model.rope
    if prompt + completion > context.max_position_embeddings:
        raise ValueError(
            f"task.max_prompt_tokens={prompt} and rollout.max_tokens={completion} are more than the "
            f"{context.max_position_embeddings} tokens that {config.model.path} has positions for: lower one of them"
        )


def make_stage(config: ConfigDict, handed: Handed = NOTHING) -> Stage | None:
    """The environment `environment.name`, from `handed` or imported; None if the config names none. An environment that
    runs in this process is made now; otherwise worker processes make it at the first call, and `close` ends them.
    Raises ValueError for an unknown name, an environment that cannot be made now, or lockstep in several processes."""
    c = config.environment
    if c.name is None:
        return None
    if rollout.find_driver(config.rollout.driver).spans_hosts and jax.process_count() > 1:
        raise ValueError(
            f"rollout.driver=lockstep on {jax.process_count()} processes cannot wait for environment.name={c.name}: "
            "choose orchestrator, or one process"
        )
    declaration = find_environment(c.name, in_process=c.in_process, handed=handed)
    workers, deadline = config.rewards.workers, config.rewards.deadline_seconds
    return Stage(declaration, environment_options(config), workers=workers, deadline_s=deadline)


def open_tokenizer(config: ConfigDict, task: Task, run_dir: Path | None = None) -> data.Tokenizer:
    """The tokenizer in the folder or hub address `model.tokenizer`, else `model.path`. If both are unset, the tokenizer
    is a SentencePiece model, which the first call trains on `task.texts` and keeps in `run_dir`/tokenizer.model; None:
    its file is deleted. All processes of the run call together. Raises ValueError if a folder has no tokenizer, or
    there is no text to train on."""
    if address := config.model.tokenizer or config.model.path:
        return data.load_tokenizer(models.local_folder(address, weights=False))
    if run_dir is None:
        with tempfile.TemporaryDirectory() as scratch:
            return open_tokenizer(config, task, Path(scratch))
    file = run_dir / "tokenizer.model"
    if hosts.is_first() and not file.exists():
        texts = list(task.texts)
        prompts = (m["content"] for own in (task.train, *task.held_out.values()) for p in own for m in p.opening)
        if unknown := set().union(*prompts) - set("\n").union(*texts):
            raise ValueError(
                f"task.name={config.task.name}: prompts have {''.join(sorted(unknown))[:40]!r}, which the texts to "
                "train a tokenizer on lack: `texts()` of a task needs every character"
            )
        data.train_sentencepiece(texts, file)
    content = hosts.all_gather_bytes(file.read_bytes() if hosts.is_first() else b"")[0]
    if not file.exists():  # a local copy of a folder in a bucket
        file.write_bytes(content)
    return data.load_tokenizer(file)


def make_rollout(layout: Layout, params: Any, base: models.Base | None = None) -> rollout.Rollout:
    """A rollout in this process with the policy's weights, by `rollout.driver`. A driver that samples on servers is
    replaced by the orchestrator. Several processes share one list of prompts, unless the driver is lockstep. `params`
    are all weights, a nested dict of arrays, or the adapters of the frozen `base`. `make_decoding` chooses slots,
    lengths and mesh."""
    merge, chosen, decoding = layout.config.model.lora.merged, layout.config.rollout.driver, make_decoding(layout)
    driver = "orchestrator" if rollout.find_driver(chosen).remote else chosen
    if base is not None and not merge:
        base = _decoding_base(layout, decoding, base)
    own = rollout.make_rollout(driver, layout.model, layout.graphdef, params, decoding, base=base, merge=merge)
    if jax.process_count() > 1 and isinstance(own, rollout.Feedable):
        own.split = rollout.Split.TAKEN
    return own


def make_scorer(config: ConfigDict, handed: Handed = NOTHING, *, begins: bool = True) -> Scorer:
    """The scorer of the config's rewards. `handed` has a Python program's rewards, by their names in
    `rewards.parts`. `begins`: the run is new. Then a grade (not 1, 0 or -1) that decides accuracy without
    `rewards.right_above` raises ValueError at a call of the scorer, if it is among the first 1,000 scores. Other grades
    are noted on stderr. Raises ValueError for unknown rewards and options. The caller closes the scorer."""
    c = config.rewards
    weights, options = reward_arguments(config)
    how = {"workers": c.workers, "deadline_s": c.deadline_seconds, "accuracy": c.accuracy, "right_above": c.right_above}
    return Scorer(weights, options=options, handed=handed, begins=begins, **how)


def make_generator(
    experiment: Experiment,
    own: rollout.Rollout,
    scorer: Scorer,
    *,
    temperature: float,
    group_size: int,
    seed: int,
    journal: rollout.GroupJournal | None = None,
    by_length: bool = True,
) -> GroupGenerator:
    """Makes the function from problems to groups of `group_size` completions, which `own` draws and `scorer` scores.
    Random numbers follow from `seed`, step and problem. The config's environment answers each turn of the policy.
    Groups that `journal` (None: no journal) has are not sampled again. `GroupGenerator` explains `by_length`."""
    c, play = experiment.config, None
    if experiment.stage is not None:
        observations = Observations(experiment.tokenizer, thinking=c.task.thinking)
        asked = experiment.stage, experiment.tokenizer.decode, observations
        turn = c.environment.turn_tokens or c.rollout.max_tokens
        play = functools.partial(Player, *asked, max_turns=c.environment.max_turns, turn_tokens=turn)
    read = {"tokenizer": experiment.tokenizer, "thinking": c.task.thinking, "limit": c.task.max_prompt_tokens}
    return GroupGenerator(
        own,
        functools.partial(data.encode_prompt, **read),
        experiment.tokenizer.decode,
        scorer,
        group_size=group_size,
        sampling=experiment.sampling(temperature),
        seed=seed,
        play=play,
        journal=journal,
        by_length=by_length,
    )


def evaluation_generator(experiment: Experiment, own: rollout.Rollout, scorer: Scorer) -> GroupGenerator:
    """The function from problems to scored groups for evaluations: `evaluation.k` completions each, drawn by `own` at
    `evaluation.temperature`, scored by `scorer`, with seeds that training never uses. Earlier calls change nothing."""
    c, seed = experiment.config.evaluation, (experiment.config.seed + 0x5EED) % 2**31
    how: dict[str, Any] = {"temperature": c.temperature, "group_size": c.k, "seed": seed, "by_length": False}
    return make_generator(experiment, own, scorer, **how)


def _decoding_base(layout: Layout, decoding: rollout.Decoding, base: models.Base) -> models.Base:
    """The frozen weights for decoding: `base` itself, the trainer's, or a copy in another layout or in 8 bits."""
    if not memory.has_copy(layout, decoding):
        return base
    weights, where = base.weights, shardings_of(memory.decoding_base(layout, decoding).weights)
    if decoding.int8 and not layout.config.model.lora.int8:
        weights = jax.jit(quantized)(weights)
    own = jax.tree.leaves(where)[0].is_fully_addressable
    if own and not jax.tree.leaves(weights)[0].is_fully_addressable:
        return dataclasses.replace(base, weights=hosts.local_copies(weights, where))
    return dataclasses.replace(base, weights=jax.device_put(weights, where))
