"""The sampling half of a step: the groups that it generates, trains and carries over to the next step."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from rpg_jax.data import Group, Problem, PromptStream
from rpg_jax.data.groups import decode_groups, encode_groups
from rpg_jax.rollout import Rollout
from rpg_jax.training.generate import GroupGenerator

UNKNOWN_SHARE = 0.5
"""The share of informative groups that is assumed before a run has generated a group."""

_DEVIATIONS = 2.0  # to spare: without them, every second batch would be too small
_LARGEST = 10  # in units of prompts_per_step: an estimate of a small share may be far off


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Generates batches until enough groups are informative (DAPO, arXiv:2503.14476, section 3.2); see
    `Group.informative`.

    Attributes:
      oversample: prompts of a batch, in units of prompts_per_step. 0: as many as should fill the step (`batch_size`).
      max_batches: the most batches of a step, which then trains its informative groups; ValueError if it has none.
      surplus: what to do with informative groups that the step does not need. "drop" forgets them. "carry" hands at
        most as many as one step needs to the next step, which trains them first, and forgets the rest.
    """

    oversample: int = 1
    max_batches: int = 20
    surplus: str = "drop"

    def batch_size(self, prompts_per_step: int, *, missing: int, share: float) -> int:
        """Returns the number of prompts in the next batch: `oversample` times `prompts_per_step`, or with `oversample`
        0 the number ceil((m + 2 sqrt(m (1 - p))) / p), at most 10 prompts_per_step.

        m = `missing` informative groups need m / p prompts in the mean, where p = `share` in (0, 1] of the groups is
        informative. The square root is the standard deviation of the number of informative groups.
        """
        if self.oversample:
            return self.oversample * prompts_per_step
        wanted = (missing + _DEVIATIONS * math.sqrt(missing * (1 - share))) / share
        return math.ceil(min(wanted, _LARGEST * prompts_per_step))


@dataclasses.dataclass(frozen=True)
class Collected:
    """The groups of a step.

    Every group is in exactly one of `trained`, `carried` and `dropped`, or it is uninformative. With dynamic sampling,
    `Group.informative` decides. Without dynamic sampling, a group is uninformative if failures leave nothing to train.

    Attributes:
      generated: the groups that were sampled for this step, in order.
      pending: the groups that the step before carried over.
      trained: the groups to train now; those of `pending` come first. Tokens that earlier weights sampled have their
        behaviour log-probs.
      carried: the groups for the next step to train.
      dropped: informative groups that no step trains.
      first_batch: with dynamic sampling, the number of groups that the first batch generated; None without it, or if
        the step generated no batch.
      errors: the number of failed verdicts by kind.
      staleness: metrics of the age of the weights that sampled the groups, by name; {} from a plain `Collector`.
    """

    generated: list[Group]
    pending: list[Group]
    trained: list[Group]
    carried: list[Group] = dataclasses.field(default_factory=list)
    dropped: list[Group] = dataclasses.field(default_factory=list)
    first_batch: int | None = None
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    staleness: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> np.ndarray:
        """Weights f64[n] of the n generated groups that have a verdict, for unbiased means of a step. They sum to 1.

        Σ w_i x_i = q mean(x | informative) + (1 − q) mean(x | uninformative)

        q is the share of informative groups in the first batch, or in all groups without dynamic sampling: then every
        weight is 1/n. A step stops as soon as enough groups are informative. So its last batch tends to have more
        informative groups than the other batches, and a plain mean over the step is biased. The first batch is free of
        the bias: its size is known before its groups are. The mean over informative groups is unbiased, and so is the
        mean over uninformative groups: a step stops for no other reason.
        """
        known = [g for g in self.generated if g.judged.any()]
        first = sum(g.judged.any() for g in self.generated[: self.first_batch])
        informative = np.array([g.informative for g in known], bool)
        kept, q = informative.sum(), informative[: first or None].mean()
        return np.where(informative, q / max(kept, 1), (1 - q) / max(len(informative) - kept, 1))

    @property
    def share(self) -> float | None:
        """The smoothed share of informative groups, (k + 1/2) / (n + 1/2), for k informative groups of n generated. The
        share is above 0 even for k = 0, because `batch_size` divides by it. It is 1 for k = n, and None for n = 0."""
        return _share(self.generated) if self.generated else None

    def accounting(self) -> dict[str, float]:
        """Returns counts of groups, "groups_NAME": generated = kept + uninformative; kept + carried_in = trained +
        carried_out + dropped. The entry `staleness` is carried_in / trained."""
        kept = len(self.trained) + len(self.carried) + len(self.dropped) - len(self.pending)
        return {
            "groups_generated": len(self.generated),
            "groups_uninformative": len(self.generated) - kept,
            "groups_kept": kept,
            "groups_carried_in": len(self.pending),
            "groups_carried_out": len(self.carried),
            "groups_dropped": len(self.dropped),
            "groups_trained": len(self.trained),
            "staleness": len(self.pending) / max(len(self.trained), 1),
        }


Generate = Callable[..., list[Group]]  # problems in, scored groups out: a `training.generate.GroupGenerator`


def collect(
    take: Callable[[int], list[Problem]],
    generate: Generate,
    *,
    prompts_per_step: int,
    step: int,
    dynamic: DynamicSampling | None,
    pending: Sequence[Group] = (),
    share: float = UNKNOWN_SHARE,
    max_failures: float = 1.0,
    begun: list[Group] | None = None,
) -> Collected:
    """Returns the groups of a step.

    Without dynamic sampling a step trains the next `prompts_per_step` problems. With dynamic sampling a step generates
    batches until `prompts_per_step` groups are informative, `pending` groups included, but at most `max_batches`. The
    number of hosts changes no group.

    Args:
      take: returns the next n problems of the stream. A prompt may come twice within a step, at the border of two
        epochs. With the same random numbers the second group would equal the first, so the second group draws other
        random numbers. With dynamic sampling the step leaves the second prompt out.
      generate: takes problems, `step` and `draw`, and returns their scored groups in order; see `GroupGenerator`.
      step: from 0.
      dynamic: None trains every group that has a completion to train on.
      pending: the groups that the step before carried over; read with dynamic sampling only.
      share: the share of informative groups to expect in the first batch.
      max_failures: the largest share of the generated completions that may have failed, see `Group.failed`.
      begun: the step's first batch, already scored; it counts in `max_batches`, and without dynamic sampling it is the
        whole step. None: `generate` makes the first batch too.

    Raises ValueError if a larger share than `max_failures` failed, or so many completions that no group can be trained,
    or if no group was informative after `max_batches`.
    """
    if dynamic is None:
        made = _repetitions_apart(take(prompts_per_step), generate, step) if begun is None else begun
        trained = [g for g in made if g.counted.any()]
        _check_failures(made, step, max_failures if trained else -1.0)
        return Collected(made, [], trained)
    generated = list(begun or ())
    seen = {g.problem.prompt_id for g in generated}
    kept, first_batch = [*pending, *(g for g in generated if g.informative)], len(generated) or None
    _check_failures(generated, step, max_failures)
    for _ in range(dynamic.max_batches - (begun is not None)):
        missing = prompts_per_step - len(kept)
        if missing <= 0:
            break
        now = _share(generated) if generated else share
        drawn = take(dynamic.batch_size(prompts_per_step, missing=missing, share=now))
        fresh = list({p.prompt_id: p for p in drawn if p.prompt_id not in seen}.values())
        seen.update(p.prompt_id for p in fresh)
        made = generate(fresh, step=step) if fresh else []
        first_batch = first_batch or len(made)
        generated += made
        _check_failures(generated, step, max_failures)
        kept += [g for g in made if g.informative]
    if not kept:
        _check_failures(generated, step, max_failures if any(g.counted.any() for g in generated) else -1.0)
        _refuse_uninformative(generated, step, dynamic.max_batches)
    surplus = kept[prompts_per_step:]
    carried = surplus[:prompts_per_step] if dynamic.surplus == "carry" else []
    dropped = surplus[len(carried) :]
    return Collected(generated, list(pending), kept[:prompts_per_step], carried, dropped, first_batch)


def _check_failures(generated: Sequence[Group], step: int, most: float) -> None:
    """Raises ValueError if more than the share `most` of the completions failed, or always if `most` is -1."""
    completions = sum(len(g.completions) for g in generated)
    kinds = collections.Counter(kind for g in generated for kind in g.failed if kind)
    if kinds.total() > most * completions:
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        limit = "so that no group can be trained" if most < 0 else f"more than rewards.max_failures={most:g}"
        raise ValueError(
            f"step {step + 1}: {kinds.total()} of {completions} completions have no verdict ({counted}), {limit}. Look "
            "at the judge, the verifier or the environment, then continue the run with the same command"
        )


def _refuse_uninformative(generated: Sequence[Group], step: int, batches: int) -> NoReturn:
    accuracy = float(np.mean([g.accuracy[g.judged].mean() for g in generated if g.judged.any()]))
    raise ValueError(
        f"step {step + 1}: dynamic sampling kept none of {len(generated)} groups in {batches} batches, with mean "
        f"accuracy {accuracy:.3f}: the problems are too easy or too hard. Change the task, raise "
        "dynamic_sampling.max_batches, or set dynamic_sampling.enabled=False"
    )


def _share(groups: Sequence[Group]) -> float:
    return (sum(g.informative for g in groups) + 0.5) / (len(groups) + 0.5)


def _repetitions_apart(problems: Sequence[Problem], generate: Generate, step: int) -> list[Group]:
    """Generates one group per problem, in order. The n-th group of a prompt uses the random numbers of draw n - 1."""
    occurrences: collections.Counter[int] = collections.Counter()
    by_draw: dict[int, list[int]] = {}
    for i, problem in enumerate(problems):
        by_draw.setdefault(occurrences[problem.prompt_id], []).append(i)
        occurrences[problem.prompt_id] += 1
    made: dict[int, Group] = {}
    for draw, chosen in by_draw.items():
        made |= zip(chosen, generate([problems[i] for i in chosen], step=step, draw=draw), strict=True)
    return [made[i] for i in range(len(problems))]


@dataclasses.dataclass(eq=False, kw_only=True)
class Collector:
    """Collects the groups of a step when the step asks for the groups. So sampling and training take turns.

    Attributes:
      generator: samples the completions of problems by its rollout, and scores them.
      stream: of problems.
      prompts_per_step, dynamic, max_failures: as in `collect`.
      carried: the groups that the last step left for the next one, with their behaviour log-probs. Unless the
        collector `lags`, the trainer notes these before it updates the weights, and sets `carried`.
      share: the share of informative groups to expect, from the last step that generated groups.
    """

    generator: GroupGenerator
    stream: PromptStream
    prompts_per_step: int
    dynamic: DynamicSampling | None = None
    max_failures: float = 1.0
    carried: list[Group] = dataclasses.field(default_factory=list, init=False)
    share: float = dataclasses.field(default=UNKNOWN_SHARE, init=False)
    lags: ClassVar[bool] = False  # the rollout may hold earlier weights than the trainer

    @property
    def rollout(self) -> Rollout:
        """The generator's rollout."""
        return self.generator.rollout

    def take(self, step: int, params: Any, version: int) -> Collected:
        """Returns the groups of `step` (from 0): those carried over, and those sampled now with the rollout's weights.
        Blocks. `params` and `version` are not read. Raises the errors of `collect` and of the rollout."""
        del params, version
        return self._next(step)

    def publish(self, params: Any, version: int) -> None:
        """Hands the weights that a step has trained to the rollout by `sync`; `version` is their number of updates."""
        self.sync(params, version)

    def sync(self, params: Any, version: int) -> None:
        """Makes `params` the weights of the rollout, with the version number `version`. Raises RolloutError if the
        rollout's weights are then not `params` in the rollout's dtype, by checksums: completions would come from
        another policy than the trained policy."""
        self.rollout.sync_weights(params, version)
        self.rollout.weights.verify(params)

    def exclusive(self) -> contextlib.AbstractContextManager:
        """A context: only the caller uses the rollout. A caller that loads other weights calls `sync` at the end."""
        return contextlib.nullcontext()

    def record(self) -> dict[str, Any]:
        """Everything that a resume needs, JSON-able: the stream's position, the groups carried over, and the share."""
        pending = encode_groups(self.carried)
        return {"ahead": None, "stream": self.stream.state(), "pending": pending, "share": self.share}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Goes back to the state that `record` returned. Raises ValueError if a collector that samples ahead wrote it,
        or if the stream has other problems or another seed."""
        if record["ahead"] is not None:
            raise ValueError("the checkpoint was written with rollout.max_staleness above 0 and this run has 0")
        self.stream.restore(record["stream"])
        self.carried, self.share = decode_groups(record["pending"]), record["share"]

    def close(self) -> None:
        """Ends the work in the background. This collector has none."""

    def _next(self, step: int, begun: list[Group] | None = None) -> Collected:
        collected = collect(
            self.stream.take,
            self.generator,
            prompts_per_step=self.prompts_per_step,
            step=step,
            dynamic=self.dynamic,
            pending=self.carried,
            share=self.share,
            max_failures=self.max_failures,
            begun=begun,
        )
        self.share = collected.share or self.share
        return dataclasses.replace(collected, errors=self.generator.take_errors())
