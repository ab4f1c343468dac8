"""Supervised training on demonstrations: its config, its batches, its trainer. A step of a supervised run is one
update. `evaluate`, `sample`, `serve` and `export` take the run's folder, and the same command continues the run. A warm
start before reinforcement learning has the same batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rpg_jax import data, losses
from rpg_jax.environments.player import Observations
from rpg_jax.losses import Metrics
from rpg_jax.parallel import hosts
from rpg_jax.runs.evaluation import HeldOut
from rpg_jax.runs.experiment import Experiment, entered, evaluation_generator, make_rollout, make_scorer
from rpg_jax.runs.layout import row_shape
from rpg_jax.runs.learner import Learner, init_params, learner_programs, make_learner, no_params
from rpg_jax.runs.logs import RunLog
from rpg_jax.runs.problems import Demonstration
from rpg_jax.runs.session import Session, Trainer, host_metrics
from rpg_jax.training.heartbeat import beat
from rpg_jax.training.loop import Step
from rpg_jax.training.measures import Guard, sum_and_weight
from rpg_jax.training.objective import Objective, supervised_loss
from rpg_jax.training.state import TrainState
from rpg_jax.training.step import Programs
from rpg_jax.types import Batch, Completion, Count, Turns

_POOL = 16  # demonstrations for each row, before they are packed: few rows stay half empty
PASSES = 3  # over the demonstrations, where warm_start.epochs is not set
WARMUP = 20  # updates, over which the learning rate rises
NO_BASELINE = "leave_one_out"  # an advantage without a learned baseline


def run(config: ConfigDict) -> int:
    """Runs or resumes supervised training to the last update. `config` comes from `supervised_config`, and has values
    for `warm_start.epochs` and `run.name`. Returns 0, or 128 plus the number of the signal that stopped the run after
    it saved. Raises ValueError if the config has adapters (all weights are trained here), has `run.start_from`, or does
    not fit, and `cli.Ended` if the open run cannot go on."""
    if config.model.lora.rank:
        raise ValueError(
            f"model.lora.rank={config.model.lora.rank}: supervised training changes all weights; set it to 0 here, and "
            "train adapters on the result by --config.model.path"
        )
    if config.run.start_from:
        raise ValueError(
            f"run.start_from={config.run.start_from}: supervised training begins with weights alone. Export the run, "
            "and give --config.model.path"
        )
    with entered(config, answers=False) as (experiment, folder, closing):
        session = Session(experiment, folder, closing)
        session.begin(*make_trainer(experiment, session))
        return session.to_the_end()


def make_trainer(experiment: Experiment, session: Session) -> tuple[_SupervisedTrainer, Any]:
    """(the trainer of a run, its first weights: random, loaded, or zeros for a run that resumes). Tokenizes all
    demonstrations to check them, and says on stderr how many of them are cut. The rollout and the scorer of evaluations
    end with the session. Raises ValueError if there is no demonstration."""
    tell_cuts(experiment)
    guard = Guard(math.inf, remedy="lower warm_start.learning_rate")
    batches = Demonstrations(experiment, experiment.config.warm_start.epochs)
    last = Demonstrations(experiment, experiment.config.warm_start.epochs).count()
    learner, programs = supervised_learner(experiment, last)
    params = (init_params if session.checkpointing.is_new else no_params)(experiment.layout)
    held_out = None
    every = experiment.task.held_out.items()
    if sets := {name: kept for name, problems in every if (kept := [p for p in problems if p.answer])}:
        scorer = session.closing.enter_context(make_scorer(experiment.config))
        own = make_rollout(experiment.layout, params)
        session.closing.callback(own.close)
        generate = evaluation_generator(experiment, own, scorer)
        held_out = HeldOut(sets, generate, learner.optimizer, log=session.log)
    trainer = _SupervisedTrainer(
        learner=learner,
        guard=guard,
        last=last,
        experiment=experiment,
        programs=programs,
        batches=batches,
        held_out=held_out,
        log=session.log,
    )
    return trainer, params


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SupervisedTrainer(Trainer):
    """Trains on demonstrations. `held_out` scores problems that have an answer; None: no problem has one."""

    title = "sft"
    unit = "update"
    experiment: Experiment
    programs: Programs
    batches: Demonstrations
    held_out: HeldOut | None
    log: RunLog

    def step(self, state: TrainState, number: int) -> Step:
        began = time.perf_counter()
        rate = float(self.learner.optimizer.learning_rate(int(state.updates)))
        state, metrics = self.programs.update(state, next(self.batches))
        tokens = float(metrics["loss"][1])  # waits for the update
        values = losses.divided(metrics)
        values["nll"] = values.pop("loss")
        seconds = time.perf_counter() - began
        values |= {"learning_rate": rate, "epoch": self.batches.epoch, "seconds": seconds}
        values |= {"tokens_per_second": tokens / seconds, **host_metrics()}
        return Step(number, state, values, [values], fault=self.guard.fault(number, values, [values]))

    def evaluate(self, state: TrainState, number: int) -> dict[str, float]:
        """Metrics by name: the loss of held-out demonstrations, nats per token, and scores where there are answers."""
        found: dict[str, float] = {}
        for name, problems in self.experiment.task.held_out.items():
            beat(f"the evaluation of {name} after update {number}")
            loss = _held_out_loss(self.experiment, self.programs, state.params, problems)
            found |= {} if loss is None else {f"held_out_nll/{name}": loss}
        mean = {"held_out_nll": float(np.mean([*found.values()]))} if found else {}
        self.log.drop_samples(number)  # an evaluation that a kill ended may have left completions
        if self.held_out is None:
            return mean | found
        self.held_out.generate.rollout.sync_weights(state.params, number)
        return mean | found | self.held_out.scores_of(state.params, number)

    def record(self) -> dict[str, Any]:
        return {"supervised": self.batches.state()}

    def restore(self, record: Mapping[str, Any]) -> None:
        self.batches.restore(record["supervised"])


def supervised_config(config: ConfigDict) -> ConfigDict:
    """A locked copy of `config`, changed for supervised training: AdamW with `warm_start.learning_rate` and fixed other
    fields of `optimizer`, completions of at most `warm_start.max_tokens` tokens if this field is set, no learned
    baseline, and `warm_start.enabled`."""
    own = config.copy_and_resolve_references()
    c = own.warm_start
    with own.unlocked():
        c.enabled = True
        own.rollout.max_tokens = c.max_tokens or config.rollout.max_tokens
        own.optimizer.update(name="adamw", learning_rate=c.learning_rate, warmup=f"{WARMUP} updates", b1=0.9, b2=0.999)
        own.optimizer.update(eps=1e-8, weight_decay=0.0, max_grad_norm=1.0, decayed="all")
        own.optimizer.update(schedule="constant", final_rate=0.0, decay_until=None)
        if config.loss.advantage in losses.LEARNED_ADVANTAGES:
            own.loss.advantage = NO_BASELINE
    return own.lock()


def supervised_learner(e: Experiment, updates: int | None = None) -> tuple[Learner, Programs]:
    """(the learner of a config from `supervised_config`, programs that minimise the mean negative log-likelihood of
    demonstrations). Unless `warm_start.schedule` is "constant", the learning rate falls until update `updates`, and
    None raises ValueError."""
    schedule = e.config.warm_start.schedule
    if schedule != "constant" and updates is None:
        raise ValueError(f"warm_start.schedule={schedule} needs an end: set warm_start.epochs")
    end = None if updates is None else Count(max(updates, WARMUP + 1), "updates")
    learner = make_learner(e.layout, supervised=True, schedule=schedule, decay_until=end)
    return learner, learner_programs(e.layout, learner, Objective(supervised_loss), temperature=1.0)


def tell_cuts(e: Experiment) -> None:
    """Says on stderr how many demonstrations lose their end to `rollout.max_tokens`; nothing if none does. Raises
    ValueError as `examples_of`."""
    limit, given = e.config.rollout.max_tokens, e.task.to_imitate
    parts = (examples_of(e, given[i : i + 256], cut=False) for i in range(0, len(given), 256))
    lengths = [len(example.completions[0].tokens) for part in parts for example in part]
    longer = sum(length > limit for length in lengths)
    if longer and hosts.is_first():
        cut = f"{longer} of {len(lengths)} demonstrations are cut to {limit} tokens, the longest has {max(lengths)}"
        print(f"{cut}: raise warm_start.max_tokens", file=sys.stderr)


def examples_of(e: Experiment, problems: Sequence[data.Problem], *, cut: bool = True) -> list[data.Group]:
    """The demonstrations of problems as tokens, an example each: the last `task.max_prompt_tokens` tokens of the prompt
    as the policy sees it, and the first `rollout.max_tokens` (without `cut` all) tokens of the completion to imitate.
    Raises ValueError if a prompt is empty, or the tokenizer gives a token that the model does not have."""
    c, found = e.config, []
    observations = Observations(e.tokenizer, thinking=c.task.thinking)
    for problem, shown in e.task.examples(problems):
        prompt = data.encode_prompt(problem, e.tokenizer, thinking=c.task.thinking)[-c.task.max_prompt_tokens :]
        if not len(prompt):
            raise ValueError(f"problem {problem.prompt_id} has an empty prompt: nothing predicts the first token")
        imitated = _imitated(shown, e.tokenizer, observations, c.rollout.max_tokens if cut else None)
        if (largest := max(prompt.max(initial=0), imitated.tokens.max(initial=0))) >= e.layout.model.vocab_size:
            text, size = e.tokenizer.decode([int(largest)]) or "a special token", e.layout.model.vocab_size
            reason = f"the tokenizer gives token {largest}, {text!r}, and the model has {size}"
            raise ValueError(f"{reason}: take the model's own tokenizer")
        found.append(data.unscored(problem, prompt, [imitated]))
    return found


def _imitated(
    shown: Demonstration, tokenizer: data.Tokenizer, observations: Observations, max_tokens: int | None = None
) -> Completion:
    """Turns a demonstration into a completion, cut to `max_tokens` tokens (None: not cut). Each message of the policy
    ends with a stop token, so that the policy learns to stop. The policy reads the messages of an environment, which
    are marked as observed, and the loss omits them."""
    messages = [{"role": "assistant", "content": shown}] if isinstance(shown, str) else shown
    tokens: list[int] = []
    observed: list[bool] = []
    for own, turn in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        said = [*turn]
        spoken = [token for m in said for token in (*tokenizer.encode(m["content"]), tokenizer.eos_id)]
        ids = spoken if own else observations.encode(said).tolist()
        tokens, observed = tokens + ids, observed + [not own] * len(ids)
    tokens, observed = tokens[:max_tokens], observed[:max_tokens]
    count = 1 + sum(earlier and not later for earlier, later in itertools.pairwise(observed))
    turns = Turns(np.array(observed), np.zeros(count, np.float32)) if any(observed) else None
    return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 0, turns=turns)


def packed(e: Experiment, examples: Sequence[data.Group], shape: data.RowShape) -> list[Batch]:
    """Examples as micro-batches of `shape` on the devices, the last one filled up with empty rows."""
    return data.pack(examples, shape, pad_id=e.tokenizer.pad_id, sharding=e.layout.row_sharding).batches


class Demonstrations:
    """Iterates over batches of demonstrations: for `epochs` passes, or without an end for None. A batch is the list of
    micro-batches of one update, with `warm_start.batch_size` rows or a few more. The attribute `epoch` is the number of
    passes that are drawn, with its fraction. With `train.packed_length` a row holds as many demonstrations as fit, of
    problems drawn together for several batches. Otherwise a row holds one demonstration. Raises ValueError if the task
    has no demonstrations."""

    def __init__(self, e: Experiment, epochs: int | None = None):
        c = e.config
        rows = min(c.train.microbatch_size or c.warm_start.batch_size, c.warm_start.batch_size)
        self._e, self._shape = e, row_shape(c)._replace(rows=rows)
        self._together = -(-c.warm_start.batch_size // rows)  # micro-batches of an update
        given = e.task.to_imitate
        # A problem stands here once for each demonstration, so a batch has `batch_size` demonstrations. A task that has
        # `examples` of its own makes the demonstrations of a problem when the problem is drawn.
        problems = [dataclasses.replace(p, demonstrations=(text,)) for p in given for text in p.demonstrations] or given
        if not problems or not e.task.examples(problems[:1]):
            raise ValueError(
                f"no problem of task.name={c.task.name!r} has a demonstration: give rows a `demonstration` or "
                "`completion`, or `messages` that end with the assistant's turn, give a class of your own `examples`, "
                "set warm_start.train, or leave the warm start out, by warm_start.enabled=False"
            )
        self._total = None if epochs is None else epochs * len(problems)
        self._size, self.epoch = len(problems), 0.0
        self._at_once = c.warm_start.batch_size * (_POOL if self._shape.packed else 1)
        self._stream = data.PromptStream(problems, seed=c.warm_start.seed)
        self._drawn, self._used, self._begun = 0, 0, (0, self._stream.state())
        self._pool: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The micro-batches of the next update. Raises StopIteration after the last pass."""
        while not (batches := list(itertools.islice(self._pool, self._together))):
            self._begun, self._used = (self._drawn, self._stream.state()), 0
            if not (problems := self._next_problems()):
                raise StopIteration
            self._pool = iter(packed(self._e, examples_of(self._e, problems), self._shape))
        self._used += 1
        return batches

    def _next_problems(self) -> list[data.Problem]:
        """Draws the problems of the next batches, one for each demonstration. Returns [] after the last pass."""
        left = self._at_once if self._total is None else self._total - self._drawn
        problems = self._stream.take(min(self._at_once, left))
        self._drawn += len(problems)
        self.epoch = self._drawn / self._size
        return problems

    def count(self) -> int:
        """The number of updates of all passes. Call it on a new object: it uses the batches up. Needs `epochs`."""
        each, drawn = self._shape.rows * self._together, iter(self._next_problems, [])
        if not self._shape.packed:  # a demonstration is a row, whatever its tokens are
            return sum(-(-len(self._e.task.examples(problems)) // each) for problems in drawn)
        return sum(-(-data.rows_needed(examples_of(self._e, one), self._shape) // each) for one in drawn)

    def state(self) -> dict[str, Any]:
        """The position after the batches that were taken, as a dict that JSON can hold, for `restore`."""
        packing = [*self._shape[:2]] if self._shape.packed else []
        return {"drawn": self._begun[0], "stream": self._begun[1], "used": self._used, "packing": packing}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to the position `state`. Raises ValueError if `state` has other problems, another seed or another
        packing, which an older run's `state` may lack."""
        now = self.state()["packing"]
        if (was := state.get("packing", now)) != now:
            raise ValueError(
                f"packed demonstrations would be left out or come twice: the run began with {was or 'unpacked rows'}, "
                f"[rows of a micro-batch, tokens of a row], and now has {now or 'unpacked rows'}. Set "
                "train.microbatch_size and train.packed_length as before, or --config.run.overwrite=True"
            )
        self._stream.restore(state["stream"])
        self._drawn, self._pool = state["drawn"], iter(())
        for _ in range(state["used"]):
            next(self)


def several(
    state: TrainState, update: Callable[[TrainState, Any], tuple[TrainState, Any]], batches: Iterator[Any], count: int
) -> tuple[TrainState, list[Any]]:
    """Makes `count` updates, each from the next of `batches`. Returns (the last state, the metrics of each update).
    `update` may donate `state`. Raises StopIteration if there are too few batches."""
    found = []
    for _ in range(count):
        state, metrics = update(state, next(batches))
        found.append(metrics)
    return state, found


def _held_out_loss(e: Experiment, programs: Programs, params: Any, problems: Sequence[data.Problem]) -> float | None:
    """The mean negative log-likelihood of the demonstrations, nats per token; None if there are no demonstrations."""
    examples = examples_of(e, problems)
    if not examples:
        return None
    rows = row_shape(e.config)
    sums: list[Metrics] = []
    for batch in packed(e, examples, rows):
        logprobs = programs.logprobs(params, batch.rows)[0]
        sums.append({"loss": sum_and_weight(-logprobs, batch.mask)})
    return losses.divided(losses.merge(sums))["loss"]
